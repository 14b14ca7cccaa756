"""nxdi-qwen-hardware-report on the real NxDI in its CPU mode, and what it reads of NxDI's own files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nxdi_qwen.compile.neuron_artifact import NeuronArtifact, chosen_bucket, open_neuron_artifact
from nxdi_qwen.compile.neuron_requests import Requests
from nxdi_qwen.scripts import hardware_report as script
from nxdi_qwen.scripts.hardware_report import hardware_report
from tests.command_line import Output, call
from tests.nxdi.calls import LIMIT, MAX_LENGTH
from tests.nxdi.references import FAMILY_NAMES

pytestmark = pytest.mark.nxdi

SLOTS = 3
CONTINUOUS: dict[str, Any] = {
    "batch_size": SLOTS,
    "ctx_batch_size": 1,
    "is_continuous_batching": True,
}
QUICK = ("--prompt-lengths", "1,100", "--new-tokens", 2, "--repeat", 1)
Checkpoint = Callable[[str], Path]


def written(folder: Path, app: Any) -> Path:
    """The folder as NxDI writes it for an application; what the compiler makes is empty."""
    app.config.save(folder)
    (folder / "model.pt").touch()
    (folder / "weights").mkdir()
    for rank in range(app.neuron_config.tp_degree):
        (folder / "weights" / f"tp{rank}_sharded_checkpoint.safetensors").touch()
    return folder


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, checkpoint: Checkpoint
) -> Callable[..., tuple[Output, dict[str, Any]]]:
    """Runs the command on an application that is loaded already."""

    def do(name: str, app: Any) -> tuple[Output, dict[str, Any]]:
        monkeypatch.setattr(script, "check_device", lambda: None)
        monkeypatch.setattr(script, "load_application", lambda artifact: app)
        folder = written(tmp_path / "artifact", app)
        out = tmp_path / "report.json"
        output = call(capsys, hardware_report, "--artifacts", folder, "--model", checkpoint(name), "--out", out, *QUICK)
        return output, json.loads(out.read_text())

    return do


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_report(cpu_app: Callable[..., Any], run: Any, name: str) -> None:
    output, report = run(name, cpu_app(name, **CONTINUOUS))
    assert output.status == 0, report["failures"]
    assert report["device"] == "cpu (NxDI CPU mode)" and "cpu (NxDI CPU mode)" in output.out
    parity = report["parity"]
    assert parity["passed"] and parity["max_rel"] <= LIMIT and parity["mismatches"] == 0
    assert len(parity["prompts"]) == 6 and not parity["skipped"]
    assert [(row["prompt_tokens"], row["rows"]) for row in report["speed"]["tpot"]] == [
        (1, 1),
        (1, SLOTS),
        (100, 1),
        (100, SLOTS),
    ]
    assert report["artifact"]["slots"] == SLOTS and report["artifact"]["max_length"] == MAX_LENGTH


def test_tokens_sampled_by_the_graph(cpu_app: Callable[..., Any], run: Any) -> None:
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig

    app = cpu_app("qwen3_5", on_device_sampling_config=OnDeviceSamplingConfig(), **CONTINUOUS)
    output, report = run("qwen3_5", app)
    assert output.status == 0, report["failures"]
    parity = report["parity"]
    assert parity["compared"].startswith("tokens only") and parity["max_rel"] is None
    assert parity["matches"] == parity["positions"] == 6 * 17


def test_control_state_not_threaded(cpu_app: Callable[..., Any], run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM

    monkeypatch.setattr(NeuronHybridForCausalLM, "_copy_past_key_values", lambda self, outputs: None)
    output, report = run("qwen3_5", cpu_app("qwen3_5", **CONTINUOUS))
    assert output.status == 1 and report["complete"] and report["parity"]["passed"] is False


def test_what_is_read_is_what_neuron_compile_chose(checkpoint: Checkpoint, tmp_path: Path) -> None:
    artifact = compiled(checkpoint("qwen3_5_moe"), tmp_path)
    expected = {
        "dtype": "bfloat16",
        "degree": 2,
        "logical_cores": 1,
        "slots": 5,
        "max_length": 320,
        "context_buckets": (64, 128),
        "decode_buckets": (100, 320),
        "continuation_buckets": (128,),
        "samples": True,
        "returns_logits": False,
    }
    assert {name: getattr(artifact, name) for name in expected} == expected
    artifact.check_length(300, 20)
    assert [file.name[:3] for file in artifact.weights] == ["tp0", "tp1"]


def test_state_and_buckets_are_those_of_nxdi(checkpoint: Checkpoint, tmp_path: Path) -> None:
    from nxdi_qwen.modeling.nxdi.model import describe

    artifact = compiled(checkpoint("qwen3_5_moe"), tmp_path)
    app = loaded(artifact)
    assert artifact.state == describe(app.config)
    wrappers = (
        (app.context_encoding_model, artifact.context_buckets),
        (app.token_generation_model, artifact.decode_buckets),
        (app.continuation_model, artifact.continuation_buckets),
    )
    for wrapper, buckets in wrappers:
        assert wrapper.neuron_config.buckets == list(buckets)
        for length in (1, 63, 64, 65, 99, 100, 101, 127, 128, 319, 320):
            if length <= buckets[-1]:
                target = wrapper.get_target_bucket(None, torch.zeros(1, length))
                assert chosen_bucket(length, buckets) == target, (wrapper.tag, length)


def test_loading_is_nxdis(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration goes through NxDI's file and back, and the application loads from the artifact."""
    from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM

    loads: list[str] = []
    monkeypatch.setattr(NeuronHybridForCausalLM, "load", lambda self, folder: loads.append(folder))
    artifact = compiled(checkpoint("qwen3_5_moe"), tmp_path)
    app = script.load_application(artifact)
    assert loads == [str(artifact.folder)]
    assert app.config.to_json_string() + "\n" == (artifact.folder / "neuron_config.json").read_text()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 129, 130])
def test_every_submodel_gets_inputs_that_it_was_compiled_for(
    checkpoint: Checkpoint, tmp_path: Path, length: int
) -> None:
    """NxD's compiled model finds the graph by the shapes and dtypes of the inputs."""
    app = loaded(compiled(checkpoint("qwen3_5"), tmp_path, buckets=(64,), degree=1, samples=False))
    graphs = Graphs(app)
    requests = Requests(app)
    requests.prefill(3, [7] * length)
    assert graphs.starts == [[start] for start in range(0, length, 64)]
    graphs.starts.clear()
    requests.prefill(0, [7])
    requests.decode({3: 1})
    requests.decode({0: 1, 3: 1})
    assert graphs.starts == [[0], [length], [1, length + 1]]


class Graphs:
    """Takes the place of compiled graphs: refuses inputs that none was traced with; `starts`: positions of the active
    rows in each call.
    """

    def __init__(self, app: Any) -> None:
        self.starts: list[list[int]] = []
        for wrapper in app.models:
            known = {_signature(example) for example in wrapper.input_generator()}
            wrapper.model = functools.partial(self._run, wrapper.tag, known, app.config.model.vocab_size)
            wrapper.is_neuron = lambda: True

    def _run(self, tag: str, known: Any, vocab_size: int, *inputs: torch.Tensor) -> torch.Tensor:
        assert _signature(inputs) in known, f"{tag}: {_signature(inputs)}"
        ids, mask, positions, slots = inputs[:4]
        if ids.shape[1] == 1 and positions.any():
            assert mask.shape[1] > int(positions.max()), "the decode graph does not see all of the cache"
        self.starts.append(positions[slots >= 0, 0].tolist())
        return torch.ones(ids.shape[0], 1, vocab_size)


def _signature(inputs: Sequence[torch.Tensor]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in inputs)


def compiled(
    checkpoint: Path, folder: Path, *, buckets: tuple[int, ...] = (64, 128), degree: int = 2, samples: bool = True
) -> NeuronArtifact:
    """What neuron-compile leaves, without what the compiler makes."""
    from nxdi_qwen.compile.cpu import CompileOptions
    from nxdi_qwen.compile.neuron import application_of
    from nxdi_qwen.compile.neuron_options import NeuronOptions
    from nxdi_qwen.compile.source import ModelSource

    shared = CompileOptions(slots=5, max_length=320, buckets=buckets, dtype="bfloat16", degree=degree)
    options = NeuronOptions(shared, decode_buckets=(100, 320), logical_cores=1, on_device_sampling=samples)
    app = application_of(ModelSource.from_checkpoint(checkpoint), options)
    return open_neuron_artifact(written(folder / "compiled", app))


def loaded(artifact: NeuronArtifact) -> Any:
    """The application as it is read back, with nothing on a device."""
    from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM

    return NeuronHybridForCausalLM(str(artifact.folder))
