"""One layer of a Hugging Face model alone: every request by itself, unpadded, which is what is right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nxdi_qwen.parity.layer_run import LayerCase, LayerRun, RequestRun, begins


def text_model(model: Any) -> Any:
    """The module with the layers of a causal language model, or of the language model inside a multimodal one."""
    inner = model.model
    return getattr(inner, "language_model", inner)


@torch.inference_mode()
def run_huggingface_layer(model: Any, index: int, case: LayerCase) -> LayerRun:
    """Layer `index` of a transformers 5 model with eager attention; inputs are cast to the model's dtype.

    Padding, slots and idle rows of the case do not exist here: nothing of them may show in any request.
    """
    text = text_model(model)
    config = text.config
    layer = text.layers[index]
    linear = config.layer_types[index] == "linear_attention"
    dtype = next(layer.parameters()).dtype
    runs = [RequestRun(torch.empty(fed.x.shape)) for fed in case.requests]
    caches = [_new_cache(config) for _ in case.requests]
    for call, begin in zip(case.calls, begins(case), strict=True):
        for request, count in call.counts.items():
            first, cache = begin[request], caches[request]
            tokens = slice(first, first + count)
            x = case.requests[request].x[None, tokens].to(dtype)
            positions = case.requests[request].positions[:, None, tokens]
            if not hasattr(text.rotary_emb, "mrope_section"):
                positions = positions[0]
            mask = None if linear else _causal_mask(first, count, dtype)
            out = layer(x, position_embeddings=text.rotary_emb(x, positions), attention_mask=mask, cache=cache)
            runs[request].output[tokens] = out[0].float()
            runs[request].states.append(_state(cache, index, linear, config))
    return LayerRun(tuple(runs))


def _new_cache(config: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=config)


def _causal_mask(first: int, count: int, dtype: torch.dtype) -> Tensor:
    """[1, 1, count, first + count], added to the scores."""
    visible = torch.arange(first + count) <= first + torch.arange(count)[:, None]
    return torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]


def _state(cache: Any, index: int, linear: bool, config: Any) -> dict[str, Tensor]:
    if not linear:
        held = cache.layers[index]
        return {role: getattr(held, f"{role}s")[0].transpose(0, 1).float().clone() for role in ("key", "value")}
    kernel = config.linear_conv_kernel_dim
    return {
        "recurrent": cache.get_recurrent_state(index)[0].float().clone(),
        # Theirs holds as many columns as the kernel has taps, of which the oldest is never read again.
        "conv": cache.get_conv_state(index)[0][:, 1 - kernel :].float().clone(),
    }
