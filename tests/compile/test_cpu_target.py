"""The CPU target: the choices and their checks, and that an artifact computes what its model does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.cpu import CompileOptions, compile_cpu, load_cpu
from nxdi_qwen.compile.executor import EagerExecutor
from nxdi_qwen.compile.graphs import CONTINUATION, graph_specs
from nxdi_qwen.compile.manifest import Manifest, current_instruction_sets, current_machine
from nxdi_qwen.compile.slot_runner import SlotRunner
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.generation_defaults import GenerationDefaults
from nxdi_qwen.modeling.presets import preset
from nxdi_qwen.modeling.weights import Block, random_blocks
from tests.artifacts import artifact_of
from tests.modeling.weights.synthetic import make_config


def random_source(config: ModelConfig) -> ModelSource:
    """A shape of our own with random weights, as a preset has them."""

    def blocks(dtype: torch.dtype) -> Iterator[Block]:
        return random_blocks(config, dtype, seed=0)

    return ModelSource("tiny", config, GenerationDefaults(), "random-0", (), None, (), (), blocks)


ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ("linear_attention",)}
SOURCE = random_source(make_config("qwen3_5_moe", max_position_embeddings=1000, **ONE_LAYER))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"degree": 3}, "degree 3 does not fit linear_num_key_heads 2"),
        ({"degree": 0}, "degree 0 is out of range: use 1 to 64"),
        ({"expert_degree": 3}, "expert degree 3 does not divide degree 1"),
        ({"degree": 3, "slots": 0, "max_length": 0}, "degree 3 does not fit"),
        ({"slots": 0}, "batch size 0 is not possible: give 1 to 65536"),
        ({"slots": 10**20}, "is not possible: give 1 to 65536"),
        ({"max_length": 0}, "maximum length 0 is out of range: tiny takes 1 to 1000 tokens"),
        ({"max_length": 1001}, "maximum length 1001 is out of range"),
        ({"buckets": (100,)}, "bucket 100 is not on the grid"),
        ({"buckets": (1088,)}, "bucket 1088 is longer than the maximum length 1000"),
        ({"buckets": ()}, "no bucket given"),
        ({"dtype": "float16"}, "dtype float16 is not supported: use one of float32, bfloat16"),
    ],
)
def test_choices_that_do_not_fit(choices: dict[str, object], message: str, tmp_path: Path) -> None:
    options = CompileOptions(**choices)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        compile_cpu(SOURCE, tmp_path / "out", options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("positions", "dtype", "expected"),
    [
        (1000, "bfloat16", (1000, (128, 512, 1024), "bfloat16")),
        (262144, "float32", (2048, (128, 512, 2048), "float32")),
        (128, "float16", (128, (128,), "float32")),
    ],
)
def test_defaults_come_from_the_model(positions: int, dtype: str, expected: tuple[int, tuple[int, ...], str]) -> None:
    config = make_config("qwen3_5", max_position_embeddings=positions, dtype=dtype)
    max_length, buckets, dtype_name = CompileOptions().resolve(random_source(config))
    assert (max_length, buckets.lengths, dtype_name) == expected


def test_choices_win_over_the_model() -> None:
    choices = CompileOptions(max_length=1, buckets=(64,), dtype="float32")
    assert choices.resolve(SOURCE) == (1, Buckets((64,)), "float32")


def test_a_shape_with_random_weights(tmp_path: Path) -> None:
    """In bfloat16, and with a prompt that needs two buckets; progress is told by stage and ends at its total."""
    told: dict[str, list[tuple[int, int]]] = {}
    options = CompileOptions(slots=2, max_length=200, buckets=(128, 64))
    manifest = compile_cpu(SOURCE, tmp_path / "out", options, lambda stage, *at: told.setdefault(stage, []).append(at))
    assert (manifest.dtype, manifest.buckets, manifest.checkpoint_files) == ("bfloat16", (64, 128), {})
    executor = load_cpu(tmp_path / "out", open_artifact(tmp_path / "out", verify=True))
    eager = EagerExecutor(SOURCE.load(torch.bfloat16), 2, 200, Buckets((64, 128)))
    ids = torch.randint(0, 32, (150,), generator=torch.Generator().manual_seed(0)).tolist()
    results = []
    for runner in (SlotRunner(executor), SlotRunner(eager)):
        logits = [runner.prefill_all_logits(1, ids), runner.decode({1: 3})[1][None]]
        results.append(torch.cat(logits))
    assert results[0].shape == (151, 32) and results[0].dtype == torch.float32
    assert results[0].std() > 0.1
    assert (results[0] - results[1]).abs().max() <= 0.02 * results[1].abs().max()
    assert set(told) == {"graphs", "weights"}
    for steps in told.values():
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1]
    assert told["graphs"] == [(n, 10) for n in range(11)]  # two buckets and decode, three parts each, and the head


@pytest.mark.parametrize(("max_length", "continued"), [(128, set()), (129, {64, 128})])
def test_attention_looks_at_the_cache_only_where_a_prompt_may_be_cut(max_length: int, continued: set[int]) -> None:
    specs = graph_specs(preset("qwen3.5-0.8b"), Buckets((64, 128)), 2, max_length)
    continuations = {(spec.part, spec.tokens) for spec in specs if spec.kind == CONTINUATION}
    assert continuations == {("full_attention_dense", tokens) for tokens in continued}
    assert len({spec.name for spec in specs}) == len(specs)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifact_of(tmp_path_factory, "qwen3_5")


def test_weights_stand_once(artifact: Path) -> None:
    for name in Manifest.read(artifact).graphs:
        program = torch.export.load(artifact / "graphs" / f"{name}.pt2")
        assert not program.state_dict, name
        assert all(constant.numel() <= 64 * 64 for constant in program.constants.values()), name


def test_an_artifact_for_another_target_is_refused(artifact: Path) -> None:
    manifest = dataclasses.replace(Manifest.read(artifact), target="neuron")
    with pytest.raises(InputError, match="was compiled for neuron; this runs artifacts of target cpu"):
        load_cpu(artifact, manifest)


@pytest.mark.slow
def test_compiled_code_is_bound_to_this_machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    manifest = open_artifact(artifact_of(tmp_path_factory, "qwen3_5", optimize=True), verify=True)
    assert manifest.optimized and manifest.machine == current_machine()
    assert manifest.instruction_sets == current_instruction_sets()
