"""The machines that the planner knows: what one core of each has. The figures and their sources: instances.json."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdi_qwen.modeling.errors import InputError

_GIB = 1 << 30
_DATA = Path(__file__).with_name("instances.json")


@dataclass(frozen=True)
class Machine:
    """An instance type whose physical cores are grouped, `physical_per_logical` to a logical core ("core" below).

    A core has its equal share of its chip. Bytes, bytes per second, and operations per second by dtype name;
    `reserve_bytes` of `memory_bytes` are left to the runtime and to activations.
    """

    instance: str
    physical_per_logical: int
    cores: int
    memory_bytes: int
    reserve_bytes: int
    bandwidth: float
    flops: dict[str, float]
    sources: dict[str, str]

    @property
    def usable_bytes(self) -> int:
        """What weights and state may take."""
        return self.memory_bytes - self.reserve_bytes


def instance_names() -> tuple[str, ...]:
    """Every instance type, from the smallest to the largest in memory."""
    return tuple(_data()["instances"])


def groupings() -> tuple[int, ...]:
    """How many physical cores may form a logical core."""
    return tuple(_data()["logical_cores"]["physical_per_logical"])


def machine(instance: str, physical_per_logical: int) -> Machine:
    """Raises InputError for an instance or a grouping that instances.json does not list."""
    data = _data()
    if instance not in data["instances"]:
        raise InputError(f"no instance {instance!r}; there are {', '.join(instance_names())}")
    if physical_per_logical not in groupings():
        raise InputError(f"{physical_per_logical} physical cores do not form a logical core: use 1 or 2")
    entry = data["instances"][instance]
    chip = data["chips"][entry["chip"]]
    cores_per_chip = chip["physical_cores"] // physical_per_logical
    return Machine(
        instance=instance,
        physical_per_logical=physical_per_logical,
        cores=entry["chips"] * cores_per_chip,
        memory_bytes=int(chip["memory_gib"] * _GIB) // cores_per_chip,
        reserve_bytes=int(data["reserve"]["gib_per_physical_core"] * _GIB) * physical_per_logical,
        bandwidth=chip["bandwidth_tb_per_s"] * 1e12 / cores_per_chip,
        flops={dtype: tflops * 1e12 / cores_per_chip for dtype, tflops in chip["tflops"].items()},
        sources={
            "chip": chip["source"],
            "instance": entry["source"],
            "logical cores": data["logical_cores"]["source"],
            "reserve": data["reserve"]["source"],
        },
    )


@functools.cache
def _data() -> Any:
    return json.loads(_DATA.read_text())
