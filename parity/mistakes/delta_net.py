"""Suspected mistakes in Gated DeltaNet layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from nxdi_qwen.parity.mistakes.base import (
    CHUNK_CARRY,
    CONV_TAIL,
    DECAY,
    HEADS,
    NORM,
    PADDING,
    PRECISION,
    RESET,
    WEIGHTS,
    Mistake,
)
from nxdi_qwen.parity.plain_layer import PlainLayer, State, recurrence
from nxdi_qwen.parity.plain_weights import rms_norm


class _InDeltaNet(Mistake):
    @classmethod
    def possible(cls, layer: PlainLayer) -> bool:
        return not layer.is_attention


_Masked = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _cleared(x: Tensor, count: int) -> Tensor:
    return torch.cat([x[:count], torch.zeros_like(x[count:])])


class PaddingAsTokens(_InDeltaNet):
    cause, what = PADDING, "padded positions run through the gated delta rule like tokens"

    def mask(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, count: int) -> _Masked:
        return q, k, v, g, beta


class PaddingWrites(_InDeltaNet):
    cause, what = PADDING, "at padded positions the decay is masked, beta is not: padding is written into the state"

    def mask(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, count: int) -> _Masked:
        return q, k, v, _cleared(g, count), beta


class PaddingDecays(_InDeltaNet):
    cause, what = PADDING, "at padded positions beta is masked, the decay is not: the state fades over the padding"

    def mask(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, count: int) -> _Masked:
        return q, k, v, g, _cleared(beta, count)


class TailAtBucketEnd(_InDeltaNet):
    cause, what = CONV_TAIL, "the conv state is taken at the end of the bucket, not at the last valid token"

    def conv_tail(self, window: Tensor, count: int, old: Tensor) -> Tensor:
        return window[-old.shape[1] :].T


class TailRepeatsFirst(_InDeltaNet):
    cause, what = CONV_TAIL, "where a prompt is shorter than the conv state, its first token fills it up"

    def conv_tail(self, window: Tensor, count: int, old: Tensor) -> Tensor:
        if old.any():
            return super().conv_tail(window, count, old)
        width = old.shape[1]
        return window[(count + torch.arange(width)).clamp(min=width)].T


class TailForgotten(_InDeltaNet):
    cause, what = CONV_TAIL, "where fewer tokens come than the conv state holds, zeros fill it up"

    def conv_tail(self, window: Tensor, count: int, old: Tensor) -> Tensor:
        width = old.shape[1]
        return torch.cat([torch.zeros_like(window[:width]), window[width:]])[count : count + width].T


class TailKept(_InDeltaNet):
    cause, what = CONV_TAIL, "the conv state never changes"

    def conv_tail(self, window: Tensor, count: int, old: Tensor) -> Tensor:
        return old


class TailOneEarly(_InDeltaNet):
    cause, what = CONV_TAIL, "the conv state ends one token early"

    def conv_tail(self, window: Tensor, count: int, old: Tensor) -> Tensor:
        return torch.cat([window[:1], window])[count : count + old.shape[1]].T


class DecayGrows(_InDeltaNet):
    cause, what = DECAY, "the log decay is positive: the state grows"

    def log_decay(self, a: Tensor) -> Tensor:
        return -super().log_decay(a)


class DecayWithoutBias(_InDeltaNet):
    cause, what = DECAY, "the decay leaves out dt_bias"

    def log_decay(self, a: Tensor) -> Tensor:
        return super().log_decay(a - self.weights["dt_bias"])


class DecayAbsent(_InDeltaNet):
    cause, what = DECAY, "nothing decays"

    def log_decay(self, a: Tensor) -> Tensor:
        return torch.zeros_like(a)


class DecayWithoutSoftplus(_InDeltaNet):
    cause, what = DECAY, "the decay takes a + dt_bias without softplus"

    def log_decay(self, a: Tensor) -> Tensor:
        return -self.weights["A_log"].exp() * (a + self.weights["dt_bias"])


class DecayNotExponentiated(_InDeltaNet):
    cause, what = DECAY, "the decay takes A_log itself, not its exponential"

    def log_decay(self, a: Tensor) -> Tensor:
        return self.weights["A_log"] * functional.softplus(a + self.weights["dt_bias"])


class ValueHeadsModulo(_InDeltaNet):
    cause, what = HEADS, "value head j reads key head j % Hk instead of j // r"

    def to_value_heads(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.config.linear_num_value_heads // self.config.linear_num_key_heads, 1)


class GatedNormSigmoid(_InDeltaNet):
    cause, what = NORM, "the GDN output norm is gated by sigmoid(z), not by silu(z)"

    def gated_norm(self, x: Tensor, z: Tensor) -> Tensor:
        return rms_norm(x, self.weights["gated norm"], self.config.rms_norm_eps) * torch.sigmoid(z)


class GatedNormPlusOne(_InDeltaNet):
    cause, what = NORM, "the GDN output norm multiplies by 1 + w, not by w"

    def gated_norm(self, x: Tensor, z: Tensor) -> Tensor:
        return rms_norm(x, 1.0 + self.weights["gated norm"], self.config.rms_norm_eps) * functional.silu(z)


class GatedNormAfterGate(_InDeltaNet):
    cause, what = NORM, "the GDN output is gated before its norm, not after"

    def gated_norm(self, x: Tensor, z: Tensor) -> Tensor:
        return rms_norm(x * functional.silu(z), self.weights["gated norm"], self.config.rms_norm_eps)


class StateInSixteenBits(_InDeltaNet):
    cause, what = PRECISION, "the recurrent state is kept in bfloat16"

    def stored(self, recurrent: Tensor) -> Tensor:
        return recurrent.float().bfloat16().double()


class _AtChunks(_InDeltaNet):
    def parts(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """Output and state as they should be, those of a chunk that starts from zero, and the decay [T, Hv] since the
        chunk's begin.
        """
        right = recurrence(q, k, v, g, beta, state)
        return right, recurrence(q, k, v, g, beta, torch.zeros_like(state)), g.cumsum(dim=0).exp()


class CarryWithoutDecay(_AtChunks):
    cause, what = CHUNK_CARRY, "the state is carried over a chunk without that chunk's decay"

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        (out, new), _, decay = self.parts(q, k, v, g, beta, state)
        return out, new + (1.0 - decay[-1])[:, None, None] * state


class CarryWithDecayTwice(_AtChunks):
    cause, what = CHUNK_CARRY, "a chunk's decay is applied twice to the carried state"

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        (out, new), _, decay = self.parts(q, k, v, g, beta, state)
        return out, new + (decay[-1].square() - decay[-1])[:, None, None] * state


class OutputsWithoutCarry(_AtChunks):
    cause, what = CHUNK_CARRY, "the outputs of every chunk but the first leave out the state before it"

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        (out, new), _, decay = self.parts(q, k, v, g, beta, state)
        recalled = torch.einsum("thk,hkv->thv", q * decay[..., None], state)
        return (out - recalled if number else out), new


class ChunksFromZero(_AtChunks):
    cause, what = CHUNK_CARRY, "every chunk starts from zero"

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        return recurrence(q, k, v, g, beta, torch.zeros_like(state) if number else state)


class SegmentFromZero(_AtChunks):
    cause, what = RESET, "a continued prompt starts from a zero state"

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        return recurrence(q, k, v, g, beta, state if number else torch.zeros_like(state))


class WritesWithoutDelta(_AtChunks):
    cause, what = CHUNK_CARRY, "a chunk's writes do not take away what the incoming state recalls"

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, number: int
    ) -> tuple[Tensor, Tensor]:
        _, (out, new), decay = self.parts(q, k, v, g, beta, state)
        out = out + torch.einsum("thk,hkv->thv", q * decay[..., None], state)
        return out, new + decay[-1][:, None, None] * state


class QueryKeyTapsSwapped(_InDeltaNet):
    cause, what = WEIGHTS, "the convolution's taps of q and k stand in each other's place"

    def taps(self) -> Tensor:
        key = self.config.key_dim
        taps = self.weights["taps"]
        return torch.cat([taps[key : 2 * key], taps[:key], taps[2 * key :]])


class TapsReversed(_InDeltaNet):
    cause, what = WEIGHTS, "the convolution's taps are in reverse order"

    def taps(self) -> Tensor:
        return self.weights["taps"].flip(1)


class ProjectionsCutFlat(_InDeltaNet):
    cause, what = WEIGHTS, "the fused q, k, v, z are cut flat, not by key head"

    @classmethod
    def possible(cls, layer: PlainLayer) -> bool:
        return "fused" in layer.weights

    def projections(self, x: Tensor) -> dict[str, Tensor]:
        c = self.config
        parts = self.weights["fused"].split([c.key_dim, c.key_dim, c.value_dim, c.value_dim])
        own = {name: x @ part.T for name, part in zip("qkvz", parts, strict=True)}
        return own | {name: self.linear(name, x) for name in "ba"}


class FusedGatesCutFlat(_InDeltaNet):
    cause, what = WEIGHTS, "the fused b, a are cut flat, not by key head"

    @classmethod
    def possible(cls, layer: PlainLayer) -> bool:
        return "fused ba" in layer.weights

    def projections(self, x: Tensor) -> dict[str, Tensor]:
        own = {name: self.linear(name, x) for name in "qkvz"}
        return own | dict(zip("ba", (x @ self.weights["fused ba"].T).chunk(2, dim=1), strict=True))


class BetaAndDecaySwapped(_InDeltaNet):
    cause, what = WEIGHTS, "the projections of b and a stand in each other's place"

    def projections(self, x: Tensor) -> dict[str, Tensor]:
        own = super().projections(x)
        return own | {"a": own["b"], "b": own["a"]}


class SlotNotCleared(_InDeltaNet):
    cause, what = RESET, "a new request starts from what the last one left in its slot"

    def read(self, state: State, start: int) -> State:
        return state
