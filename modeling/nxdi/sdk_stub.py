"""Import hook: NxD/NxDI without the Neuron SDK. Import this module BEFORE neuronx_distributed*.
Any name under ROOTS is an inert class; CALLING one raises, unless listed in OVERRIDES/HLO_CALLS."""

import importlib.abc, importlib.machinery, os, sys, types
import torch

ROOTS = ["torch_neuronx", "neuronxcc", "nki", "nkilib", "libneuronxla"]


class NeuronStubError(RuntimeError):
    pass


class _Meta(type):
    def __getattr__(cls, n):
        if n.startswith("__"):
            raise AttributeError(n)
        return _resolve(f"{cls._p}.{n}")

    def __getitem__(cls, grid):
        return cls  # kernel[grid]

    def __call__(cls, *a, **k):
        if "_p" in cls.__dict__:
            raise NeuronStubError(f"{cls._p} needs the Neuron SDK")
        return super().__call__(*a, **k)  # a subclass of a stub is usable


def _make(p):
    return _Meta(p.rsplit(".", 1)[-1], (), {"_p": p})


_cache = {}


def _resolve(p):
    return OVERRIDES[p] if p in OVERRIDES else sys.modules.get(p) or _cache.setdefault(p, _make(p))


class _Mod(types.ModuleType):
    def __getattr__(self, n):
        if n.startswith("__"):
            raise AttributeError(n)
        return _resolve(f"{self.__name__}.{n}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ROOTS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        m = _Mod(spec.name)
        m.__path__ = []
        return m

    def exec_module(self, m):
        if m.__name__ == "torch_neuronx":
            m.__version__ = "2.9.0+cpustub"  # ModelBuilder wants "2*"


class _Kernel:  # a jitted NKI kernel / unknown HLO body
    def __init__(self, fn):
        self.fn, self.__name__ = fn, getattr(fn, "__name__", repr(fn))

    def __getitem__(self, grid):
        return self

    def __call__(self, *a, **k):
        raise NeuronStubError(f"kernel {self.__name__} called on CPU")


def _jit(*a, **k):
    return _Kernel(a[0]) if a and callable(a[0]) else _Kernel


class _SkipMode:
    def __init__(self, skip_token=False, skip_weight=False):
        self.skip_token, self.skip_weight = skip_token, skip_weight


class _CollectivesConfig:  # only ring attention reads the pairs
    def __init__(self, replica_groups):
        self.rank_src_tgt_pairs = {r: None for g in replica_groups for r in g}


class _RmsNorm:  # XLA mode only (AwsNeuronRmsNorm)
    @staticmethod
    def apply(x, w, eps, dim):
        h = x.float()
        return w * (h * torch.rsqrt(h.pow(2).mean(dim, keepdim=True) + eps)).to(x.dtype)


class _Argmax:  # tp>1 on-device greedy with on_cpu=False
    @staticmethod
    def apply(x, dim, keepdim=False):
        return torch.argmax(x, dim=dim, keepdim=keepdim)


_ops = {}


def _xop(name, lower):
    import torch_xla.core.xla_op_registry as xor

    return _ops.get(name) or _ops.setdefault(name, xor.register(name, lower))


def _dus(t, u, *starts):  # XLA DynamicUpdateSlice, clamped starts
    if t.device.type == "xla":
        st = [torch.as_tensor(s, device=t.device).reshape(()).to(torch.int32) for s in starts]
        return _xop("nxdi_dus", lambda a, b, *s: a.dynamic_update_slice(b, list(s)))(t, u, *st)
    o = t.clone()
    o[
        tuple(
            slice(c, c + n) for c, n in ((min(max(int(s), 0), d - n), n) for s, n, d in zip(starts, u.shape, t.shape))
        )
    ] = u
    return o


def _fill_prefix(t, u):
    if t.device.type != "xla":
        return _dus(t, u, *[0] * t.dim())
    import torch_xla.core.xla_builder as xb

    return _xop(
        "nxdi_fill",
        lambda a, b: a.dynamic_update_slice(
            b, [xb.Op.scalar(a.builder(), 0, dtype=xb.Type.S32) for _ in a.shape().sizes]
        ),
    )(t, u)


_N = "neuronx_distributed_inference."
HLO_CALLS = {
    (_N + "models.layer_boundary_marker", "forward_impl"): staticmethod(lambda *a: a[0] if len(a) == 1 else a),
    (_N + "modules.kvcache.utils", "xla_fill_prefix"): _fill_prefix,
    (_N + "modules.kvcache.utils", "xla_dynamic_update_slice"): _dus,
}


def _hlo_call(fn):
    return HLO_CALLS.get((fn.__module__, fn.__name__)) or _Kernel(fn)


OVERRIDES = {
    "neuronxcc.nki._pre_prod_kernels.collectives.CollectivesConfig": _CollectivesConfig,
    "nkilib.core.moe.moe_cte.moe_cte_utils.SkipMode": _SkipMode,
    "nki.jit": _jit,
    "neuronxcc.nki.jit": _jit,
    "torch_neuronx.xla_impl.ops.nki_jit": _jit,
    "torch_neuronx.utils.get_platform_target": lambda *a, **k: os.environ.get(
        "NEURON_PLATFORM_TARGET_OVERRIDE", "trn2"
    ),
    "torch_neuronx.xla_impl.ops.RmsNorm": _RmsNorm,
    "torch_neuronx.xla_impl.ops.Argmax": _Argmax,
    "torch_neuronx.xla_impl.ops.xla_hlo_call": _hlo_call,
    "torch_neuronx.xla_impl.base.xla_hlo_call": _hlo_call,
    "torch_neuronx.xla_impl.base.xla_call": _hlo_call,
}

os.environ.setdefault("PJRT_DEVICE", "CPU")
try:
    import torch_xla  # BEFORE the finder: torch_xla probes libneuronxla at import
except ImportError:  # CPU mode needs torch_xla for imports only
    import transformers.utils  # before the finder, so it does not see the stub as torch_xla

    ROOTS.append("torch_xla")
    OVERRIDES.update({f"torch_xla.core.xla_model.REDUCE_{r}": r.lower() for r in ("SUM", "MAX", "MIN")})
sys.meta_path.insert(0, _Finder())
torch.classes.neuron = types.ModuleType("torch.classes.neuron")  # annotations in trace/spmd.py
for _n in ("Model", "SPMDModel", "LayoutTransformation"):
    setattr(torch.classes.neuron, _n, _make("torch.classes.neuron." + _n))
