"""Random weights: complete, reproducible, of sane size."""

import pytest
import torch

from nxdi_qwen.modeling.rope_frequencies import rope_inv_freq
from nxdi_qwen.modeling.weights import collect, random_blocks, weight_specs
from tests.modeling.weights.synthetic import make_config

CONFIG = make_config("qwen3_next", vocab_size=500, hidden_size=64, linear_num_value_heads=64, head_dim=32)


def random_weights(config, dtype, seed):
    return collect(random_blocks(config, dtype, seed), config, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matches_the_specs_in_order(dtype):
    weights = dict(random_weights(CONFIG, dtype, 0))
    specs = weight_specs(CONFIG, dtype)
    assert list(weights) == list(specs)
    assert {n: (tuple(t.shape), t.dtype) for n, t in weights.items()} == specs
    assert all(t.isfinite().all() for t in weights.values())
    assert torch.equal(weights["rope.inv_freq"], rope_inv_freq(CONFIG))


def test_a_seed_is_a_model():
    first, again, other = (dict(random_weights(CONFIG, torch.float32, seed)) for seed in (3, 3, 4))
    rounded = dict(random_weights(CONFIG, torch.bfloat16, 3))
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor.to(rounded[name].dtype), rounded[name])
        assert name in ("rank", "rope.inv_freq") or not torch.equal(tensor, other[name]), name
    experts = first["layers.0.mlp.experts.up_proj"]
    assert not torch.equal(experts[0], experts[1])
    assert not torch.equal(experts, first["layers.1.mlp.experts.up_proj"])


def test_sizes():
    weights = dict(random_weights(CONFIG, torch.float32, 0))
    assert weights["embed_tokens.weight"].std() == pytest.approx(64**-0.5, rel=0.1)
    assert weights["layers.1.self_attn.q_proj.weight"].std() == pytest.approx(64**-0.5, rel=0.1)
    assert weights["norm.weight"].abs().max() < 0.5
    assert (weights["layers.0.linear_attn.norm.weight"] - 1).abs().max() < 0.5
    a_log, dt_bias = (weights[f"layers.0.linear_attn.{name}.weight"] for name in ("A_log", "dt_bias"))
    a = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))  # a_proj of a normalised input
    assert (a_log.exp() * torch.nn.functional.softplus(a + dt_bias)).mean() < 0.05
