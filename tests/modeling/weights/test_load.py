"""Streaming: dtypes, exactness of casts, and the peak of resident memory."""

import json
import subprocess
import sys

import pytest
import torch

from nxdi_qwen.modeling.weights import weight_specs
from tests.hf_fixtures import write_tensors
from tests.modeling.weights.synthetic import checkpoint_shapes, converted, make_config, planned

FLOAT32 = {"A_log.weight": "A_log", "dt_bias.weight": "dt_bias", "norm.weight": "norm.weight"}


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_dtypes(tmp_path, source, target):
    config = make_config("qwen3_next")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(source)
        for name, shape in checkpoint_shapes(config, stacked=True).items()
    }
    ours = converted(*planned(tmp_path, config, tensors), target)
    assert {n: (tuple(t.shape), t.dtype) for n, t in ours.items()} == weight_specs(config, target)
    for name, source_name in FLOAT32.items():  # never rounded, and exact from 16 bits
        kept = ours[f"layers.0.linear_attn.{name}"]
        assert kept.dtype == torch.float32
        assert torch.equal(kept, tensors[f"model.layers.0.linear_attn.{source_name}"].to(torch.float32))
    assert ours["rope.inv_freq"].dtype == torch.float32
    for name in ("layers.0.input_layernorm.weight", "layers.1.self_attn.q_norm.weight", "norm.weight"):
        assert torch.equal(ours[name], tensors["model." + name].to(target))
    gate = tensors["model.layers.1.mlp.experts.gate_up_proj"][:, :5]
    assert torch.equal(ours["layers.1.mlp.experts.gate_proj"], gate.to(target))


MEASURE = """
import json, sys, torch
from nxdi_qwen.modeling.config import ModelConfig, RopeConfig
from nxdi_qwen.modeling.weights import Checkpoint, plan_weights, stream_weights
values = json.loads(sys.argv[1])
values["rope"] = RopeConfig(**values["rope"])
values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
torch.set_num_threads(1)
checkpoint = Checkpoint.open(sys.argv[2])
plan = plan_weights(ModelConfig(**values), checkpoint)
weights = dict(stream_weights(plan, checkpoint, getattr(torch, sys.argv[3])))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([int(status["VmHWM"].split()[0]) * 1024, sum(t.nbytes for t in weights.values())]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is read from /proc")
@pytest.mark.parametrize(("source", "target"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("fp8", "bfloat16")])
def test_peak_resident_memory(tmp_path, source, target):
    """About 1 GB in the target dtype, in 4 shards: a memory map left open would hold it a second time."""
    layers = 2 if target == "float32" else 4
    config = make_config(
        "qwen3_5_moe",
        num_hidden_layers=layers,
        layer_types=("linear_attention", "full_attention") * (layers // 2),
        vocab_size=16384,
        hidden_size=1024,
        moe_layers=(True,) * layers,
        num_experts=64,
        moe_intermediate_size=512,
        tie_word_embeddings=True,
    )
    tensors = {n: torch.ones(s, dtype=torch.bfloat16) for n, s in checkpoint_shapes(config, stacked=True).items()}
    if source == "fp8":
        for name in [n for n in tensors if ".experts." in n]:
            *lead, rows, columns = tensors[name].shape
            tensors[name + "_scale_inv"] = torch.ones(*lead, rows // 128, columns // 128)
            one = torch.full(tensors[name].shape, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensors[name] = one
    write_tensors(tensors, tmp_path, shards=4)
    del tensors
    command = [sys.executable, "-c", MEASURE, json.dumps(config.to_dict()), str(tmp_path), target]
    peak, weights = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{source} -> {target}: weights {weights / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert weights > 800e6
    assert peak <= 1.25 * weights + 600e6
