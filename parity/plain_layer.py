"""One layer in float64, plain and slow, each step a method: the truth for a layer alone, and what a suspected mistake
would give instead (`mistakes` overrides single methods).

A request is a row of a slot; padding, idle rows and reused slots are played through although they must not matter, so
that mistakes with them can be computed as well.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from nxdi_qwen.modeling.config import FULL_ATTENTION, ModelConfig
from nxdi_qwen.modeling.rope_frequencies import rope_attention_scaling, rope_inv_freq
from nxdi_qwen.parity.layer_run import Call, LayerCase, LayerRun, RequestRun, begins
from nxdi_qwen.parity.plain_weights import Weights, rms_norm

CHUNK = 64  # tokens after which the chunked form carries the state on
State = tuple[Tensor, Tensor]


class PlainLayer:
    """`weights` as `plain_weights.layer_weights` gives them. Everything is computed in float64."""

    def __init__(self, config: ModelConfig, index: int, weights: Weights) -> None:
        self.config, self.weights = config, weights
        self.is_attention = config.layer_types[index] == FULL_ATTENTION
        self.is_sparse = config.moe_layers[index]
        self.max_length = 0
        self.named: dict[str, Tensor] = {}

    # --- Requests in slots

    @torch.inference_mode()
    def run(self, case: LayerCase) -> LayerRun:
        self.max_length = case.max_length
        slots: dict[int, State] = {slot: self.fresh() for slot in range(case.slot_count)}
        runs = [RequestRun(torch.empty(request.x.shape, dtype=torch.float64)) for request in case.requests]
        parts: list[dict[str, list[Tensor]]] = [{} for _ in runs]
        for call, begin in zip(case.calls, begins(case), strict=True):
            old = dict(slots)
            for request, count in call.counts.items():
                slot, first = case.slots[request], begin[request]
                own = case.requests[request]
                x = case.padding.double().repeat(call.bucket, 1)
                x[:count] = own.x[first : first + count].double()
                self.named = {}
                positions = self.positions(own.positions[:, first : first + count], first)
                out, slots[slot] = self.layer(x, count, first, positions, self.read(old[slot], first), call.decode)
                runs[request].output[first : first + count] = out[:count]
                for name, value in self.named.items():
                    parts[request].setdefault(name, []).append(value[:count].flatten(1))
            self.idle(case, call, slots)
            for request, count in call.counts.items():
                end = begin[request] + count
                runs[request].states.append(self.shown(slots[case.slots[request]], end))
        for run, named in zip(runs, parts, strict=True):
            run.intermediates = {name: torch.cat(values) for name, values in named.items()}
        return LayerRun(tuple(runs))

    def fresh(self) -> State:
        c = self.config
        if self.is_attention:
            cache = torch.zeros(self.max_length, c.num_key_value_heads, c.head_dim, dtype=torch.float64)
            return cache, cache
        recurrent = torch.zeros(c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim).double()
        return recurrent, torch.zeros(c.conv_dim, c.linear_conv_kernel_dim - 1, dtype=torch.float64)

    def read(self, state: State, start: int) -> State:
        """What a call sees of its slot: nothing of an earlier request."""
        return state if start else self.fresh()

    def idle(self, case: LayerCase, call: Call, slots: dict[int, State]) -> None:
        """Idle rows leave their slots as they are."""

    def positions(self, positions: Tensor, start: int) -> Tensor:
        return positions

    def shown(self, state: State, length: int) -> dict[str, Tensor]:
        if self.is_attention:
            return {"key": state[0][:length], "value": state[1][:length]}
        return {"recurrent": state[0], "conv": state[1]}

    # --- The layer

    def layer(
        self, x: Tensor, count: int, start: int, positions: Tensor, state: State, decode: bool
    ) -> tuple[Tensor, State]:
        """x [bucket, H] of which `count` are tokens, `positions` [3, count] -> the same, and the new state."""
        normed = self.block_norm("input norm", x)
        if self.is_attention:
            mixed, state = self.attention(normed[:count], start, positions, state)
        else:
            mixed, state = self.delta_net(normed, count, state, decode)
        x = x[:count] + mixed[:count]
        return self.residual(x, self.mlp(self.block_norm("post norm", x))), state

    def residual(self, x: Tensor, added: Tensor) -> Tensor:
        return x + added

    def block_norm(self, name: str, x: Tensor) -> Tensor:
        return self.note(name, rms_norm(x, self.norm_weight(name), self.config.rms_norm_eps))

    def norm_weight(self, name: str) -> Tensor:
        return 1.0 + self.weights[name]

    def note(self, name: str, value: Tensor) -> Tensor:
        self.named[name] = value
        return value

    def project(self, name: str, x: Tensor) -> Tensor:
        return self.note(f"{name} projection", self.linear(name, x))

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[name].T
        return y + self.weights[f"{name} bias"] if f"{name} bias" in self.weights else y

    # --- Gated DeltaNet

    def delta_net(self, x: Tensor, count: int, state: State, decode: bool) -> tuple[Tensor, State]:
        c = self.config
        tokens = len(x)
        projected = self.projections(x)
        qkv = torch.cat([projected[name] for name in "qkv"], dim=1)
        window = torch.cat([state[1].T, qkv])
        taps = self.taps()
        kernel = taps.shape[1]
        mixed = functional.silu(sum(window[i : i + tokens] * taps[:, i] for i in range(kernel)))  # type: ignore
        conv = self.conv_tail(window, count, state[1])
        q, k, v = mixed.split([c.key_dim, c.key_dim, c.value_dim], dim=1)
        q, k = (part.reshape(tokens, c.linear_num_key_heads, -1) for part in (q, k))
        v = v.reshape(tokens, c.linear_num_value_heads, -1)
        beta = torch.sigmoid(projected["b"])
        inputs = self.mask(q, k, v, self.log_decay(projected["a"]), beta, count)
        q, k, v, g, beta = inputs
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        q, k = self.to_value_heads(q) * c.linear_key_head_dim**-0.5, self.to_value_heads(k)
        out, recurrent = self.delta_rule(q, k, v, g, beta, state[0], decode)
        out = self.note("delta rule output", out[:count])
        z = projected["z"][:count].reshape(out.shape)
        out = self.note("gated norm", self.gated_norm(out, z))
        return self.note("mixer output", self.linear("out", out.flatten(1))), (recurrent, conv)

    def projections(self, x: Tensor) -> dict[str, Tensor]:
        return {name: self.project(name, x) for name in "qkvzba"}

    def taps(self) -> Tensor:
        """[C, K], oldest first; channels q, k, v."""
        return self.weights["taps"]

    def conv_tail(self, window: Tensor, count: int, old: Tensor) -> Tensor:
        """[C, K - 1] from window [K - 1 + bucket, C]: the last inputs of valid tokens."""
        return window[count : count + old.shape[1]].T

    def log_decay(self, a: Tensor) -> Tensor:
        return -self.weights["A_log"].exp() * functional.softplus(a + self.weights["dt_bias"])

    def mask(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Padding changes nothing: it is left out."""
        return q[:count], k[:count], v[:count], g[:count], beta[:count]

    def to_value_heads(self, x: Tensor) -> Tensor:
        """[T, Hk, d] -> [T, Hv, d]: value head j reads key head j // r."""
        return x.repeat_interleave(self.config.linear_num_value_heads // self.config.linear_num_key_heads, dim=1)

    def gated_norm(self, x: Tensor, z: Tensor) -> Tensor:
        return rms_norm(x, self.weights["gated norm"], self.config.rms_norm_eps) * functional.silu(z)

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, decode: bool
    ) -> tuple[Tensor, Tensor]:
        outputs = []
        for first in range(0, len(q), CHUNK):
            part = slice(first, first + CHUNK)
            chunk = (q[part], k[part], v[part], g[part], beta[part])
            out, state = recurrence(*chunk, state) if decode else self.chunk(*chunk, state, first // CHUNK)
            outputs.append(out)
        return torch.cat(outputs), self.stored(state)

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        return recurrence(q, k, v, g, beta, state)

    def stored(self, recurrent: Tensor) -> Tensor:
        return recurrent

    # --- Attention

    def attention(self, x: Tensor, start: int, positions: Tensor, state: State) -> tuple[Tensor, State]:
        c = self.config
        tokens = len(x)
        query, gate = self.split_gate(self.project("q", x))
        k = self.project("k", x).reshape(tokens, c.num_key_value_heads, -1)
        v = self.project("v", x).reshape(tokens, c.num_key_value_heads, -1)
        q = self.note("q norm", rms_norm(query, self.norm_weight("q norm"), c.rms_norm_eps))
        k = self.note("k norm", rms_norm(k, self.norm_weight("k norm"), c.rms_norm_eps))
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        keys, values = self.append(state[0], k, start), self.append(state[1], v, start)
        out = self.attend(q, keys, values, start) * torch.sigmoid(gate)
        out = self.note("gated attention output", out)
        return self.note("mixer output", self.linear("out", out.flatten(1))), self.kept(keys, values)

    def split_gate(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """[T, 2 nq d] -> query and gate [T, nq, d]: per head the query, then the gate."""
        query, gate = projected.reshape(len(projected), self.config.num_attention_heads, 2, -1).unbind(2)
        return query, gate

    def angles(self, positions: Tensor) -> Tensor:
        """[T, rotary_dim / 2] float32, as every float32 implementation rounds them; mrope is interleaved."""
        inv_freq = rope_inv_freq(self.config)
        angles = positions[0].float()[:, None] * inv_freq
        section = self.config.rope.mrope_section
        if section is not None:
            for axis in (1, 2):
                own = slice(axis, 3 * section[axis], 3)
                angles[:, own] = positions[axis].float()[:, None] * inv_freq[own]
        return angles

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """The first rotary_dim of x [T, heads, d]; halves are the pairs."""
        angles = self.angles(positions).double()[:, None]
        scaling = rope_attention_scaling(self.config)
        return self.rotate_by(x, angles.cos() * scaling, angles.sin() * scaling)

    def rotate_by(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def append(self, cache: Tensor, new: Tensor, start: int) -> Tensor:
        """[L, Hkv, d] with the tokens of `new` behind the first `start`."""
        return torch.cat([cache[:start], new, cache[start + len(new) :]])

    def kept(self, keys: Tensor, values: Tensor) -> State:
        return keys, values

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        """[T, nq, d]"""
        tokens = len(q)
        values = torch.where(torch.arange(len(values))[:, None, None] < start + tokens, values, 0.0)
        position = start + torch.arange(tokens)
        visible = self.visible(torch.arange(len(keys)), position[:, None])
        scores = torch.einsum("thd,lhd->htl", q, self.to_query_heads(keys)) * self.config.head_dim**-0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
        return torch.einsum("htl,lhd->thd", weights, self.to_query_heads(values))

    def visible(self, key_position: Tensor, query_position: Tensor) -> Tensor:
        return key_position <= query_position

    def to_query_heads(self, x: Tensor) -> Tensor:
        """[L, Hkv, d] -> [L, nq, d]: query head j reads KV head j // groups."""
        return x.repeat_interleave(self.config.num_attention_heads // self.config.num_key_value_heads, dim=1)

    # --- Feed-forward

    def mlp(self, x: Tensor) -> Tensor:
        if not self.is_sparse:
            return swiglu(x, self.weights, "")
        weights = self.route(self.note("router logits", x @ self.weights["router"].T))
        routed = self.note("experts", self.experts(x, self.note("router weights", weights)))
        return routed + self.shared_expert(x)

    def route(self, logits: Tensor) -> Tensor:
        """[T, E] router logits -> the weight of every expert, zero for those not chosen."""
        probabilities = logits.softmax(dim=-1)
        best, chosen = probabilities.topk(self.config.num_experts_per_tok, dim=-1)
        if self.renormalizes():
            best = best / best.sum(dim=-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter(1, chosen, best)

    def renormalizes(self) -> bool:
        return self.config.norm_topk_prob

    def experts(self, x: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in weights.any(dim=0).nonzero()[:, 0].tolist():
            tokens = weights[:, expert].nonzero()[:, 0]
            gate, up = (x[tokens] @ self.weights["experts gate up"][expert].double().T).chunk(2, dim=1)
            own = (functional.silu(gate) * up) @ self.weights["experts down"][expert].double().T
            out[tokens] += own * weights[tokens, expert, None]
        return out

    def shared_expert(self, x: Tensor) -> Tensor:
        gate = self.note("shared expert gate", torch.sigmoid(x @ self.weights["shared expert gate"].T))
        return gate * swiglu(x, self.weights, "shared ")


def swiglu(x: Tensor, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (weights[f"{prefix}{name}"] for name in ("gate", "up", "down"))
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule token by token (Yang et al., "Gated Delta Networks", arXiv:2412.06464).

    q, k [T, Hv, dk] normalised, v [T, Hv, dv], g, beta [T, Hv], state [Hv, dk, dv] -> outputs [T, Hv, dv], new state.
    """
    outputs = torch.empty_like(v)
    decay = g.exp()[..., None, None]
    for t in range(len(q)):
        state = state * decay[t]
        recalled = (k[t, :, None, :] @ state)[:, 0]
        state = state + k[t, :, :, None] * (beta[t, :, None] * (v[t] - recalled))[:, None, :]
        outputs[t] = (q[t, :, None, :] @ state)[:, 0]
    return outputs, state
