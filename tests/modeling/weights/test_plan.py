"""Every tensor is accounted for: prefixes, forms, the head, what is unused, and what is wrong."""

import pytest
import torch

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.weights import weight_specs
from tests.modeling.weights.synthetic import checkpoint_shapes, converted, make_config, mtp_shapes, planned, tagged

PREFIXES = ["model.", "model.language_model.", ""]
CONV = "model.layers.0.linear_attn.conv1d.weight"


def refused(folder, config, tensors, message, quantization=None):
    with pytest.raises(InputError, match=message) as caught:
        planned(folder, config, tensors, quantization)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
def test_every_form_for_every_family(tmp_path, prefix, family, fused, stacked):
    config = make_config(family)
    tensors = tagged(checkpoint_shapes(config, prefix, fused=fused, stacked=stacked))
    plan, checkpoint = planned(tmp_path, config, tensors)
    ours = converted(plan, checkpoint)
    assert list(ours) == list(weight_specs(config, torch.float32))
    del ours["rope.inv_freq"], ours["rank"]
    # Nothing lost, nothing doubled: all values of the checkpoint, each once.
    values = torch.cat([tensor.flatten() for tensor in ours.values()]).sort().values
    assert torch.equal(values, torch.arange(len(values), dtype=torch.float32))
    assert all(t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes for t in ours.values())


def test_fused_positions(tmp_path):
    """Key head 1's rows of [q, k, v x r, z x r] and [b x r, a x r], counted by hand: dk = 4, dv = 3, r = 3, Hk = 2."""
    config = make_config("qwen3_next")
    tensors = tagged(checkpoint_shapes(config, fused=True))
    ours = converted(*planned(tmp_path, config, tensors))
    at = "layers.0.linear_attn."
    qkvz, ba = (tensors[f"model.{at}in_proj_{name}.weight"] for name in ("qkvz", "ba"))
    assert torch.equal(ours[at + "q_proj.weight"], torch.cat((qkvz[0:4], qkvz[26:30])))
    assert torch.equal(ours[at + "k_proj.weight"], torch.cat((qkvz[4:8], qkvz[30:34])))
    assert torch.equal(ours[at + "v_proj.weight"], torch.cat((qkvz[8:17], qkvz[34:43])))
    assert torch.equal(ours[at + "z_proj.weight"], torch.cat((qkvz[17:26], qkvz[43:52])))
    assert torch.equal(ours[at + "b_proj.weight"], torch.cat((ba[0:3], ba[6:9])))
    assert torch.equal(ours[at + "a_proj.weight"], torch.cat((ba[3:6], ba[9:12])))


def test_split_positions(tmp_path):
    config = make_config("qwen3_5_moe")
    tensors = tagged(checkpoint_shapes(config, stacked=True))
    ours = converted(*planned(tmp_path, config, tensors))
    at = "layers.0.linear_attn."
    for kind, whole in (("proj", tensors[f"model.{at}in_proj_qkv.weight"]), ("conv", tensors[CONV][:, 0])):
        assert torch.equal(ours[f"{at}q_{kind}.weight"], whole[0:8])
        assert torch.equal(ours[f"{at}k_{kind}.weight"], whole[8:16])
        assert torch.equal(ours[f"{at}v_{kind}.weight"], whole[16:34])
    gate_up = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(ours["layers.1.mlp.experts.gate_proj"], gate_up[:, :5])
    assert torch.equal(ours["layers.1.mlp.experts.up_proj"], gate_up[:, 5:])
    assert torch.equal(ours["layers.1.mlp.router.weight"], tensors["model.layers.1.mlp.gate.weight"])


def test_forms_may_differ_by_layer(tmp_path):
    config = make_config("qwen3_next", layer_types=("linear_attention", "linear_attention"))
    separate = tagged(checkpoint_shapes(config, fused=True))
    stacked = tagged(checkpoint_shapes(config, stacked=True))
    mixed = {n: t for n, t in separate.items() if ".layers.1." not in n}
    mixed |= {n: t for n, t in stacked.items() if ".layers.1." in n}
    ours = converted(*planned(tmp_path, config, mixed))
    expert = mixed["model.layers.0.mlp.experts.2.up_proj.weight"]
    assert torch.equal(ours["layers.0.mlp.experts.up_proj"][2], expert)
    assert torch.equal(ours["layers.1.mlp.experts.down_proj"], mixed["model.layers.1.mlp.experts.down_proj"])


def test_both_forms_at_once(tmp_path):
    config = make_config("qwen3_next")
    tensors = tagged(checkpoint_shapes(config, fused=True) | checkpoint_shapes(config))
    refused(tmp_path / "gdn", config, tensors, "layers.0.linear_attn. has both fused .* and split")
    tensors = tagged(checkpoint_shapes(config) | checkpoint_shapes(config, stacked=True))
    refused(tmp_path / "moe", config, tensors, "layers.0.mlp.experts has both stacked .* and separate")


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("prefix", PREFIXES[:2])
def test_vision_and_mtp_are_listed(tmp_path, moe, prefix):
    config = make_config("qwen3_5_moe" if moe else "qwen3_5")
    mtp = mtp_shapes(moe)
    assert len(mtp) == (19 if moe else 15)
    vision = {"model.visual.patch_embed.proj.weight": (4, 3, 2, 2, 2), "model.visual.merger.norm.bias": (4,)}
    # The decoder's experts one by one, those of the MTP layer stacked.
    plan, _ = planned(tmp_path, config, tagged(checkpoint_shapes(config, prefix) | mtp | vision))
    assert set(plan.unused["mtp"]) == mtp.keys()
    assert set(plan.unused["vision"]) == vision.keys()
    assert any(f"{len(mtp)} mtp tensors" in note for note in plan.notes)
    assert any("2 vision tensors" in note for note in plan.notes)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_tied_head(tmp_path, flag, has_head):
    shapes = checkpoint_shapes(make_config("qwen3_5", tie_word_embeddings=not has_head))
    config = make_config("qwen3_5", tie_word_embeddings=flag)
    if not flag and not has_head:
        refused(tmp_path, config, tagged(shapes), r"lacks lm_head\.weight and tie_word_embeddings is false")
        return
    plan, checkpoint = planned(tmp_path, config, tagged(shapes))
    assert plan.config.tie_word_embeddings is not has_head
    assert ("lm_head.weight" in converted(plan, checkpoint)) is has_head
    assert any("untied, although" in note for note in plan.notes) is (flag and has_head)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_each_missing_or_misshapen_tensor_is_named(tmp_path, family):
    config = make_config(family, attention_bias=family == "qwen3_5")
    form = {"fused": family == "qwen3_next", "stacked": family == "qwen3_5_moe"}
    shapes = checkpoint_shapes(config, "model.language_model.", **form)
    for name, shape in shapes.items():
        without = tagged({n: s for n, s in shapes.items() if n != name})
        assert name in refused(tmp_path, config, without, "lacks lm_head|1 missing: ")
        longer = (shape[0] + 1, *shape[1:])
        wrong = tagged(shapes | {name: longer})
        assert f"{name} is {list(longer)}, expected {list(shape)}" in refused(tmp_path, config, wrong, "1 wrong: ")


def test_a_transposed_matrix_is_misshapen(tmp_path):
    config = make_config("qwen3_5")
    name = "model.layers.1.self_attn.o_proj.weight"
    config = make_config("qwen3_5", num_attention_heads=4)
    tensors = tagged(checkpoint_shapes(config))
    tensors[name] = tensors[name].T.contiguous()
    refused(tmp_path, config, tensors, rf"{name} is \[32, 16\], expected \[16, 32\]")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.input_layernorm.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.0.linear_attn.in_proj_qkv.weight_scale_inv.extra",
        "model.rotary_emb.inv_freq",
        "extra",
    ],
)
def test_unexpected_tensor_is_named(tmp_path, name):
    config = make_config("qwen3_5_moe")
    refused(tmp_path, config, tagged(checkpoint_shapes(config) | {name: (2,)}), f"1 unexpected: {name}")


def test_many_faults_are_counted_in_one_line(tmp_path):
    config = make_config("qwen3_next", num_experts=12)
    shapes = checkpoint_shapes(config)
    shapes = {n: s for n, s in shapes.items() if "experts.1" not in n} | {f"extra.{n}": (1,) for n in range(9)}
    message = refused(tmp_path, config, tagged(shapes), "18 missing: .* and 15 more; 9 unexpected: .* and 6 more")
    assert len(message) < 600


def test_integer_weights(tmp_path):
    config = make_config("qwen3_5")
    tensors = tagged(checkpoint_shapes(config))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    refused(tmp_path, config, tensors, r"model\.norm\.weight is int8, expected a float type")


def test_unknown_prefix_and_two_models(tmp_path):
    config = make_config("qwen3_5")
    refused(tmp_path / "a", config, tagged(checkpoint_shapes(config, "backbone.")), "has none of model.language_model")
    both = checkpoint_shapes(config) | checkpoint_shapes(config, "model.language_model.")
    refused(tmp_path / "b", config, tagged(both), "holds two models")


def test_mlx_conversion(tmp_path):
    config = make_config("qwen3_5")
    shapes = checkpoint_shapes(config, "language_model.model.")
    shapes |= {f"language_model.{CONV}": (34, 4, 1)}
    refused(tmp_path, config, tagged(shapes), "MLX conversion")
