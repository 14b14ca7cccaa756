"""Stand-ins for the Neuron SDK's closed packages, so that NxD and NxDI import, run in CPU mode, and trace.

Import this before `neuronx_distributed*`. Every name below the packages in `ROOTS` is an inert class; calling one
raises NeuronStubError, except for the few that have an equivalent in torch or XLA (`OVERRIDES`, `HLO_CALLS`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

ROOTS = ["torch_neuronx", "neuronxcc", "nki", "nkilib", "libneuronxla"]


class NeuronStubError(RuntimeError):
    """Something was called that only the Neuron SDK can do."""


class _Inert(type):
    """The metaclass of a stand-in: any attribute is a further one, it cannot be called, and subclasses can."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _resolve(f"{cls.path}.{name}")

    def __getitem__(cls, grid: object) -> Any:  # kernel[grid]
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "path" in cls.__dict__:
            raise NeuronStubError(f"{cls.path} needs the Neuron SDK")
        return super().__call__(*args, **kwargs)


def _make(path: str) -> Any:
    return _Inert(path.rsplit(".", 1)[-1], (), {"path": path})


_made: dict[str, Any] = {}


def _resolve(path: str) -> Any:
    if path in OVERRIDES:
        return OVERRIDES[path]
    return sys.modules.get(path) or _made.setdefault(path, _make(path))


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _resolve(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in ROOTS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "torch_neuronx":
            vars(module)["__version__"] = "2.9.0+stub"  # NxD's model builder wants a version 2


class _Kernel:
    """A jitted NKI kernel, or an HLO body that has no stand-in."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", repr(function))

    def __getitem__(self, grid: object) -> _Kernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NeuronStubError(f"kernel {self.__name__} needs the Neuron SDK")


def _jit(*args: Any, **kwargs: Any) -> Any:
    return _Kernel(args[0]) if args and callable(args[0]) else _Kernel


class _SkipMode:
    def __init__(self, skip_token: bool = False, skip_weight: bool = False) -> None:
        self.skip_token, self.skip_weight = skip_token, skip_weight


class _CollectivesConfig:
    """Only ring attention reads the pairs."""

    def __init__(self, replica_groups: Iterable[Iterable[int]]) -> None:
        self.rank_src_tgt_pairs = {rank: None for group in replica_groups for rank in group}


class _RmsNorm:
    """NxDI's AwsNeuronRmsNorm, when tracing."""

    @staticmethod
    def apply(x: Tensor, weight: Tensor, eps: float, dim: int) -> Tensor:
        hidden = x.float()
        return weight * (hidden * torch.rsqrt(hidden.pow(2).mean(dim, keepdim=True) + eps)).to(x.dtype)


class _Argmax:
    """On-device greedy sampling over several ranks."""

    @staticmethod
    def apply(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        return torch.argmax(x, dim=dim, keepdim=keepdim)


_operations: dict[str, Callable[..., Any]] = {}


def _xla_operation(name: str, lower: Callable[..., Any]) -> Callable[..., Any]:
    import torch_xla.core.xla_op_registry as registry

    if name not in _operations:
        _operations[name] = registry.register(name, lower)
    return _operations[name]


def _dynamic_update_slice(target: Tensor, update: Tensor, *starts: Any) -> Tensor:
    """XLA's DynamicUpdateSlice, which moves starts inwards until the update fits."""
    if target.device.type == "xla":
        places = [torch.as_tensor(start, device=target.device).reshape(()).to(torch.int32) for start in starts]
        lowered = _xla_operation("nxdi_dynamic_update_slice", lambda a, b, *s: a.dynamic_update_slice(b, list(s)))
        return lowered(target, update, *places)
    result = target.clone()
    window = []
    for start, size, room in zip(starts, update.shape, target.shape, strict=True):
        begin = min(max(int(start), 0), room - size)
        window.append(slice(begin, begin + size))
    result[tuple(window)] = update
    return result


def _fill_prefix(target: Tensor, update: Tensor) -> Tensor:
    if target.device.type != "xla":
        return _dynamic_update_slice(target, update, *[0] * target.dim())
    import torch_xla.core.xla_builder as builder

    def lower(a: Any, b: Any) -> Any:
        zeros = [builder.Op.scalar(a.builder(), 0, dtype=builder.Type.S32) for _ in a.shape().sizes]
        return a.dynamic_update_slice(b, zeros)

    return _xla_operation("nxdi_fill_prefix", lower)(target, update)


_NXDI = "neuronx_distributed_inference."
HLO_CALLS: dict[tuple[str, str], Any] = {
    (_NXDI + "models.layer_boundary_marker", "forward_impl"): staticmethod(lambda *a: a[0] if len(a) == 1 else a),
    (_NXDI + "modules.kvcache.utils", "xla_fill_prefix"): _fill_prefix,
    (_NXDI + "modules.kvcache.utils", "xla_dynamic_update_slice"): _dynamic_update_slice,
}


def _hlo_call(function: Callable[..., Any]) -> Any:
    return HLO_CALLS.get((function.__module__, function.__name__)) or _Kernel(function)


def _platform_target(*_: Any, **__: Any) -> str:
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")


OVERRIDES: dict[str, Any] = {
    "neuronxcc.nki._pre_prod_kernels.collectives.CollectivesConfig": _CollectivesConfig,
    "nkilib.core.moe.moe_cte.moe_cte_utils.SkipMode": _SkipMode,
    "nki.jit": _jit,
    "neuronxcc.nki.jit": _jit,
    "torch_neuronx.xla_impl.ops.nki_jit": _jit,
    "torch_neuronx.utils.get_platform_target": _platform_target,
    "torch_neuronx.xla_impl.ops.RmsNorm": _RmsNorm,
    "torch_neuronx.xla_impl.ops.Argmax": _Argmax,
    "torch_neuronx.xla_impl.ops.xla_hlo_call": _hlo_call,
    "torch_neuronx.xla_impl.base.xla_hlo_call": _hlo_call,
    "torch_neuronx.xla_impl.base.xla_call": _hlo_call,
}

os.environ.setdefault("PJRT_DEVICE", "CPU")
try:
    import torch_xla  # noqa: F401  before the finder is there: torch_xla looks for libneuronxla
except ImportError:
    # CPU mode needs torch_xla for imports only; transformers must have looked for it before it seems to be there.
    import transformers.utils  # noqa: F401

    ROOTS.append("torch_xla")
    OVERRIDES.update({f"torch_xla.core.xla_model.REDUCE_{name}": name.lower() for name in ("SUM", "MAX", "MIN")})
sys.meta_path.insert(0, _Finder())
# Annotations in NxD's trace/spmd.py name these.
torch.classes.neuron = types.ModuleType("torch.classes.neuron")  # type: ignore[attr-defined]
for _name in ("Model", "SPMDModel", "LayoutTransformation"):
    setattr(torch.classes.neuron, _name, _make("torch.classes.neuron." + _name))
