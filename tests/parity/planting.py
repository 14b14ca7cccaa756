"""Models with a fault in one layer: that layer's code and weights from a broken copy of the package, the rest sound."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import nxdi_qwen.parity.targets.slots as slots_module
from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.source import DTYPES, ModelSource
from nxdi_qwen.modeling.model import Batch, HybridCausalLM, State, text_positions
from nxdi_qwen.modeling.state import StateDescription, describe_state
from nxdi_qwen.parity.eager_layer import Surroundings, run_eager_layer
from nxdi_qwen.parity.layer_run import LayerCase, LayerRun
from nxdi_qwen.parity.records import Description, Prompt, Run
from nxdi_qwen.parity.targets.eager import EagerSide, read_router
from nxdi_qwen.parity.targets.huggingface import HuggingFaceSide
from nxdi_qwen.parity.targets.tap import ModuleTap, Tap
from tests.fault_injection import copy_package, imported_from
from tests.faults import MODEL, Fault
from tests.hf_fixtures import FIXTURES, hf_model, model_of, save_checkpoint


class Package(NamedTuple):
    """The modules of a copy of the package that are needed of it."""

    model: ModuleType
    state: ModuleType
    context: ModuleType
    source: ModuleType
    slot_runner: ModuleType
    executor: ModuleType

    @classmethod
    def load(cls, place: Path) -> Package:
        names = (
            "modeling.model",
            "modeling.state",
            "modeling.layers.context",
            "compile.source",
            "compile.slot_runner",
            "compile.executor",
        )
        with imported_from(place):
            return cls(*(importlib.import_module(f"nxdi_qwen.{name}") for name in names))


def broken_package(fault: Fault) -> Package:
    with tempfile.TemporaryDirectory() as folder:
        return Package.load(copy_package(Path(folder) / "broken", fault))


class _Given(nn.Module):
    """In place of an embedding: the hidden states themselves, whatever the ids."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x

    def forward(self, ids: Tensor, rank: Tensor) -> Tensor:
        return self.x


class PlantedModel(HybridCausalLM):
    """Runs every layer as a model of its own; layer `planted` with the code and the weights of `broken`."""

    broken: Any
    package: Package
    planted: int

    def _layers(self, batch: Batch, state: State, way: Any, ends: tuple[int, ...]) -> tuple[Tensor, list[State]]:
        x = self.embed_tokens(batch.input_ids, self.rank)
        states: list[State] = [[] for _ in ends]
        for number, layer in enumerate(self.layers):
            mine = number == self.planted
            owner = copy.copy(self.broken if mine else self)
            owner._modules = dict(owner._modules)
            owner.embed_tokens, owner.layers, owner.norm = _Given(x), nn.ModuleList([layer]), nn.Identity()
            run = type(self.broken)._layers if mine else HybridCausalLM._layers
            own_way = self.package.context.Way(way.value) if mine else way
            x, new = run(owner, batch, state[2 * number : 2 * number + 2], own_way, ends)
            for collected, pair in zip(states, new, strict=True):
                collected.extend(pair)
        return x, states


class PlantedSide(EagerSide):
    """The eager model with a fault in layer `planted`; None: in all of the model, where the fault has no layer."""

    def __init__(self, folder: Path, package: Package, planted: int | None, dtype: str) -> None:
        source = ModelSource.from_checkpoint(folder)
        self.package, self.planted = package, planted
        super().__init__(Description("eager", "planted", dtype, {}), source.config, lambda: self._build(folder, dtype))

    def _build(self, folder: Path, dtype: str) -> HybridCausalLM:
        broken = self.package.source.ModelSource.from_checkpoint(folder).load(DTYPES[dtype])
        if self.planted is None:
            return broken  # type: ignore[no-any-return]
        model = ModelSource.from_checkpoint(folder).load(DTYPES[dtype])
        model.layers[self.planted] = broken.layers[self.planted]
        model.__class__ = PlantedModel
        model.broken, model.package, model.planted = broken, self.package, self.planted  # type: ignore
        return model

    def make_executor(self, tokens: int) -> Executor:
        executor = super().make_executor(tokens)
        description = executor.description
        executor.description = self._describe(self.config, description.slots, tokens, DTYPES[self.description.dtype])
        return executor

    def _describe(self, config: Any, slots: int, max_length: int, dtype: torch.dtype) -> StateDescription:
        sound = describe_state(config, slots, max_length, dtype)
        broken = self.package.state.describe_state(config, slots, max_length, dtype)
        tensors = tuple(
            dataclasses.replace(mine, dtype=theirs.dtype) if self.planted in (None, mine.layer) else mine
            for mine, theirs in zip(sound.tensors, broken.tensors, strict=True)
        )
        return StateDescription(slots, max_length, tensors)

    def run(self, prompt: Prompt, forced: Sequence[int] | None, steps: int) -> Run:
        if self.planted is not None:
            return super().run(prompt, forced, steps)
        with mock.patch.object(slots_module, "SlotRunner", self.package.slot_runner.SlotRunner):
            return super().run(prompt, forced, steps)

    def run_layer(self, index: int, case: LayerCase) -> LayerRun:
        positions = self.package.model.text_positions if self.planted is None else text_positions
        return run_eager_layer(self.model, index, case, Surroundings(self._describe, positions))

    @property
    def tap(self) -> Tap:
        # By name: a broken copy's classes are others.
        return ModuleTap(list(self.model.layers), lambda layer: getattr(layer.mlp, "router", None), read_router)


def has_no_layer(fault: Fault) -> bool:
    """Whether the fault stands between the layers or before them: in the model, but not in its class of a layer."""
    return all(edit.file == MODEL for edit in fault.edits) and not fault.name.startswith("outside")


def deep_checkpoint(fixture: str, seed: int, folder: Path, times: int = 2) -> Path:
    """A checkpoint of a fixture with `times` its layers, so that a random layer is one of many."""
    types = list(hf_model(fixture).config.layer_types)
    spec = FIXTURES[fixture]
    deeper = {"num_hidden_layers": times * len(types), "layer_types": types * times}
    return save_checkpoint(model_of(dataclasses.replace(spec, config=spec.config | deeper), seed), folder)


def reference_of(folder: Path, dtype: str = "float32") -> HuggingFaceSide:
    return HuggingFaceSide(ModelSource.from_checkpoint(folder), dtype)
