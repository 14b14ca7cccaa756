"""Block-wise FP8 against a dequantiser of the test's own, and every other method refused by name."""

import pytest
import torch

from nxdi_qwen.modeling.errors import InputError
from tests.modeling.weights.synthetic import checkpoint_shapes, converted, make_config, mtp_shapes, planned, tagged

FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SMALL = FP8_CONFIG | {"weight_block_size": [4, 8]}
QKV = "model.layers.0.linear_attn.in_proj_qkv.weight"
SCALE = QKV + "_scale_inv"


def quantized(tensors, block, scale_dtype=torch.float32):
    """FP8 and scales for all projections of layers; and what they stand for, in float64 rounded once to float32."""
    generator = torch.Generator().manual_seed(0)
    file, meaning = {}, {}
    for name, tensor in tensors.items():
        is_matrix = "proj" in name and not name.endswith(("bias", "in_proj_b.weight", "in_proj_a.weight", "ba.weight"))
        if not is_matrix:
            file[name] = meaning[name] = tensor
            continue
        weight = (torch.randn(tensor.shape, generator=generator) * 100).to(torch.float8_e4m3fn)
        *lead, rows, columns = tensor.shape
        scale = torch.rand(*lead, -(-rows // block[0]), -(-columns // block[1]), generator=generator) + 0.01
        scale = scale.to(scale_dtype)
        spread = torch.kron(scale.double(), torch.ones(*block, dtype=torch.float64))[..., :rows, :columns]
        file |= {name: weight, name + "_scale_inv": scale}
        meaning[name] = (weight.double() * spread).float()
    return file, meaning


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_form_equals_the_dequantised_checkpoint(tmp_path, scale_dtype, fused, stacked, dtype):
    config = make_config("qwen3_next")
    tensors = tagged(checkpoint_shapes(config, fused=fused, stacked=stacked))
    file, meaning = quantized(tensors, (4, 8), scale_dtype)
    ours = converted(*planned(tmp_path / "fp8", config, file, SMALL), dtype)
    expected = converted(*planned(tmp_path / "plain", config, meaning), dtype)
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("quantization", [FP8_CONFIG, None])
def test_blocks_of_128_with_partial_edges(tmp_path, quantization):
    config = make_config("qwen3_5", hidden_size=200, intermediate_size=300)
    file, meaning = quantized(tagged(checkpoint_shapes(config)), (128, 128))
    assert file["model.layers.0.mlp.up_proj.weight_scale_inv"].shape == (3, 2)
    ours = converted(*planned(tmp_path, config, file, quantization))
    for part in ("gate", "up", "down"):
        name = f"layers.1.mlp.{part}_proj.weight"
        assert torch.equal(ours[name], meaning["model." + name])
    # A scale's place shows: the last row and column belong to the last block.
    up, scale = "model.layers.1.mlp.up_proj.weight", file["model.layers.1.mlp.up_proj.weight_scale_inv"]
    assert ours["layers.1.mlp.up_proj.weight"][-1, -1] == file[up][-1, -1].float() * scale[-1, -1]


def test_some_layers_left_unquantised_whatever_the_list_says(tmp_path):
    config = make_config("qwen3_5")
    tensors = tagged(checkpoint_shapes(config))
    file, meaning = quantized(tensors, (128, 128))
    left = "model.layers.1.mlp.gate_proj.weight"
    file[left] = tensors[left]
    del file[left + "_scale_inv"]
    liar = FP8_CONFIG | {"modules_to_not_convert": ["lm_head", "mlp.gate", "model.layers.0.mlp.up_proj", "nothing"]}
    ours = converted(*planned(tmp_path, config, file, liar))
    assert torch.equal(ours["layers.1.mlp.gate_proj.weight"], tensors[left])
    assert torch.equal(ours["layers.0.mlp.up_proj.weight"], meaning["model.layers.0.mlp.up_proj.weight"])


def test_fp8_in_mtp_is_unused_with_its_scales(tmp_path):
    config = make_config("qwen3_5")
    mtp, _ = quantized(tagged(mtp_shapes(moe=False)), (128, 128))
    plan, _ = planned(tmp_path, config, tagged(checkpoint_shapes(config)) | mtp, FP8_CONFIG)
    assert set(plan.unused["mtp"]) == mtp.keys() and len(mtp) > 15


def fault(tensors, kind):
    if kind == "no scale":
        del tensors[SCALE]
    elif kind == "no weight":
        del tensors[QKV]
    elif kind == "plain weight":
        tensors[QKV] = tensors[QKV].float()
    elif kind == "scale shape":
        tensors[SCALE] = tensors[SCALE][:, :1].contiguous().repeat(2, 1)
    elif kind == "scale dtype":
        tensors[SCALE] = tensors[SCALE].to(torch.int8)
    elif kind == "vector":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
        tensors["model.norm.weight_scale_inv"] = torch.ones(1)
    elif kind == "e5m2":
        tensors[QKV] = tensors[QKV].to(torch.float8_e5m2)
    elif kind == "stray scale":
        tensors["model.layers.0.other.weight_scale_inv"] = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no scale", f"{QKV} is FP8 without its scale {SCALE}"),
        ("no weight", f"{SCALE} is a scale without its weight; 1 missing: {QKV}"),
        ("plain weight", f"{SCALE} is a scale of a weight that is not FP8"),
        ("scale shape", rf"{SCALE} is \[2, 1\], expected \[1, 1\]"),
        ("scale dtype", f"{SCALE} is int8"),
        ("vector", r"model\.norm\.weight is FP8, which is read for matrices only"),
        ("e5m2", f"{QKV} is float8_e5m2"),
        ("stray scale", r"unexpected: model\.layers\.0\.other\.weight_scale_inv"),
    ],
)
def test_faulty_scales(tmp_path, kind, message):
    config = make_config("qwen3_5")
    tensors, _ = quantized(tagged(checkpoint_shapes(config)), (128, 128))
    fault(tensors, kind)
    with pytest.raises(InputError, match=message):
        planned(tmp_path, config, tensors, FP8_CONFIG)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantised with awq"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "quantised with gptq"),
        ({"quant_method": "compressed-tensors"}, "quantised with compressed-tensors"),
        ({"quant_method": "bitsandbytes"}, "quantised with bitsandbytes"),
        ({"group_size": 64, "bits": 4}, "quantised with MLX"),
        (FP8_CONFIG | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (FP8_CONFIG | {"activation_scheme": "static"}, "activation_scheme is 'static'"),
        (FP8_CONFIG | {"weight_block_size": None}, "weight_block_size is None"),
        (FP8_CONFIG | {"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
    ],
)
def test_other_methods_by_configuration(tmp_path, quantization, message):
    config = make_config("qwen3_5")
    with pytest.raises(InputError, match=message):
        planned(tmp_path, config, tagged(checkpoint_shapes(config)), quantization)


@pytest.mark.parametrize(
    ("endings", "message"),
    [
        (("qweight", "qzeros", "scales", "g_idx"), "quantised with GPTQ"),
        (("qweight", "qzeros", "scales"), "quantised with AWQ or GPTQ"),
        (("weight_packed", "weight_scale", "weight_shape"), "quantised with compressed-tensors"),
        (("weight", "weight_scale", "input_scale"), "quantised with compressed-tensors or ModelOpt"),
        (("weight", "weight.absmax", "weight.quant_map"), "quantised with bitsandbytes"),
        (("weight", "scales", "biases"), "quantised with MLX"),
    ],
)
def test_other_methods_by_tensor_names(tmp_path, endings, message):
    config = make_config("qwen3_5")
    shapes = checkpoint_shapes(config)
    del shapes[QKV]
    shapes |= {QKV.removesuffix("weight") + ending: (2, 2) for ending in endings}
    with pytest.raises(InputError, match=message):
        planned(tmp_path, config, tagged(shapes))
