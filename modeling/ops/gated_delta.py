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

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64
_L2_EPS = 1e-6


@dataclass(frozen=True)
class ChunkMasks:
    """The constant triangles of one chunk, [64, 64] float32 of zeros and ones; one set serves all layers of a graph.

    `couplings` holds, for blocks of 1, 2, 4 ... 32, the lower left block of every pair of neighbours on the diagonal.
    """

    identity: Tensor
    lower: Tensor
    strictly_lower: Tensor
    couplings: tuple[Tensor, ...]

    @classmethod
    def build(cls, device: torch.device) -> ChunkMasks:
        index = torch.arange(CHUNK, device=device)
        rows, columns = index[:, None], index[None, :]
        couplings = []
        block = 1
        while block < CHUNK:
            own, pair = _block_numbers(block, device), _block_numbers(2 * block, device)
            below = (own[:, None] > own[None, :]).to(torch.float32)
            couplings.append(below * (pair[:, None] == pair[None, :]).to(torch.float32))
            block *= 2
        return cls(
            identity=(rows == columns).to(torch.float32),
            lower=(rows >= columns).to(torch.float32),
            strictly_lower=(rows > columns).to(torch.float32),
            couplings=tuple(couplings),
        )


def _block_numbers(block: int, device: torch.device) -> Tensor:
    """[64]: to which block of `block` tokens each token belongs, without a division, which would lower to a floor."""
    return torch.arange(CHUNK // block, device=device)[:, None].expand(-1, block).reshape(CHUNK)


def unit_lower_inverse(strictly_lower: Tensor, masks: ChunkMasks) -> Tensor:
    """Inverse of ``I + A`` for a strictly lower triangular ``A`` [..., 64, 64] float32.

    Recursive 2 x 2 block inverse, from blocks of 1 to blocks of C: with ``T11`` and ``T22`` known,
    ``T21 = -T22 A21 T11``. A power series in ``A`` is the same in exact arithmetic, and useless in float32: with equal
    keys its terms reach 1e17 before they cancel. Each round is two matrix products of the whole matrix, in which a mask
    picks the ``A21`` blocks, so that the rank stays that of the input.
    """
    # With 1 x 1 blocks both inverses are the identity.
    inverse = masks.identity - strictly_lower * masks.couplings[0]
    for coupling in masks.couplings[1:]:
        inverse = inverse - inverse @ (strictly_lower * coupling) @ inverse
    return inverse


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
    q, k, v = (_to_chunks(x, count) for x in (query, key, value))  # [B * Hv, N, C, d]
    g, b = (_to_chunks(x[..., None], count) for x in (log_decay, beta))  # [B * Hv, N, C, 1]

    lower, strictly_lower = masks.lower, masks.strictly_lower
    # log_span[i, j] is the sum of g over j < t <= i. As a sum of terms of one sign it keeps its digits, which a
    # difference of two cumulative sums loses after one strong decay.
    log_span = lower @ (g * strictly_lower)
    decay = torch.exp(log_span) * lower
    from_start = torch.exp(lower @ g)  # [B * Hv, N, C, 1]: decay since before the chunk's first token
    to_end = torch.exp(log_span[:, :, -1, :])[..., None]  # [B * Hv, N, C, 1]: decay until the chunk's last token

    inverse = unit_lower_inverse(b * (k @ k.transpose(-1, -2)) * decay * strictly_lower, masks)
    written = inverse @ (b * v)  # what each token writes if the chunk starts from zero
    erased = inverse @ (b * from_start * k)  # what of the incoming state each token's write replaces
    k_to_end = (k * to_end).transpose(-1, -2)

    carried = state.reshape(rows * heads, *state.shape[2:])
    incoming, writes, kept = [], [], []
    for n in range(count):
        incoming.append(carried)
        writes.append(written[:, n] - erased[:, n] @ carried)
        carried = carried * from_start[:, n, -1:] + k_to_end[:, n] @ writes[-1]
        if (n + 1) * CHUNK in checkpoints:
            kept.append(carried.reshape(state.shape))
    kept.append(carried.reshape(state.shape))

    attention = (q @ k.transpose(-1, -2)) * decay
    out = (q * from_start) @ torch.stack(incoming, dim=1) + attention @ torch.stack(writes, dim=1)
    out = out.reshape(rows, heads, count * CHUNK, value_dim)[:, :, :tokens]
    return out.transpose(1, 2), kept


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
    state = state * torch.exp(log_decay)[..., None, None]
    recalled = (key[:, :, None, :] @ state)[:, :, 0]
    state = state + key[..., None] * (beta[..., None] * (value - recalled))[:, :, None, :]
    return (query[:, :, None, :] @ state)[:, :, 0], state


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
    return torch.where(valid, x.to(torch.float32), 0.0)


def _l2_normalize(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + _L2_EPS)


def _repeat_heads(x: Tensor, repeats: int) -> Tensor:
    """[B, T, H, d] -> [B, T, H * repeats, d], every head `repeats` times in a row; never above rank 4."""
    rows, tokens, heads, dim = x.shape
    x = x.reshape(rows * tokens, heads, 1, dim).expand(-1, -1, repeats, -1)
    return x.reshape(rows, tokens, heads * repeats, dim)


def _to_chunks(x: Tensor, count: int) -> Tensor:
    """[B, T, H, d] -> [B * H, count, CHUNK, d], zero-filled at the end."""
    rows, tokens, heads, dim = x.shape
    x = x.transpose(1, 2)
    if count * CHUNK > tokens:
        x = torch.cat([x, x.new_zeros(rows, heads, count * CHUNK - tokens, dim)], dim=2)
    return x.reshape(rows * heads, count, CHUNK, dim)
