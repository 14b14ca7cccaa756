"""Suspected mistakes in attention layers."""

from __future__ import annotations

import torch
from torch import Tensor

from nxdi_qwen.parity.mistakes.base import CACHE, CAUSAL, GATE_SPLIT, HEADS, NORM, ROPE, Mistake
from nxdi_qwen.parity.plain_layer import PlainLayer, State


class _InAttention(Mistake):
    @classmethod
    def possible(cls, layer: PlainLayer) -> bool:
        return layer.is_attention


class QueryHeadsModulo(_InAttention):
    cause, what = HEADS, "query head j reads KV head j % Hkv instead of j // groups"

    def to_query_heads(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.config.num_attention_heads // self.config.num_key_value_heads, 1)


class QueriesThenGates(_InAttention):
    cause, what = GATE_SPLIT, "q_proj is cut into all queries, then all gates, not per head"

    def split_gate(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        query, gate = projected.reshape(len(projected), 2, self.config.num_attention_heads, -1).unbind(1)
        return query, gate


class GateThenQuery(_InAttention):
    cause, what = GATE_SPLIT, "per head the gate is taken for the query and the query for the gate"

    def split_gate(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        query, gate = super().split_gate(projected)
        return gate, query


class Interleaved(_InAttention):
    cause, what = GATE_SPLIT, "within a head query and gate are taken from alternating rows"

    def split_gate(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        query, gate = projected.reshape(len(projected), self.config.num_attention_heads, -1, 2).unbind(3)
        return query, gate


class HeadNormWithoutOne(_InAttention):
    cause, what = NORM, "the norms of queries and keys multiply by w, not by 1 + w"

    def norm_weight(self, name: str) -> Tensor:
        return self.weights[name] + (name not in ("q norm", "k norm"))


class KeysAsValues(_InAttention):
    cause, what = CACHE, "keys come back as values and values as keys"

    def kept(self, keys: Tensor, values: Tensor) -> State:
        return values, keys


class CacheOnePlaceFar(_InAttention):
    cause, what = CACHE, "keys and values are written one place too far"

    def append(self, cache: Tensor, new: Tensor, start: int) -> Tensor:
        return super().append(cache, new, start + 1)[: len(cache)]


class CacheForgotten(_InAttention):
    cause, what = CACHE, "keys and values of earlier calls are not there"

    def append(self, cache: Tensor, new: Tensor, start: int) -> Tensor:
        return super().append(torch.zeros_like(cache), new, start)


class SeesOneAhead(_InAttention):
    cause, what = CAUSAL, "a token attends to the one behind it"

    def visible(self, key_position: Tensor, query_position: Tensor) -> Tensor:
        return key_position <= query_position + 1


class NotItself(_InAttention):
    cause, what = CAUSAL, "a token does not attend to itself"

    def visible(self, key_position: Tensor, query_position: Tensor) -> Tensor:
        return (key_position < query_position) | (query_position == 0) & (key_position == 0)


class RopeNeighbours(_InAttention):
    cause, what = ROPE, "neighbouring dimensions are rotated as pairs instead of the two halves"

    def rotate_by(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        end = 2 * cos.shape[-1]
        order = torch.cat([torch.arange(0, end, 2), torch.arange(1, end, 2), torch.arange(end, x.shape[-1])])
        return super().rotate_by(x[..., order], cos, sin)


class RopeNeighboursInPlace(RopeNeighbours):
    def rotate_by(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        rotated = super().rotate_by(x, cos, sin)
        pairs = torch.stack([rotated[..., :half], rotated[..., half : 2 * half]], dim=-1).flatten(-2)
        return torch.cat([pairs, rotated[..., 2 * half :]], dim=-1)


class RopeBackwards(_InAttention):
    cause, what = ROPE, "the rotation goes the other way"

    def rotate_by(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return super().rotate_by(x, cos, -sin)


class RopeAbsent(_InAttention):
    cause, what = ROPE, "nothing is rotated"

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


class RopeRestarts(_InAttention):
    cause, what = ROPE, "the rotary positions of a continued prompt start at zero again"

    def positions(self, positions: Tensor, start: int) -> Tensor:
        # Positions that the caller gives itself (an image) do not restart.
        text = torch.equal(positions[0], positions[1]) and int(positions[0, 0]) == start
        return positions - start if text else positions


class RopeSections(_InAttention):
    cause, what = ROPE, "the sections of time, height and width stand one behind the other, not interleaved"

    @classmethod
    def possible(cls, layer: PlainLayer) -> bool:
        return layer.is_attention and layer.config.rope.mrope_section is not None

    def angles(self, positions: Tensor) -> Tensor:
        section = self.config.rope.mrope_section
        assert section is not None
        axis = torch.arange(3).repeat_interleave(torch.tensor(section))
        time = super().angles(positions[:1].expand(3, -1))
        frequencies = super().angles(torch.ones(3, 1, dtype=torch.int64))
        return torch.where(axis == 0, time, positions.float()[axis].T * frequencies)


class RopeTimeOnly(_InAttention):
    cause, what = ROPE, "height and width of images are ignored"

    @classmethod
    def possible(cls, layer: PlainLayer) -> bool:
        return layer.is_attention and layer.config.rope.mrope_section is not None

    def angles(self, positions: Tensor) -> Tensor:
        return super().angles(positions[:1].expand(3, -1))
