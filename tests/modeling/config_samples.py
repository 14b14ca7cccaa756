"""Small configurations in the spellings of the published ones, for the tests of the configuration reader."""

import json

from nxdi_qwen.modeling.config_loader import load_config

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "dtype": "float32",
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
ROPE = {"rope_type": "default", "rope_theta": 10000000, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
NEXT = {"model_type": "qwen3_next", "intermediate_size": 96, "rope_theta": 1e7} | SIZES | EXPERTS
DENSE = {"model_type": "qwen3_5_text", "intermediate_size": 96, "rope_parameters": ROPE} | SIZES
MOE = {"model_type": "qwen3_5_moe_text", "rope_parameters": ROPE} | SIZES | EXPERTS
LINEAR, FULL = "linear_attention", "full_attention"


def nested(text, **outer):
    model_type = text["model_type"].removesuffix("_text")
    vision = {"model_type": model_type, "hidden_size": 8, "rope_parameters": {"rope_type": "axial"}}
    return {"model_type": model_type, "text_config": text, "vision_config": vision} | outer


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


def write_and_load(folder, config, generation=None):
    """load_config of `folder` after writing these objects as its config.json and generation_config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return load_config(folder)
