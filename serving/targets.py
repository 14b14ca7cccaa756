"""What vLLM has to know of an artifact, whatever it was compiled for, and how a rank of it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.cpu import load_cpu
from nxdi_qwen.compile.manifest import NEURON_CONFIG
from nxdi_qwen.compile.neuron_application import NeuronSlots, load_application
from nxdi_qwen.compile.neuron_artifact import open_neuron_artifact
from nxdi_qwen.compile.neuron_options import check_neuron_target
from nxdi_qwen.compile.slot_runner import SlotRunner
from nxdi_qwen.compile.source import DTYPES
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.partition import Parallel
from nxdi_qwen.modeling.state import StateDescription, describe_state


class SlotModel(Protocol):
    """Requests in slots; see `SlotRunner`."""

    @property
    def lengths(self) -> list[int]: ...

    def prefill(self, slot: int, ids: Sequence[int]) -> Tensor: ...

    def prefill_blocks(self, slot: int, ids: Sequence[int]) -> Iterator[Tensor]: ...

    def decode(self, tokens: Mapping[int, int]) -> dict[int, Tensor]: ...


@dataclass(frozen=True)
class Target:
    """`processes` run it, each with its rank; `description` is one rank's state; `prompt_logprobs`: whether the logits
    of a prompt's tokens can be had; `load(rank)` makes it ready in this process.
    """

    name: str
    dtype: str
    processes: int
    description: StateDescription
    prompt_logprobs: bool
    load: Callable[[int], SlotModel]

    @property
    def slots(self) -> int:
        return self.description.slots

    @property
    def max_length(self) -> int:
        return self.description.max_length


def open_target(folder: Path) -> Target:
    """Checks an artifact of the target cpu or neuron and loads nothing. Raises InputError for anything else."""
    return _neuron(folder) if (folder / NEURON_CONFIG).is_file() else _cpu(folder)


def _cpu(folder: Path) -> Target:
    manifest = open_artifact(folder)
    parallel = Parallel(manifest.degree, 0, manifest.expert_degree)
    return Target(
        name=manifest.source["name"],
        dtype=manifest.dtype,
        processes=manifest.degree,
        description=describe_state(
            manifest.model, manifest.slots, manifest.max_length, DTYPES[manifest.dtype], parallel
        ),
        prompt_logprobs=True,
        load=lambda rank: SlotRunner(load_cpu(folder, manifest, rank)),
    )


def _neuron(folder: Path) -> Target:
    artifact = open_neuron_artifact(folder)
    if not artifact.returns_logits:
        raise InputError(f"{folder} returns tokens, and vLLM samples from logits: compile without --on-device-sampling")
    check_neuron_target()
    return Target(
        name=folder.resolve().name,
        dtype=artifact.dtype,
        processes=1,  # NxDI drives all cores of its degree from one
        description=artifact.state,
        prompt_logprobs=False,
        load=lambda rank: NeuronSlots(load_application(artifact), artifact.slots),
    )
