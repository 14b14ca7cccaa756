"""Degree N against degree 1 at the sizes of the real models, on GPUs: random weights, eager model.

    torchrun --nproc-per-node 2 -m tests.measure_degrees --preset qwen3.5-27b --dtype float32 [--layers L] [--json]

Rank 0 first runs degree 1 alone and keeps its logits; then all ranks run degree N. Both are forced along one random
text: prompts of several lengths in one ragged batch, then decode steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator

import torch
from torch import Tensor, distributed

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.model import Batch, HybridCausalLM, text_positions
from nxdi_qwen.modeling.parallel import parameter_cuts
from nxdi_qwen.modeling.partition import SINGLE, Parallel, take_part
from nxdi_qwen.modeling.presets import preset
from nxdi_qwen.modeling.rope_frequencies import rope_inv_freq
from nxdi_qwen.modeling.state import describe_state

LENGTHS = (1, 65, 700)
STEPS = 32


def build(config: ModelConfig, dtype: torch.dtype, parallel: Parallel, device: torch.device) -> HybridCausalLM:
    """The model with weights that depend on their names alone, drawn whole and cut: the same at every degree."""
    with torch.device("meta"):
        whole = HybridCausalLM(config, dtype)
        model = HybridCausalLM(config, dtype, parallel)
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    for name, placeholder in list(model.named_parameters()):
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
        generator = torch.Generator(device).manual_seed(seed)
        tensor = torch.empty(shapes[name], dtype=placeholder.dtype, device=device)
        if name.endswith("A_log.weight"):
            tensor.uniform_(-4.6, -2.3, generator=generator)
        elif name.endswith("dt_bias.weight"):
            tensor.normal_(0, 0.7, generator=generator)
        elif tensor.dim() == 1:
            tensor.normal_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0, 0.3, generator=generator)
        else:
            tensor.normal_(0, 1.0 if "embed" in name else shapes[name][-1] ** -0.5, generator=generator)
        part = take_part(tensor, parameter_cuts(placeholder), parallel).clone()
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._parameters[attribute] = torch.nn.Parameter(part, requires_grad=False)
    model.rank = torch.tensor([parallel.rank], device=device)
    model.rope.inv_freq = rope_inv_freq(config).to(device)
    return model


@torch.inference_mode()
def run(model: HybridCausalLM, dtype: torch.dtype, parallel: Parallel, device: torch.device) -> Iterator[Tensor]:
    """Logits [rows, V] on the CPU: after the prompts, then after each decode step."""
    rows, width = len(LENGTHS), max(LENGTHS)
    text = torch.randint(0, model.config.vocab_size, (rows, width + STEPS), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor(LENGTHS)
    state = describe_state(model.config, rows, width + STEPS, dtype, parallel).allocate(device)
    valid = torch.arange(width) < lengths[:, None]
    start = torch.zeros(rows, dtype=torch.int64)
    batch = Batch(text[:, :width], valid, text_positions(start, valid), start, torch.arange(rows))
    out = model.prefill(Batch(*(tensor.to(device) for tensor in batch)), state)
    yield out.logits.float().cpu()
    state = out.state
    for step in range(STEPS):
        start = lengths + step
        valid = torch.ones(rows, 1, dtype=torch.bool)
        inputs = (text.gather(1, start[:, None]), valid, text_positions(start, valid), start)
        logits, state = model.decode(Batch(*(tensor.to(device) for tensor in inputs), None), state)
        yield logits.float().cpu()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--layers", type=int, help="only the first layers, where all do not fit one GPU")
    parser.add_argument("--expert-degree", type=int, default=1)
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    gpus = torch.cuda.device_count()
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun's own
    device = torch.device("cuda", local_rank % gpus)
    torch.cuda.set_device(device)
    if options.backend == "nccl" and gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
        # NCCL refuses two ranks of one host on one GPU. As ranks of two hosts they talk over a socket, and share it.
        os.environ["NCCL_HOSTID"] = f"rank-{local_rank}"
    distributed.init_process_group(options.backend)
    rank, degree = distributed.get_rank(), distributed.get_world_size()
    config, dtype = preset(options.preset), getattr(torch, options.dtype)
    if options.layers:
        kept = {name: getattr(config, name)[: options.layers] for name in ("layer_types", "moe_layers")}
        config = dataclasses.replace(config, num_hidden_layers=options.layers, **kept)

    expected: list[Tensor] = []
    if rank == 0:
        model = build(config, dtype, SINGLE, device)
        expected = list(run(model, dtype, SINGLE, device))
        del model
        torch.cuda.empty_cache()
    distributed.barrier()
    parallel = Parallel(degree, rank, options.expert_degree)
    actual = list(run(build(config, dtype, parallel, device), dtype, parallel, device))
    if rank == 0:
        scale = max(logits.abs().max() for logits in expected)
        errors = [((a - e).abs().max() / scale).item() for a, e in zip(actual, expected, strict=True)]
        mean = sum((a - e).abs().mean() for a, e in zip(actual, expected, strict=True)) / len(expected) / scale
        match = sum((a.argmax(-1) == e.argmax(-1)).float().mean().item() for a, e in zip(actual, expected, strict=True))
        result = {
            "preset": options.preset,
            "layers": config.num_hidden_layers,
            "dtype": options.dtype,
            "degree": degree,
            "backend": options.backend,
            "gpus": gpus,
            "expert_degree": options.expert_degree,
            "prompts": LENGTHS,
            "steps": STEPS,
            "prefill_max_rel": errors[0],
            "decode_max_rel": max(errors[1:]),
            "mean_rel": mean.item(),
            "argmax_match": match / len(expected),
            "largest_logit": scale.item(),
            "peak_gib_rank0": torch.cuda.max_memory_allocated() / 2**30,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(),
        }
        print(json.dumps(result) if options.json else "\n".join(f"{key}: {value}" for key, value in result.items()))
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
