"""The manifest of an artifact: what it holds, for which model, made with what."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.generation_defaults import GenerationDefaults
from nxdi_qwen.modeling.state import StateDescription

FORMAT = "nxdi-qwen artifact"
FORMAT_VERSION = 6
MANIFEST_FILE = "manifest.json"
# What the folders of the other targets hold instead.
NEURON_CONFIG = "neuron_config.json"
HLO_REPORT = "report.json"
# Of what Linux lists of a processor: instructions that compilers make use of by themselves, for x86-64 and for Arm.
_INSTRUCTION_SETS = re.compile(
    r"(avx|amx|ssse3|sse4_|fma|f16c|bmi|abm|movbe|popcnt|gfni|sve|sme(?!p)|asimd|i8mm|bf16|fphp|atomics)"
)


@dataclass(frozen=True)
class GraphEntry:
    """One graph: its file below the folder, the file's hash, and its size as `graph_check` counts it."""

    file: str
    sha256: str
    nodes: int
    max_rank: int


@dataclass(frozen=True)
class WeightsEntry:
    """One rank's weights: the size and the header's hash are checked at every load, the whole file's hash on demand."""

    file: str
    bytes: int
    header_sha256: str
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`libraries`, `machine` and `instruction_sets` are what the graphs are bound to; `state` describes every state
    tensor, for the reader.
    """

    target: str
    optimized: bool
    model: ModelConfig
    generation: GenerationDefaults
    source: dict[str, str]  # name and fingerprint of what was compiled
    dtype: str
    degree: int
    expert_degree: int
    slots: int
    max_length: int
    buckets: tuple[int, ...]
    state: tuple[dict[str, Any], ...]
    graphs: dict[str, GraphEntry]
    weights: tuple[WeightsEntry, ...]  # one a rank, in rank order
    checkpoint_files: dict[str, str]  # configuration and tokenizer, file below the folder -> sha256
    libraries: dict[str, str]
    machine: str
    instruction_sets: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Writes `manifest.json`; its last entry is a hash over all others."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        content["manifest_sha256"] = _digest(content)
        (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads and checks `manifest.json`.

        Raises InputError, with the reason, for anything but an intact manifest of this version.
        """
        path = folder / MANIFEST_FILE
        if not folder.is_dir():
            raise InputError(f"no artifact at {folder}: compile one with neuron-compile --out {folder}")
        if not path.is_file():
            if (folder / NEURON_CONFIG).is_file():
                raise InputError(f"{folder} is an artifact of the target neuron: nxdi-qwen-hardware-report runs it")
            if (folder / HLO_REPORT).is_file():
                raise InputError(f"{folder} holds lowered graphs of the target hlo, which are not run")
            raise InputError(f"{folder} is no complete artifact: it has no {MANIFEST_FILE}; compile it again")
        try:
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is damaged: it is not JSON; compile the artifact again") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise InputError(f"{path} does not describe an nxdi-qwen artifact; compile one with neuron-compile")
        version = content.get("format_version")
        if version != FORMAT_VERSION:
            raise InputError(
                f"{path} has format version {version}, this program reads {FORMAT_VERSION}; compile it again"
            )
        if content.pop("manifest_sha256", None) != _digest(content):
            raise InputError(f"{path} was edited or damaged (its hash differs); compile the artifact again")
        return cls._from_content(content)

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> Manifest:
        # The hash has shown that this is what `write` wrote.
        values = {field.name: content[field.name] for field in dataclasses.fields(cls)}
        values["model"] = ModelConfig.from_dict(values["model"])
        values["generation"] = GenerationDefaults(**values["generation"])
        values["buckets"] = tuple(values["buckets"])
        values["state"] = tuple(values["state"])
        values["instruction_sets"] = tuple(values["instruction_sets"])
        values["graphs"] = {name: GraphEntry(**entry) for name, entry in values["graphs"].items()}
        values["weights"] = tuple(WeightsEntry(**entry) for entry in values["weights"])
        return cls(**values)


def describe_tensors(description: StateDescription) -> tuple[dict[str, Any], ...]:
    """The state tensors as JSON-ready dictionaries."""
    return tuple(
        {"name": tensor.name, "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for tensor in description.tensors
    )


def current_machine() -> str:
    """The processor's architecture and the width of its vectors, which torch compiles for."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def current_instruction_sets() -> tuple[str, ...]:
    """The processor's instruction sets, by Linux's names; none where it does not list them. Compiled code may use all
    of the machine that it was compiled on.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    listed = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return tuple(sorted(name for name in listed.split() if _INSTRUCTION_SETS.match(name)))


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
