"""The gated delta rule in its three ways: prefill in chunks, one step, and several steps with every state.

Per value head, with the state ``S`` [dk, dv] in float32 (Yang et al., "Gated Delta Networks", arXiv:2412.06464)::

    S <- exp(g) S
    S <- S + k (beta (v - S^T k))^T
    o  = S^T q

Shapes shared by all functions (B rows, T tokens, Hk key heads, Hv value heads, value head j uses key head j // (Hv /
Hk)): ``query``, ``key`` [B, T, Hk, dk] and ``value`` [B, T, Hv, dv] in any float dtype; ``log_decay`` (g <= 0) and
``beta`` [B, T, Hv] float32; ``state`` [B, Hv, dk, dv] float32; ``valid`` [B, T] bool. ``query`` and ``key`` arrive as
the convolution leaves them: they are L2-normalised here. Where ``valid`` is false, nothing changes and whatever the
inputs hold there, NaN included, is selected away; the output there is finite and meaningless.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from nxdi_qwen.modeling.ops.chunk_scan import Chunks, scan_serially, scan_two_level, serial_is_cheaper

CHUNK = 64
# The triangular systems of a chunk are solved by blocks of this many tokens.
SOLVE_BLOCK = 32
_L2_EPS = 1e-6


@dataclass(frozen=True)
class ChunkMasks:
    """Constant triangles of zeros and ones, float32; one set serves all layers of a graph.

    `lower` and `strictly_lower` are of one chunk, [64, 64]; `identity` and `couplings` of one block of the solution,
    [32, 32]: for blocks of 1, 2, 4 ... 16, the lower left block of every pair of neighbours on the diagonal.
    """

    lower: Tensor
    strictly_lower: Tensor
    identity: Tensor
    couplings: tuple[Tensor, ...]

    @classmethod
    def build(cls, device: torch.device) -> ChunkMasks:
        # 32-bit numbers: nothing here needs more, and a device may emulate more.
        index = torch.arange(CHUNK, device=device, dtype=torch.int32)
        rows, columns = index[:, None], index[None, :]
        strictly_lower = (rows > columns).to(torch.float32)
        # For blocks of 1, 2, 4 ... 32: one where two tokens share a block.
        same, block = [], 1
        while block <= SOLVE_BLOCK:
            same.append(_same_block(block, device))
            block *= 2
        below = strictly_lower[:SOLVE_BLOCK, :SOLVE_BLOCK]
        return cls(
            lower=(rows >= columns).to(torch.float32),
            strictly_lower=strictly_lower,
            identity=same[0],
            couplings=tuple((pair - own) * below for own, pair in itertools.pairwise(same)),
        )


def _same_block(block: int, device: torch.device) -> Tensor:
    """[32, 32] float32. The blocks are counted out, without a division, which would lower to a floor."""
    numbers = torch.arange(SOLVE_BLOCK // block, device=device, dtype=torch.int32)
    numbers = numbers[:, None].expand(-1, block).reshape(SOLVE_BLOCK)
    return (numbers[:, None] == numbers).to(torch.float32)


def unit_lower_inverse(strictly_lower: Tensor, masks: ChunkMasks) -> Tensor:
    """Inverse of ``I + A`` for a strictly lower triangular ``A`` [B, 32, 32] float32.

    Recursive 2 x 2 block inverse, from blocks of 1 to blocks of 32: with ``T11`` and ``T22`` known,
    ``T21 = -T22 A21 T11``. A power series in ``A`` is the same in exact arithmetic, and useless in float32: with equal
    keys its terms grow like binomial coefficients before they cancel. Each round is two matrix products of the whole
    matrix, in which a mask picks the ``A21`` blocks, so that the rank stays that of the input.
    """
    # With 1 x 1 blocks both inverses are the identity.
    inverse = masks.identity - strictly_lower * masks.couplings[0]
    for coupling in masks.couplings[1:]:
        inverse = inverse - torch.bmm(torch.bmm(inverse, strictly_lower * coupling), inverse)
    return inverse


def solve_unit_lower(strictly_lower: Tensor, right: tuple[Tensor, ...], masks: ChunkMasks) -> list[Tensor]:
    """``(I + A)^-1 R`` for a strictly lower triangular ``A`` [B, 64, 64] and each ``R`` [B, 64, d], float32.

    By forward substitution in two blocks of 32, whose inverses are made side by side: a quarter of the work that the
    inverse of the whole matrix takes, and the same stability.
    """
    a11, a21 = (strictly_lower[:, rows, :SOLVE_BLOCK] for rows in (_TOP, _BOTTOM))
    a22 = strictly_lower[:, SOLVE_BLOCK:, SOLVE_BLOCK:]
    t11, t22 = unit_lower_inverse(torch.cat([a11, a22]), masks).split(strictly_lower.shape[0])
    solutions = []
    for r in right:
        first = torch.bmm(t11, r[:, _TOP])
        second = torch.bmm(t22, r[:, _BOTTOM] - torch.bmm(a21, first))
        solutions.append(torch.cat([first, second], dim=1))
    return solutions


_TOP, _BOTTOM = slice(0, SOLVE_BLOCK), slice(SOLVE_BLOCK, CHUNK)


def gated_delta_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    valid: Tensor,
    masks: ChunkMasks,
    checkpoints: tuple[int, ...] = (),
) -> tuple[Tensor, list[Tensor]]:
    """T tokens from any state, in chunks of 64 (the chunked form of the paper's section 3.3).

    `checkpoints` are multiples of the chunk, ascending. Returns the output [B, T, Hv, dv] float32 and the states [B,
    Hv, dk, dv] after each checkpoint, then after the last token.
    """
    rows, tokens, heads, value_dim = value.shape
    query, key, value, log_decay, beta = _prepare(query, key, value, log_decay, beta, valid)
    count = -(-tokens // CHUNK)
    q, k, v = (_to_chunks(x, count) for x in (query, key, value))  # [B * Hv * N, C, d]
    g, b = (_to_chunks(x[..., None], count) for x in (log_decay, beta))  # [B * Hv * N, C, 1]

    lower, strictly_lower = masks.lower, masks.strictly_lower
    # log_span[i, j] is the sum of g over j < t <= i. As a sum of terms of one sign it keeps its digits, which a
    # difference of two cumulative sums loses after one strong decay.
    log_span = (lower * g.transpose(1, 2)) @ strictly_lower
    decay = torch.exp(log_span) * lower
    from_start = torch.exp(g[..., 0] @ lower.transpose(0, 1))[..., None]  # decay since before the chunk's first token
    to_end = torch.exp(log_span[:, -1])[..., None]  # decay until the chunk's last token

    keys = k.transpose(1, 2)
    # What each token writes if the chunk starts from zero, and what of the incoming state its write replaces.
    system = b * strictly_lower * decay * torch.bmm(k, keys)
    written, erased = solve_unit_lower(system, (b * v, b * from_start * k), masks)
    attention = torch.bmm(q, keys) * decay
    chunks = Chunks(
        *(
            x.reshape(rows * heads, count, *x.shape[1:])
            for x in (q, keys, attention, from_start, to_end, written, erased)
        )
    )
    scan = scan_serially if serial_is_cheaper(count) else scan_two_level
    ends = [checkpoint // CHUNK for checkpoint in (*checkpoints, count * CHUNK)]
    out, states = scan(chunks, state.reshape(rows * heads, *state.shape[2:]), ends)
    out = out.reshape(rows, heads, count * CHUNK, value_dim)[:, :, :tokens]
    return out.transpose(1, 2), [after.reshape(state.shape) for after in states]


def gated_delta_verify(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, valid: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """A few tokens one after the other, with the state after each: the verification of drafts.

    Returns the output [B, T, Hv, dv] float32 and T states [B, Hv, dk, dv]. The decode step is T = 1.
    """
    query, key, value, log_decay, beta = _prepare(query, key, value, log_decay, beta, valid)
    outputs, states = [], []
    for t in range(value.shape[1]):
        out, state = _step(query[:, t], key[:, t], value[:, t], log_decay[:, t], beta[:, t], state)
        outputs.append(out)
        states.append(state)
    return torch.stack(outputs, dim=1), states


def _step(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of every row: query, key [B, Hv, dk], value [B, Hv, dv], log_decay, beta [B, Hv]."""
    # Key and query meet the state that came in, in one product, so that it is read once and the new one only written.
    decay = torch.exp(log_decay)[..., None]
    recalled, answered = (torch.stack([key, query], dim=2) @ state).unbind(dim=2)
    written = beta[..., None] * (value - decay * recalled)
    out = decay * answered + (query * key).sum(dim=-1, keepdim=True) * written
    return out, decay[..., None] * state + key[..., None] * written[:, :, None, :]


def _prepare(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Padding selected away, float32, q and k normalised and repeated to the value heads, q scaled by dk^-0.5."""
    repeats = value.shape[2] // key.shape[2]
    q, k, v = (_select(x, valid[..., None, None]) for x in (query, key, value))
    q = _repeat_heads(_l2_normalize(q) * query.shape[-1] ** -0.5, repeats)
    k = _repeat_heads(_l2_normalize(k), repeats)
    return q, k, v, _select(log_decay, valid[..., None]), _select(beta, valid[..., None])


def _select(x: Tensor, valid: Tensor) -> Tensor:
    # A selection, not a product: 0 * NaN is NaN.
    return torch.where(valid, x, 0.0).to(torch.float32)


def _l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _L2_EPS)


def _repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """[B, T, H, d] -> [B, T, H * repeats, d], every head `repeats` times in a row; never above rank 4."""
    if repeats == 1:
        return x
    rows, tokens, heads, dim = x.shape
    x = x.reshape(rows * tokens, heads, 1, dim).expand(-1, -1, repeats, -1)
    return x.reshape(rows, tokens, heads * repeats, dim)


def _to_chunks(x: Tensor, count: int) -> Tensor:
    """[B, T, H, d] -> [B * H * count, CHUNK, d], zero-filled at the end."""
    rows, tokens, heads, dim = x.shape
    x = x.transpose(1, 2)
    if count * CHUNK > tokens:
        x = torch.cat([x, x.new_zeros(rows, heads, count * CHUNK - tokens, dim)], dim=2)
    # Contiguous: every product of matrices below would otherwise copy its operands.
    return x.reshape(rows * heads * count, CHUNK, dim).contiguous()
