"""Configurations of the public models, so that a shape can be tried without a checkpoint.

From the published configurations; the rows of Qwen3.5-0.8B, 2B and 4B are less well attested than the others. A real
checkpoint's config.json always wins over its preset.
"""

from __future__ import annotations

from typing import Any

from nxdi_qwen.modeling.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig, RopeConfig
from nxdi_qwen.modeling.errors import InputError

# layers, hidden, intermediate, query heads, key-value heads, GDN value heads, tied head
_DENSE = {
    "qwen3.5-0.8b": (24, 1024, 3584, 8, 2, 16, True),
    "qwen3.5-2b": (24, 2048, 6144, 8, 2, 16, True),
    "qwen3.5-4b": (32, 2560, 9216, 16, 4, 32, True),
    "qwen3.5-9b": (32, 4096, 12288, 16, 4, 32, False),
    "qwen3.5-27b": (64, 5120, 17408, 24, 4, 48, False),
    "qwen3.6-27b": (64, 5120, 17408, 24, 4, 48, False),
    "qwen3.8-27b": (64, 5120, 17408, 24, 4, 48, False),
}
# layers, hidden, expert and shared-expert intermediate, query heads, key-value heads, GDN value heads, experts, top-k
_MOE = {
    "qwen3.5-35b-a3b": (40, 2048, 512, 16, 2, 32, 256, 8),
    "qwen3.6-35b-a3b": (40, 2048, 512, 16, 2, 32, 256, 8),
    "qwen3.5-122b-a10b": (48, 3072, 1024, 32, 2, 64, 256, 8),
    "qwen3.5-397b-a17b": (60, 4096, 1024, 32, 2, 64, 512, 10),
    "qwen3-next-80b-a3b": (48, 2048, 512, 16, 2, 32, 512, 10),
    "qwen3-coder-next": (48, 2048, 512, 16, 2, 32, 512, 10),
}
_FULL_ATTENTION_INTERVAL = 4


def _dense(name: str) -> ModelConfig:
    layers, hidden, intermediate, query_heads, kv_heads, value_heads, tied = _DENSE[name]
    return _config(
        name,
        family="qwen3_5",
        hidden_size=hidden,
        num_hidden_layers=layers,
        moe_layers=(False,) * layers,
        intermediate_size=intermediate,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        linear_num_value_heads=value_heads,
        num_experts=0,
        num_experts_per_tok=0,
        moe_intermediate_size=None,
        shared_expert_intermediate_size=None,
        tie_word_embeddings=tied,
    )


def _moe(name: str) -> ModelConfig:
    layers, hidden, intermediate, query_heads, kv_heads, value_heads, experts, top_k = _MOE[name]
    return _config(
        name,
        family="qwen3_5_moe" if name.startswith("qwen3.") else "qwen3_next",
        hidden_size=hidden,
        num_hidden_layers=layers,
        moe_layers=(True,) * layers,
        intermediate_size=None,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        linear_num_value_heads=value_heads,
        num_experts=experts,
        num_experts_per_tok=top_k,
        moe_intermediate_size=intermediate,
        shared_expert_intermediate_size=intermediate,
        tie_word_embeddings=False,
    )


def _config(name: str, *, family: str, num_hidden_layers: int, **sizes: Any) -> ModelConfig:
    """The rest, which is the same in every size of a generation."""
    is_next = family == "qwen3_next"
    if is_next:
        eos_token_ids: tuple[int, ...] = (151645,)
    else:
        # From 3.6 on, generation_config.json adds a second end token.
        eos_token_ids = (248044,) if name.startswith("qwen3.5") else (248044, 248046)
    return ModelConfig(
        family=family,
        vocab_size=151936 if is_next else 248320,
        num_hidden_layers=num_hidden_layers,
        layer_types=tuple(
            LINEAR_ATTENTION if (layer + 1) % _FULL_ATTENTION_INTERVAL else FULL_ATTENTION
            for layer in range(num_hidden_layers)
        ),
        head_dim=256,
        attention_bias=False,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        rope=RopeConfig(
            theta=5e6 if name == "qwen3-coder-next" else 1e7,
            partial_rotary_factor=0.25,
            mrope_section=None if is_next else (11, 11, 10),
        ),
        dtype="bfloat16",
        eos_token_ids=eos_token_ids,
        pad_token_id=None,
        bos_token_id=None,
        **sizes,
    )


PRESETS: dict[str, ModelConfig] = {name: _dense(name) for name in _DENSE} | {name: _moe(name) for name in _MOE}


def preset(name: str) -> ModelConfig:
    """The configuration of the public model `name`, in lower case. Raises InputError that lists the names."""
    if name not in PRESETS:
        raise InputError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
