"""The scan over the chunks of the gated delta rule: what each chunk makes of the state that comes into it.

From the incoming state S [dk, dv], a chunk of C tokens writes ``U = W - E S``, returns ``O = decay Q S + A U`` and
leaves ``decay S + K^T U``, its keys K decayed to its end. Serial, this is a step a chunk, and every step stands in the
graph.

The two-level form composes what chunks do to the state: as a matrix ``M = decay I - K^T E`` and an offset ``K^T W``.
The chunks of a group are composed one after the other, in all groups at once; the groups' maps then carry the state
from group to group; each chunk's incoming state follows from that of its group. N chunks in groups of about sqrt(N)
take about 2 sqrt(N) steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Chunks(NamedTuple):
    """N chunks of C tokens, for B heads of all rows; float32."""

    query: Tensor  # [B, N, C, dk]
    keys: Tensor  # [B, N, dk, C]
    attention: Tensor  # [B, N, C, C], A above
    from_start: Tensor  # [B, N, C, 1]: decay since before the chunk's first token
    to_end: Tensor  # [B, N, C, 1]: decay until the chunk's last token
    written: Tensor  # [B, N, C, dv], W above
    erased: Tensor  # [B, N, C, dk], E above


# The cost model. A step of the scan costs its arithmetic and a fixed amount: its place in the graph, which a compiler
# that unrolls pays for, and the wait for the step before. Arithmetic a chunk and head, in products of [64, 128] x
# [128, 128] (dk = dv = 128, C = 64): everything else of the rule takes 4, the serial scan 2 (E S and K^T U), the
# two-level one 9 (M 1, offset 1, composition 4, incoming states 2, E S 1). So it more than doubles the arithmetic to
# save N - 2 sqrt(N) steps. At 32 chunks, a prompt of 2,048 tokens, that would be 20 steps a layer, and the serial form
# is kept; beyond, its graph would grow without bound.
SERIAL_CHUNKS = 32


def serial_is_cheaper(chunks: int) -> bool:
    """Whether a graph for this many chunks takes the serial scan."""
    return chunks <= SERIAL_CHUNKS


def group_size(chunks: int) -> int:
    """Chunks to a group in the two-level form: what makes the fewest steps."""
    return min(range(1, chunks + 1), key=lambda size: size + -(-chunks // size))


def scan_serially(chunks: Chunks, state: Tensor, ends: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Output [B, N, C, dv], and the state [B, dk, dv] after each number of chunks in `ends`; `state` is before them."""
    outputs, states = [], [state]
    for n in range(chunks.query.shape[1]):
        query, keys, attention, from_start, to_end, written, erased = (x[:, n] for x in chunks)
        writes = written - torch.bmm(erased, state)
        outputs.append(from_start * torch.bmm(query, state) + torch.bmm(attention, writes))
        state = from_start[:, -1:] * state + torch.bmm(keys, to_end * writes)
        states.append(state)
    return torch.stack(outputs, dim=1), [states[end] for end in ends]


def scan_two_level(chunks: Chunks, state: Tensor, ends: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """The same as `scan_serially`, to rounding."""
    incoming, last = _incoming_states(chunks, state)
    writes = chunks.written - chunks.erased @ incoming
    outputs = chunks.from_start * (chunks.query @ incoming) + chunks.attention @ writes
    count = incoming.shape[1]
    return outputs, [incoming[:, end] if end < count else last for end in ends]


def _incoming_states(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """The state before each chunk [B, N, dk, dv], and after the last [B, dk, dv]."""
    batch, count, key_dim, _ = chunks.keys.shape
    value_dim = chunks.written.shape[-1]
    group = group_size(count)
    groups = -(-count // group)
    index = torch.arange(key_dim, device=state.device)
    identity = (index[:, None] == index).to(torch.float32)
    matrix = chunks.from_start[:, :, -1:] * identity - chunks.keys @ (chunks.to_end * chunks.erased)
    offset = chunks.keys @ (chunks.to_end * chunks.written)
    if missing := groups * group - count:
        # Chunks that change nothing.
        matrix = torch.cat([matrix, identity.expand(batch, missing, -1, -1)], dim=1)
        offset = torch.cat([offset, offset.new_zeros(batch, missing, key_dim, value_dim)], dim=1)

    # What a group's first j chunks do together, for j = 1 .. group.
    matrix = matrix.reshape(batch * groups, group, key_dim, key_dim)
    offset = offset.reshape(batch * groups, group, key_dim, value_dim)
    matrices, offsets = [matrix[:, 0]], [offset[:, 0]]
    for j in range(1, group):
        matrices.append(torch.bmm(matrix[:, j], matrices[-1]))
        offsets.append(torch.bmm(matrix[:, j], offsets[-1]) + offset[:, j])

    whole_matrix, whole_offset = (x[-1].reshape(batch, groups, key_dim, -1) for x in (matrices, offsets))
    before = []
    for g in range(groups):
        before.append(state)
        state = torch.bmm(whole_matrix[:, g], state) + whole_offset[:, g]
    first = torch.stack(before, dim=1).reshape(batch * groups, 1, key_dim, value_dim)

    others = torch.stack(matrices[:-1], dim=1) @ first + torch.stack(offsets[:-1], dim=1)
    incoming = torch.cat([first, others], dim=1).reshape(batch, groups * group, key_dim, value_dim)
    return incoming[:, :count], state
