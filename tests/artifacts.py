"""Checkpoints and artifacts of fixtures, each written once per test session, also where several processes share it."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
from filelock import FileLock
from transformers import PreTrainedModel

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.cpu import CompileOptions, compile_cpu, load_cpu
from nxdi_qwen.compile.executor import EagerExecutor, Executor
from nxdi_qwen.compile.source import DTYPES, ModelSource
from tests.hf_fixtures import FIXTURES, hf_model, save_checkpoint

# One fixture per family; the first has dense layers among MoE, a tied head and another conv kernel.
FAMILY_NAMES = ("qwen3_next_mixed", "qwen3_5", "qwen3_5_moe")
SLOTS, MAX_LENGTH = 3, 240
OPTIONS = CompileOptions(slots=SLOTS, max_length=MAX_LENGTH, buckets=(64,), dtype="float32")


class Served(NamedTuple):
    """An executor, and the Hugging Face model whose weights it has."""

    model: PreTrainedModel
    executor: Executor


@functools.cache
def short_model(name: str) -> PreTrainedModel:
    """The fixture `name` with two layers, one of each kind: what is compiled, because time grows with the layers."""
    spec, short = FIXTURES[name], f"{name}_short"
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    with mock.patch.dict(FIXTURES, {short: dataclasses.replace(spec, config=spec.config | layers)}):
        return hf_model(short)


def checkpoint_of(factory: pytest.TempPathFactory, name: str) -> Path:
    """The checkpoint, with a tokenizer, of `short_model(name)`. To be read only."""
    return _once(factory, f"{name}-checkpoint", lambda at: save_checkpoint(short_model(name), at, tokenizer=True))


def artifact_of(factory: pytest.TempPathFactory, name: str, optimize: bool = False, degree: int = 1) -> Path:
    """The artifact of that checkpoint, of exported programs or compiled with AOTInductor. To be read only."""
    options = dataclasses.replace(OPTIONS, optimize=optimize, degree=degree)
    source = ModelSource.from_checkpoint(checkpoint_of(factory, name))
    form = "optimized" if optimize else "exported"
    return _once(factory, f"{name}-{form}-{degree}", lambda at: compile_cpu(source, at, options))


def served(factory: pytest.TempPathFactory, form: str, name: str) -> Served:
    """`form`: "exported" or "optimized", the short fixture's artifact, or "eager", the whole fixture without graphs."""
    if form == "eager":
        return _eager(name)
    return Served(short_model(name), _loaded(artifact_of(factory, name, form == "optimized")))


@functools.cache
def _loaded(artifact: Path) -> Executor:
    return load_cpu(artifact, open_artifact(artifact))


@functools.cache
def _eager(name: str) -> Served:
    with tempfile.TemporaryDirectory() as folder:
        source = ModelSource.from_checkpoint(save_checkpoint(hf_model(name), Path(folder)))
        model = source.load(DTYPES["float32"])
    return Served(hf_model(name), EagerExecutor(model, SLOTS, MAX_LENGTH, Buckets((64, 128))))


def _once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, made by the first process that needs it; the others wait."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with FileLock(shared / f"{name}.lock"):
        if not (shared / name).exists():
            make(shared / name)
    return shared / name
