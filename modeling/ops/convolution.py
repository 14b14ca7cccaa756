"""The causal depthwise convolution in front of the gated delta rule, with its state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from nxdi_qwen.modeling.ops.tokens import take_tokens


def causal_convolution(
    x: Tensor, weight: Tensor, state: Tensor, lengths: Tensor, ends: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """Convolution along the tokens, then silu.

    `x` [B, T, C] in the model's dtype, valid tokens first; `weight` [K, C], the oldest input's tap first; `state` [B,
    C, K - 1], the last inputs before `x`, oldest first, zeros before the first token of a prompt; `lengths` [B] valid
    tokens. Returns the output [B, T, C] in the dtype of `x`, and for every entry of `ends` the state after that many
    tokens, or after the last valid one where a row is shorter. Sums in float32, rounded to the model's dtype once
    before silu, as torch's own convolution does.
    """
    kernel = weight.shape[0]
    tokens = x.shape[1]
    window = torch.cat([state.transpose(1, 2), x], dim=1)  # [B, K - 1 + T, C]
    taps = weight.to(torch.float32)
    out = window[:, :tokens].to(torch.float32) * taps[0]
    for i in range(1, kernel):
        out = out + window[:, i : i + tokens].to(torch.float32) * taps[i]
    if tokens == 1:
        shifted = torch.cat([state[..., 1:], x.transpose(1, 2)], dim=2)
        states = [torch.where(lengths[:, None, None] > 0, shifted, state)]
    else:
        states = [_tail(window, lengths.clamp(max=end), kernel) for end in ends]
    return functional.silu(out.to(x.dtype)), states


def _tail(window: Tensor, lengths: Tensor, kernel: int) -> Tensor:
    """The K - 1 inputs up to the last valid token: [B, C, K - 1]. A choice, so nothing invalid can enter."""
    index = lengths[:, None] + torch.arange(kernel - 1, device=window.device)
    # Contiguous, as the state comes in: compiled graphs trust strides.
    return take_tokens(window, index).transpose(1, 2).contiguous()
