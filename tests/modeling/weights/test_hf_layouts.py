"""Checkpoints saved by Hugging Face's own classes, against what those classes compute from them."""

import pytest
import torch
import torch.nn.functional as F

from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.weights import Checkpoint, plan_weights, stream_weights, weight_specs
from tests.hf_fixtures import hf_model, save_checkpoint

FORMS = [
    ("qwen3_next", {}),
    ("qwen3_next", {"stacked": True, "shards": 3}),
    ("qwen3_next_mixed", {"shards": 2}),
    ("qwen3_5", {}),
    ("qwen3_5", {"nested": True, "shards": 2}),
    ("qwen3_5_tied", {"nested": True}),
    ("qwen3_5_bias", {}),
    ("qwen3_5_moe", {"stacked": True}),
    ("qwen3_5_moe", {"nested": True, "stacked": True, "shards": 4}),
    ("qwen3_5_moe_tied", {}),
    ("qwen3_5_moe_tied", {"nested": True}),
]


@pytest.mark.parametrize(("name", "form"), FORMS, ids=[f"{n}-{'-'.join(f)}" for n, f in FORMS])
def test_every_parameter_is_what_hf_computes_with(name, form, tmp_path):
    model = hf_model(name)
    folder = save_checkpoint(model, tmp_path / "checkpoint", **form)
    loaded = load_config(folder)
    checkpoint = Checkpoint.open(folder)
    plan = plan_weights(loaded.config, checkpoint, loaded.quantization)
    ours = dict(stream_weights(plan, checkpoint, torch.float32))

    specs = weight_specs(plan.config, torch.float32)
    assert list(ours) == list(specs)
    assert {n: (tuple(t.shape), t.dtype) for n, t in ours.items()} == specs
    assert plan.config.tie_word_embeddings == model.config.tie_word_embeddings
    assert ("lm_head.weight" in ours) != model.config.tie_word_embeddings
    assert bool(plan.unused["vision"]) == form.get("nested", False)

    hf = {n.removeprefix("model."): t for n, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del hf["lm_head.weight"]
    assert ours.pop("rank").tolist() == [0]
    torch.testing.assert_close(ours.pop("rope.inv_freq"), model.model.rotary_emb.inv_freq, rtol=0, atol=0)
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer, "linear_attn"):
            _check_gdn(layer.linear_attn, _take(ours, hf, f"layers.{index}.linear_attn."))
        if hasattr(layer.mlp, "experts"):
            _check_moe(layer.mlp, _take(ours, hf, f"layers.{index}.mlp."))
    assert ours.keys() == hf.keys()
    for n, tensor in ours.items():
        assert torch.equal(tensor, hf[n]), n


def _take(ours, hf, prefix):
    for name in [n for n in hf if n.startswith(prefix)]:
        del hf[name]
    return {name.removeprefix(prefix): ours.pop(name) for name in list(ours) if name.startswith(prefix)}


def _check_gdn(mixer, ours):
    """One-hot inputs make HF's own projections spell out their weights, column by column, in HF's own order."""
    eye = torch.eye(mixer.hidden_size)[None]
    if hasattr(mixer, "in_proj_qkvz"):
        parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(eye), mixer.in_proj_ba(eye))
        parts = [part.flatten(2) for part in parts]
    else:
        q, k, v = mixer.in_proj_qkv(eye).split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        parts = [q, k, v, mixer.in_proj_z(eye), mixer.in_proj_b(eye), mixer.in_proj_a(eye)]
    for name, part in zip("qkvzba", parts, strict=True):
        assert torch.equal(ours[f"{name}_proj.weight"].T, part[0]), name
    conv = torch.cat([ours[f"{name}_conv.weight"] for name in "qkv"])
    assert torch.equal(conv[:, None], mixer.conv1d.weight)
    assert [len(ours[f"{name}_conv.weight"]) for name in "qkv"] == [mixer.key_dim, mixer.key_dim, mixer.value_dim]
    for name, theirs in (("A_log.weight", mixer.A_log), ("dt_bias.weight", mixer.dt_bias)):
        assert torch.equal(ours[name], theirs), name
    for name in ("norm.weight", "out_proj.weight"):
        assert torch.equal(ours[name], mixer.state_dict()[name]), name


def _check_moe(mlp, ours):
    assert torch.equal(ours["router.weight"], mlp.gate.weight)
    assert torch.equal(ours["shared_expert_gate.weight"], mlp.shared_expert_gate.weight)
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(ours[f"shared_expert.{part}.weight"], getattr(mlp.shared_expert, part).weight)
    gate, up, down = (ours[f"experts.{part}_proj"] for part in ("gate", "up", "down"))
    x = torch.randn(5, gate.shape[-1], generator=torch.Generator().manual_seed(0))
    for expert in range(len(gate)):
        chosen = torch.full((5, 1), expert)
        expected = mlp.experts(x, chosen, torch.ones(5, 1))
        result = F.linear(F.silu(F.linear(x, gate[expert])) * F.linear(x, up[expert]), down[expert])
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
