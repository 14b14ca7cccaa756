"""Whole models of public shapes against transformers, on one GPU: random weights, the same memory for both.

    python -m tests.true_sizes.measure_gpu --preset qwen3.5-27b --dtype float32 [--layers N] [--json] [--device cpu]

Prompts of 1, 65, 700 and 4,096 random tokens and of one token 700 times, then 32 decode steps along the text, one row.
`--dtype bfloat16` rounds the weights to bfloat16, measures float32 on these, then bfloat16; it takes half the memory,
since the weights stay in 16 bit and float32 widens a layer at a time. Exit status 1: a verdict failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from typing import Any

import torch
import transformers

from nxdi_qwen.modeling.config import FULL_ATTENTION, ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.presets import preset
from tests.true_sizes.runs import KEPT, texts
from tests.true_sizes.shared_model import Pair, build_pair, sharing_report
from tests.true_sizes.verdicts import bfloat16_verdict, float32_verdict

LENGTHS, REPEATED, STEPS = (1, 65, 700, 4096), 700, 32


def measure(pair: Pair, lengths: tuple[int, ...], repeated: int, steps: int) -> dict[str, Any]:
    """The verdicts of both dtypes (bfloat16: None for a pair stored in float32), JSON-ready."""
    samples = texts(pair.config.vocab_size, lengths, repeated, steps)
    float32, exact = float32_verdict(pair, samples)
    bfloat16 = bfloat16_verdict(pair, samples, exact) if pair.dtype == torch.bfloat16 else None
    ok = float32["ok"] and (bfloat16 is None or bfloat16["ok"])
    return {"ok": ok, "float32": float32, "bfloat16": bfloat16}


def first_layers(config: ModelConfig, layers: int | None) -> ModelConfig:
    """The first `layers` layers of a model, one of them attention (Hugging Face's cache needs it); None: all."""
    if layers is None:
        return config
    least = config.layer_types.index(FULL_ATTENTION) + 1
    if not least <= layers <= config.num_hidden_layers:
        raise InputError(f"--layers must be {least} to {config.num_hidden_layers}, got {layers}")
    kept = {name: getattr(config, name)[:layers] for name in ("layer_types", "moe_layers")}
    return dataclasses.replace(config, num_hidden_layers=layers, **kept)


def full_precision() -> None:
    """No TF32 in matrix products or convolutions, and 16-bit products summed in float32, for both models."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def report(options: argparse.Namespace) -> dict[str, Any]:
    whole = preset(options.preset)
    config = first_layers(whole, options.layers)
    full_precision()
    begin = time.perf_counter()
    device = torch.device(options.device)
    pair = build_pair(config, getattr(torch, options.dtype), device)
    on_gpu = device.type == "cuda"
    built = time.perf_counter() - begin
    sharing = sharing_report(pair)
    print(
        f"built in {built:.1f} s: {sharing['reference_bytes'] / 2**30:.1f} GiB of weights", file=sys.stderr, flush=True
    )
    verdicts = measure(pair, LENGTHS, REPEATED, STEPS)
    return {
        "preset": options.preset,
        "layers": config.num_hidden_layers,
        "layers_of_model": whole.num_hidden_layers,
        "weights": options.dtype,
        **verdicts,
        "sharing": sharing,
        "kept_logits_of_prompt": KEPT,
        "decode_steps": STEPS,
        "reference": "transformers, eager attention and experts, use_cache; TF32 off",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "seconds": time.perf_counter() - begin,
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The report for people."""
    sharing = result["sharing"]
    out = [
        f"{result['preset']}, {result['layers']} of {result['layers_of_model']} layers, "
        f"{sharing['parameters'] / 1e9:.2f} billion parameters in {result['weights']}, {result['device']}",
        f"{result['reference']}; {result['versions']}",
        f"of ours {sharing['shared_bytes'] / 2**30:.2f} GiB are views of the reference's parameters, "
        f"{sharing['copied_bytes'] / 2**30:.3f} GiB copies:{'' if sharing['copied'] else ' none'}",
        *(f"  copied: {ours} from {theirs}" for ours, theirs in sharing["copied"].items()),
        f"float32: {'ok' if result['float32']['ok'] else 'FAILED'}",
    ]
    for row in result["float32"]["texts"]:
        ours = row["ours"]
        own = f"{row['own']['rel']:.2e}" if "own" in row else "not run"
        out.append(
            f"  {row['text']:>12}: rel {ours['rel']:.2e} (prefill {ours['rel_prefill']:.2e}), own {own}, "
            f"bound {row['bound']:.2e}, same top token {ours['same_top']:.1%}, flips {ours['flips']} "
            f"(gap {ours['flip_gap']:.1e}), {ours['seconds']:.1f} s, theirs {row['seconds_theirs']:.1f} s"
        )
    if both := result["bfloat16"]:
        flips = f", flips {both['flips_ours']}, theirs {both['flips_theirs']}" if "flips_ours" in both else ""
        out.append(f"bfloat16: {'ok' if both['ok'] else 'FAILED'}, largest logit {both['largest_logit']:.1f}{flips}")
        for kind in ("free", "float32_experts"):
            for part, errors in both.get(kind, {}).items():
                ratio = "none" if errors["ratio"] is None else f"{errors['ratio']:.3f}"
                out.append(
                    f"  {kind}, {part}: ratio {ratio}, mean |error| {errors['ours']:.5f}, theirs "
                    f"{errors['theirs']:.5f}, {errors['tokens']} tokens"
                )
    return [*out, f"peak {result['peak_gib'] or 0:.1f} GiB, {result['seconds']:.0f} s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    parser.add_argument("--layers", type=int, help="only the first layers, where all do not fit one GPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", action="store_true")
    try:
        result = report(options := parser.parse_args())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result) if options.json else "\n".join(lines(result)))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
