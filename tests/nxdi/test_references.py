"""The stored references are what Hugging Face gives for the checkpoints that are drawn, and this package's model
agrees with them. What needs Hugging Face is skipped where another transformers is installed."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.executor import EagerExecutor
from nxdi_qwen.compile.slot_runner import SlotRunner
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.errors import InputError
from tests.comparison import relative
from tests.nxdi import references
from tests.nxdi.references import (
    DECODE_STEPS,
    FAMILY_NAMES,
    FOLDER,
    LENGTHS,
    NAMES,
    reference,
    write_checkpoint,
)

TRANSFORMERS = "5.24.0"
SAME = 3e-6  # 0 on the CPU that wrote the references; torch's code for other instruction sets differs by up to 1.5e-6
INSTALLED = importlib.metadata.version("transformers") if importlib.util.find_spec("transformers") else "none"
needs_hugging_face = pytest.mark.skipif(
    INSTALLED != TRANSFORMERS, reason=f"needs transformers {TRANSFORMERS}; installed: {INSTALLED}"
)
CASES = [
    (name, case) for name in FAMILY_NAMES for case in ("bfloat16", "all_experts") if getattr(reference(name), case)
]


@functools.cache
def runner(name: str, **form: bool) -> SlotRunner:
    """This package's float32 model of a fixture, with one slot."""
    with tempfile.TemporaryDirectory() as folder:
        model = ModelSource.from_checkpoint(write_checkpoint(name, Path(folder), **form)).load(torch.float32)
    return SlotRunner(EagerExecutor(model, slots=1, max_length=192, buckets=Buckets.choose(192)))


def our_logits(name: str, prompt: Tensor, continuation: Tensor) -> Tensor:
    """[1 + steps, V]: as `Prompt.logits`."""
    first = runner(name).prefill(0, prompt.tolist())
    return torch.stack([first, *(runner(name).decode({0: token})[0] for token in continuation.tolist())])


@needs_hugging_face
@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_gives_the_stored_logits(name: str) -> None:
    from tests.hf_fixtures import measured_decay, reference_logits, reference_steps
    from tests.nxdi.make_references import load_model

    model, stored = load_model(name), reference(name)
    for length in (2, 130):
        prompt = stored.prompts[length]
        assert relative(reference_steps(model, prompt.ids, prompt.continuation).logits, prompt.logits) <= SAME
    if stored.every is not None:
        assert relative(reference_logits(model, stored.prompts[130].ids), stored.every) <= SAME
    decays = measured_decay(model, stored.prompts[130].ids).values()
    assert 0 < -torch.cat([g.flatten() for g in decays]).mean() < 0.05


@needs_hugging_face
@pytest.mark.parametrize(("name", "case"), CASES)
def test_hugging_face_gives_the_stored_bfloat16_run(name: str, case: str) -> None:
    from tests.nxdi.make_references import bfloat16_results, load_model

    stored = getattr(reference(name), case)
    model = load_model(name, rounded=True, all_experts=case == "all_experts")
    again = bfloat16_results(case, model, stored.ids)
    assert relative(again[f"{case}.exact.logits"], stored.exact.logits) <= SAME
    # Rounding in 16 bit depends on the order of sums, and so on the machine: nearly all of it is the same.
    error, again_error = (
        (run - stored.exact.logits).abs().mean()
        for run in (stored.theirs.logits, again[f"{case}.theirs.logits"].float())
    )
    assert 0.9 < again_error / error < 1.1
    assert torch.equal(again[f"{case}.exact.experts"].long(), stored.exact.experts)


@needs_hugging_face
@pytest.mark.parametrize("name", NAMES)
def test_the_recorded_checkpoint_is_that_of_the_fixture(name: str, tmp_path: Path) -> None:
    from tests.hf_fixtures import FIXTURES
    from tests.nxdi.make_references import record_checkpoint

    assert tuple(FIXTURES) == NAMES
    record_checkpoint(name, tmp_path)
    for file in ("config.json", "generation_config.json", "tensors.json"):
        assert (tmp_path / file).read_text() == (FOLDER / name / file).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_our_model_agrees(name: str) -> None:
    stored = reference(name)
    for length in LENGTHS:
        prompt = stored.prompts[length]
        steps = DECODE_STEPS if length in (1, 130) else 1
        actual = our_logits(name, prompt.ids, prompt.continuation[:steps])
        assert relative(actual, prompt.logits[: steps + 1]) <= 1e-5, length
    if stored.every is not None:
        assert relative(runner(name).prefill_all_logits(0, stored.prompts[130].ids.tolist()), stored.every) <= 1e-5
    for run in stored.greedy[:2]:
        logits = our_logits(name, run.ids, run.tokens[:-1])
        clear = run.margins > 1e-4
        assert torch.equal(logits.argmax(dim=-1)[clear], run.tokens[clear])
        best = logits.topk(2).values
        torch.testing.assert_close((best[:, 0] - best[:, 1]) / logits.abs().amax(-1), run.margins, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_our_model_agrees_on_rounded_weights(name: str, case: str) -> None:
    stored = getattr(reference(name), case)
    ours = runner(name, rounded=True, all_experts=case == "all_experts")
    assert relative(ours.prefill_all_logits(0, stored.ids.tolist()), stored.exact.logits) <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored(name: str) -> None:
    stored = reference(name)
    for length, prompt in stored.prompts.items():
        assert (prompt.ids.shape, prompt.continuation.shape) == ((length,), (DECODE_STEPS,))
        assert (prompt.logits.shape, prompt.logits.dtype) == ((1 + DECODE_STEPS, 272), torch.float32)
    assert len(stored.prompts[64].ids.unique()) == 1
    for pad in (0, 256):
        assert {length for length, prompt in stored.prompts.items() if pad in prompt.ids} >= {63, 65, 130}
    assert 256 in stored.prompts[4].ids and stored.prompts[63].ids[-1] == stored.prompts[65].ids[0] == 256
    assert [prompt.ids.numel() for prompt in stored.ragged] == list(references.RAGGED_LENGTHS)
    margins = torch.cat([run.margins for run in stored.greedy])
    assert margins.shape == (72,) and (margins < 1e-4).sum() == 0
    for run in (stored.bfloat16, stored.all_experts):
        if run and run.exact.experts.numel():
            experts = json.loads((FOLDER / name / "config.json").read_text())["num_experts"]
            for layer in range(run.exact.experts.shape[1]):  # every expert is chosen
                assert run.exact.experts[:, layer].unique().tolist() == list(range(experts))


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FOLDER / "qwen3_5", tmp_path / "qwen3_5")
    file = tmp_path / "qwen3_5" / "tensors.json"
    recorded = json.loads(file.read_text())
    file.write_text(json.dumps(recorded | {"sha256": recorded["sha256"][::-1]}))
    monkeypatch.setattr(references, "FOLDER", tmp_path)
    with pytest.raises(InputError, match="draws other weights"):
        write_checkpoint("qwen3_5", tmp_path / "out")


def test_forms_of_a_checkpoint(tmp_path: Path) -> None:
    """`rounded` keeps float32 but leaves values of bfloat16 only; `all_experts` changes one key."""
    plain, rounded = (
        load_file(write_checkpoint("qwen3_5_moe", tmp_path / key, rounded=key == "rounded") / "model.safetensors")
        for key in ("plain", "rounded")
    )
    for key, tensor in plain.items():
        assert rounded[key].dtype == torch.float32
        assert torch.equal(rounded[key], tensor.bfloat16().float()) and not torch.equal(rounded[key], tensor), key
    config, every = (
        json.loads((write_checkpoint("qwen3_5_moe", tmp_path / "form", all_experts=flag) / "config.json").read_text())
        for flag in (False, True)
    )
    assert every == config | {"num_experts_per_tok": config["num_experts"]} != config
