"""One layer of the eager model alone: the model itself, with everything but that layer made transparent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxdi_qwen.modeling.layers.context import Context, LayerState
from nxdi_qwen.modeling.model import Batch, HybridCausalLM, text_positions
from nxdi_qwen.modeling.state import StateDescription, describe_state
from nxdi_qwen.parity.layer_run import Call, LayerCase, LayerRun, RequestRun, begins

# Modules of a layer whose output, or input ("<"), is a named intermediate result.
MODULES = {
    "input_layernorm": "input norm",
    **{f"linear_attn.{letter}_proj": f"{letter} projection" for letter in "qkvzba"},
    "linear_attn.norm<": "delta rule output",
    "linear_attn.norm": "gated norm",
    "linear_attn.out_proj": "mixer output",
    **{f"self_attn.{letter}_proj": f"{letter} projection" for letter in "qkv"},
    "self_attn.q_norm": "q norm",
    "self_attn.k_norm": "k norm",
    "self_attn.o_proj<": "gated attention output",
    "self_attn.o_proj": "mixer output",
    "post_attention_layernorm": "post norm",
    "mlp.router": "router weights",
    "mlp.experts": "experts",
    "mlp.shared_expert_gate": "shared expert gate",
}


@dataclass(frozen=True)
class Surroundings:
    """What of the model's code stands outside its class."""

    describe_state: Callable[..., StateDescription] = describe_state
    text_positions: Callable[[Tensor, Tensor], Tensor] = text_positions


class _Rows(nn.Module):
    """In place of the embedding: ids number the rows of `weight` [M, H]."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, ids: Tensor, rank: Tensor) -> Tensor:
        return self.weight[ids]


class _PassedThrough(nn.Module):
    """In place of the other layers."""

    def forward(self, x: Tensor, state: LayerState, context: Context) -> tuple[Tensor, list[LayerState]]:
        return x, [state] * len(context.ends)


class _NoHead(nn.Module):
    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden


@torch.inference_mode()
def run_eager_layer(
    model: HybridCausalLM, index: int, case: LayerCase, surroundings: Surroundings | None = None
) -> LayerRun:
    """Layer `index` of `model` on a case; inputs are cast to the model's dtype.

    Batches, slots, masks and positions are those of the model's own prefill and decode.
    """
    surroundings = surroundings or Surroundings()
    dtype = model.embed_tokens.weight.dtype
    # Row 0 is the padding; then the tokens of all requests.
    table = torch.cat([case.padding[None], *(fed.x for fed in case.requests)]).to(dtype)
    alone = _alone(model, index, table)
    description = surroundings.describe_state(model.config, case.slot_count, case.max_length, dtype)
    state = description.allocate()
    offsets = [1]
    for fed in case.requests:
        offsets.append(offsets[-1] + len(fed.x))

    runs = [RequestRun(torch.empty(fed.x.shape)) for fed in case.requests]
    lengths = [0] * case.slot_count
    with _Recorder(model.layers[index], case.padding.shape[0]) as recorder:
        for call, begin in zip(case.calls, begins(case), strict=True):
            for request, first in begin.items():
                lengths[case.slots[request]] = first
            batch, rows = _batch(case, call, begin, offsets, lengths, surroundings)
            recorder.begin(batch.input_ids.shape)
            if call.decode:
                out, state = alone.decode(batch, state)
                out = out[:, None]
            else:
                prefilled = alone.prefill(batch, state)
                out, state = prefilled.hidden, prefilled.state
            for request, row in rows.items():
                count, first = call.counts[request], begin[request]
                runs[request].output[first : first + count] = out[row, :count].float()
                recorder.collect(runs[request], row, count)
                end = lengths[case.slots[request]] = first + count
                runs[request].states.append(
                    {
                        tensor.role: _state(tensor.role, whole[case.slots[request]], end)
                        for tensor, whole in zip(description.tensors, state, strict=True)
                        if tensor.layer == index
                    }
                )
    for run in runs:
        run.intermediates = {name: torch.cat(parts) for name, parts in run.intermediates.items()}  # type: ignore
    return LayerRun(tuple(runs))


def _alone(model: HybridCausalLM, index: int, table: Tensor) -> HybridCausalLM:
    alone = copy.copy(model)
    alone._modules = dict(model._modules)
    alone.embed_tokens = _Rows(table)  # type: ignore[assignment]
    alone.layers = nn.ModuleList(
        layer if number == index else _PassedThrough() for number, layer in enumerate(model.layers)
    )
    alone.norm = nn.Identity()  # type: ignore[assignment]
    alone.lm_head = _NoHead()  # type: ignore[assignment]
    return alone


def _batch(
    case: LayerCase,
    call: Call,
    begin: dict[int, int],
    offsets: list[int],
    lengths: list[int],
    surroundings: Surroundings,
) -> tuple[Batch, dict[int, int]]:
    """The batch of a call, and the row of each request."""
    if call.decode:
        rows = {request: case.slots[request] for request in call.counts}
        count = case.slot_count
        slots = None
        start = torch.tensor(lengths)
    else:
        rows = {request: row for row, request in enumerate(call.counts)}
        count = len(rows) + call.idle_rows
        named = [case.slots[request] for request in call.counts]
        slots = torch.tensor(named + [named[0]] * call.idle_rows)
        start = torch.tensor(lengths)[slots]
    ids = torch.zeros(count, call.bucket, dtype=torch.int64)
    valid = torch.zeros(count, call.bucket, dtype=torch.bool)
    for request, row in rows.items():
        tokens, first = call.counts[request], begin[request]
        ids[row, :tokens] = offsets[request] + first + torch.arange(tokens)
        valid[row, :tokens] = True
    positions = surroundings.text_positions(start, valid).clone()
    for request, row in rows.items():
        own = case.requests[request].positions
        if not torch.equal(own, torch.arange(own.shape[1]).expand(3, -1)):
            first = begin[request]
            positions[:, row, : call.counts[request]] = own[:, first : first + call.counts[request]]
    return Batch(ids, valid, positions, start, slots), rows


def _state(role: str, rows: Tensor, length: int) -> Tensor:
    if role in ("key", "value"):
        return rows[:, :length].transpose(0, 1).float()
    return rows.float().clone()


class _Recorder:
    """Collects the named intermediate results of a layer's modules, call by call."""

    def __init__(self, layer: nn.Module, hidden: int) -> None:
        self.layer, self.hidden = layer, hidden
        self.values: dict[str, Tensor] = {}
        self.handles: list[Any] = []
        self.shape = torch.Size()

    def __enter__(self) -> _Recorder:
        modules = dict(self.layer.named_modules())
        for path, name in MODULES.items():
            module = modules.get(path.removesuffix("<"))
            if module is None:
                continue
            if path.endswith("<"):
                hook = module.register_forward_pre_hook(lambda _, inputs, n=name: self._keep(n, inputs[0]))
            elif name == "router weights":
                hook = module.register_forward_hook(lambda m, _, out, n=name: self._keep(n, _dense(m, out)))
            else:
                hook = module.register_forward_hook(lambda _m, _, out, n=name: self._keep(n, out))
            self.handles.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def begin(self, shape: torch.Size) -> None:
        self.values, self.shape = {}, shape

    def collect(self, run: RequestRun, row: int, count: int) -> None:
        for name, value in self.values.items():
            parts: Any = run.intermediates.setdefault(name, [])  # type: ignore[arg-type]
            parts.append(value[row, :count])

    def _keep(self, name: str, value: Tensor) -> None:
        self.values[name] = value.reshape(*self.shape, -1).float()


def _dense(router: nn.Module, out: tuple[Tensor, Tensor]) -> Tensor:
    """[N, E]: the weight of every expert, zero for those not chosen."""
    chosen, weights = out
    weight = router.weight
    assert isinstance(weight, Tensor)
    return weights.new_zeros(chosen.shape[0], weight.shape[0]).scatter(1, chosen, weights)
