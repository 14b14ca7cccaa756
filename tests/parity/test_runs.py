"""What is in memory during a comparison: one prompt's runs, and one model at a time where the reference is kept."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from nxdi_qwen.compile.source import ModelSource, no_progress
from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.parity.drill import Runs
from nxdi_qwen.parity.records import Prompt
from nxdi_qwen.parity.runs import Sides, run_all
from nxdi_qwen.parity.store import Store
from nxdi_qwen.parity.targets.eager import EagerSide
from nxdi_qwen.parity.targets.huggingface import HuggingFaceSide
from tests.hf_fixtures import hf_model, save_checkpoint

PROMPTS = [Prompt(str(length), tuple(range(length))) for length in (1, 5, 3)]


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return ModelSource.from_checkpoint(save_checkpoint(hf_model("qwen3_5"), tmp_path / "model"))


def test_one_prompt_and_one_model_at_a_time(source: ModelSource, tmp_path: Path) -> None:
    reference, sixteen_bit = (HuggingFaceSide(source, dtype) for dtype in ("float32", "bfloat16"))
    target = EagerSide.of_checkpoint(source, "bfloat16")
    alive: list[weakref.ref[Any]] = []
    models: list[str] = []

    def judge(runs: Runs) -> str:
        gc.collect()
        assert not any(run() is not None for run in alive)
        alive.extend(weakref.ref(run) for run in runs if run is not None)
        models.extend(side.description.dtype for side in (reference, sixteen_bit) if side._model is not None)
        assert isinstance(target.model, HybridCausalLM)
        assert runs.sixteen_bit is not None
        assert runs.reference.forced == runs.target.forced == runs.sixteen_bit.forced
        return runs.reference.prompt.name

    names = run_all(Sides(reference, target, sixteen_bit), PROMPTS, Store(tmp_path / "cache"), judge, no_progress)
    assert names == ["1", "5", "3"] and models == []


def test_what_the_cache_has_lost_is_computed_again(source: ModelSource, tmp_path: Path) -> None:
    """A limit of nothing, and another process that makes room: results do not change."""
    reference, target = HuggingFaceSide(source, "float32"), EagerSide.of_checkpoint(source, "float32")
    folder = tmp_path / "cache"

    def judge(runs: Runs) -> tuple[int, ...]:
        for file in folder.glob("*.safetensors"):
            file.unlink()
        return runs.target.forced

    sides = Sides(reference, target, None)
    kept = run_all(sides, PROMPTS, Store(tmp_path / "other"), lambda runs: runs.reference.forced, no_progress)
    assert run_all(sides, PROMPTS, Store(folder, limit=0), judge, no_progress) == kept
