"""Rotary frequencies, bit for bit those of Hugging Face's rotary modules."""

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.ops.rotary import rotary_cos_sin
from nxdi_qwen.modeling.rope_frequencies import rope_attention_scaling, rope_inv_freq

HF_CLASSES = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextRotaryEmbedding),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5TextRotaryEmbedding),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeTextRotaryEmbedding),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}


def both(tmp_path, family, rope_parameters, head_dim=256):
    """The Hugging Face rotary module and our configuration read from the file that its configuration saves."""
    config_class, module_class = HF_CLASSES[family]
    hf_config = config_class(num_hidden_layers=4, head_dim=head_dim, rope_parameters=rope_parameters)
    hf_config.save_pretrained(tmp_path)
    return module_class(hf_config), load_config(tmp_path).config


@pytest.mark.parametrize("family", HF_CLASSES)
@pytest.mark.parametrize(
    "rope_parameters",
    [
        {"rope_type": "default", "rope_theta": 10000000},
        {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        YARN | {"rope_theta": 10000000},
        YARN | {"rope_theta": 5e6, "factor": 2, "original_max_position_embeddings": 4096},
        YARN | {"rope_theta": 1e7, "factor": 1.0},
        YARN | {"rope_theta": 1e7, "attention_factor": 0.8},
        YARN | {"rope_theta": 1e7, "beta_fast": 64, "beta_slow": 0.5},
        YARN | {"rope_theta": 1e7, "mscale": 0.7, "mscale_all_dim": 1.3},
        YARN | {"rope_theta": 1e7, "mscale": 0.7},
        YARN | {"rope_theta": 1e7, "truncate": False},
        YARN | {"rope_theta": 1e7, "original_max_position_embeddings": 6},
    ],
    ids=lambda value: "-".join(f"{key}={each}" for key, each in value.items()),
)
def test_frequencies_and_scaling_equal_hugging_face(tmp_path, family, rope_parameters):
    module, config = both(tmp_path, family, dict(rope_parameters))
    ours = rope_inv_freq(config)
    assert ours.dtype == torch.float32 and ours.shape == (config.rotary_dim // 2,)
    assert torch.equal(ours, module.inv_freq)
    assert rope_attention_scaling(config) == module.attention_scaling


def axes_of_frequencies(config):
    """The position axis of each frequency: 0 time, 1 height, 2 width."""
    half, positions = config.rotary_dim // 2, torch.arange(3)[:, None, None]
    cos, _ = rotary_cos_sin(positions, torch.ones(half), config.rope.mrope_section, 1.0)
    return cos.acos().round().int().flatten().tolist()


@pytest.mark.parametrize(
    "head_dim, section", [(256, [11, 11, 10]), (256, None), (32, [2, 1, 1]), (512, [24, 20, 20])], ids=str
)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_mrope_axes_equal_hugging_face(tmp_path, family, head_dim, section):
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True}
    rope |= {} if section is None else {"mrope_section": section}
    module, config = both(tmp_path, family, rope, head_dim)
    axes = axes_of_frequencies(config)
    # Hugging Face's own recomposition of a tensor that holds, at every frequency, the number of its axis.
    marked = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, len(axes)).clone()
    assert module.recomposition_frequencies(marked)[0, 0, : len(axes)].tolist() == axes
    assert [axes.count(axis) for axis in range(3)] == (section or [11, 11, 10])


def test_without_sections_every_frequency_is_of_time(tmp_path):
    _, config = both(tmp_path, "qwen3_next", {"rope_type": "default", "rope_theta": 1e7})
    assert axes_of_frequencies(config) == [0] * 32


def test_frequencies_are_real_under_a_meta_device(tmp_path):
    _, config = both(tmp_path, "qwen3_next", YARN | {"rope_theta": 1e7})
    with torch.device("meta"):
        assert rope_inv_freq(config).device.type == "cpu"
