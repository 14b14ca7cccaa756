"""What a user chooses for a graph that NxDI traces, and whether this machine can trace or compile it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.cpu import CompileOptions
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.errors import InputError

_NXDI = ("neuronx_distributed", "neuronx_distributed_inference")
_TRACING = ("torch_xla", "google.protobuf")
_SDK = ("torch_neuronx", "neuronxcc", "libneuronxla")


@dataclass(frozen=True)
class NeuronOptions:
    """`shared` are the choices of every target; the others are Neuron's.

    `decode_buckets`: cache lengths that token-generation graphs are made for (None: the maximum length alone). Prompts
    above the largest bucket run in pieces of it. `logical_cores`: physical cores that make one logical core (1 or 2;
    None: what NxDI takes on this machine, NEURON_LOGICAL_NC_CONFIG or the platform's own).
    `compiler_flags` are appended to NxDI's own. `on_device_sampling`: the graphs return tokens, not logits.
    """

    shared: CompileOptions
    decode_buckets: tuple[int, ...] | None = None
    logical_cores: int | None = None
    compiler_flags: str = ""
    on_device_sampling: bool = False

    def resolve(self, source: ModelSource) -> tuple[int, Buckets, tuple[int, ...], str]:
        """(maximum length, buckets, decode buckets, dtype name). Raises InputError for what does not fit."""
        max_length, buckets, dtype = self.shared.resolve(source)
        if self.logical_cores not in (None, 1, 2):
            raise InputError(f"logical cores of {self.logical_cores} physical ones do not exist: use 1 or 2")
        if self.shared.expert_degree > 1:
            raise InputError(
                "--expert-degree is for the CPU target: NxDI's experts are cut along their intermediate size here"
            )
        if self.shared.optimize:
            raise InputError("--optimize is for the CPU target: leave it out")
        decode_buckets = self.decode_buckets or (max_length,)
        for length in decode_buckets:
            if not 1 <= length <= max_length:
                raise InputError(f"decode bucket {length} is out of range: use 1 to the maximum length {max_length}")
        if max(decode_buckets) != max_length:
            raise InputError(f"no decode bucket holds the maximum length {max_length}: add it to the decode buckets")
        return max_length, buckets, tuple(sorted(set(decode_buckets))), dtype


def check_hlo_target() -> None:
    """Raises InputError where NxDI's graphs cannot be traced."""
    if missing := _missing(*_NXDI, *_TRACING):
        raise InputError(
            f"--target hlo needs NxDI and torch_xla, and {', '.join(missing)} cannot be imported: docs/neuron.md says "
            "how to make such an environment, without the Neuron SDK; --target cpu works here"
        )


def check_neuron_target() -> None:
    """Raises InputError where nothing can be compiled for Neuron."""
    if missing := _missing(*_SDK, *_NXDI):
        works = "--target cpu works" if _missing(*_NXDI, *_TRACING) else "--target cpu and --target hlo work"
        raise InputError(
            f"--target neuron needs the Neuron SDK with NxDI, and {', '.join(missing)} cannot be imported: run it in "
            f"the SDK's environment on a Trainium host; {works} here"
        )


def _missing(*names: str) -> list[str]:
    return [name for name in names if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package above it
        return False
