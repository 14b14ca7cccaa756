"""What rounding alone does to the three-way statistics: `python -m tests.parity.measure_rounding [--json]`.

The eager model in bfloat16 differs from Hugging Face in bfloat16 by nothing but the order of roundings. Over the test
models, seeds and prompts this prints how far the statistics of `parity.rounding` and the routers' margins go; the
bounds there stand above the largest values.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers.utils import logging

from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.parity.bands import TOP_K
from nxdi_qwen.parity.compare import compare_runs
from nxdi_qwen.parity.records import Prompt
from nxdi_qwen.parity.result import PromptResult
from nxdi_qwen.parity.targets.eager import EagerSide
from nxdi_qwen.parity.targets.huggingface import HuggingFaceSide
from tests.hf_fixtures import FIXTURES
from tests.parity.planting import deep_checkpoint

LENGTHS, STEPS = (1, 5, 66, 130), 16


def results(fixture: str, seed: int, dtype: str) -> list[PromptResult]:
    """The eager model in `dtype` against Hugging Face, with Hugging Face in bfloat16 beside it."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = deep_checkpoint(fixture, seed, Path(folder))
        source = ModelSource.from_checkpoint(checkpoint)
        reference, sixteen_bit = (HuggingFaceSide(source, name) for name in ("float32", "bfloat16"))
        target = EagerSide.of_checkpoint(source, dtype)
        generator = torch.Generator().manual_seed(seed)
        found = []
        for length in LENGTHS:
            ids = torch.randint(0, source.config.vocab_size, (length,), generator=generator).tolist()
            expected = reference.run(Prompt(f"{length} random tokens", tuple(ids)), None, STEPS)
            other = sixteen_bit.run(expected.prompt, expected.forced, 0)
            mine = target.run(expected.prompt, expected.forced, 0)
            found.append(compare_runs(expected, mine, other, source.config, dtype))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    cases = [(fixture, seed) for fixture in FIXTURES for seed in range(options.seeds)]
    found = [
        (fixture, result)
        for fixture, seed in track(cases, console=Console(stderr=True), transient=True)
        for result in results(fixture, seed, "bfloat16")
    ]
    verdicts = [(fixture, result.prompt, verdict) for fixture, result in found for verdict in result.three_way]
    many = [verdict for _, _, verdict in verdicts if verdict.positions > 4]
    flips = [flip for _, result in found for flip in result.routing_flips]
    bands = {
        kind: {
            str(k): max(
                b.max_rel for f, result in found for b in result.bands if b.top_k == k and FIXTURES[f].moe == moe
            )
            for k in TOP_K
        }
        for kind, moe in (("dense", False), ("moe", True))
    }
    extreme = sorted(verdicts, key=lambda entry: -entry[2].std_ratio)[:8]
    summary: dict[str, Any] = {
        "verdicts": len(verdicts),
        "largest_std_ratio": max(verdict.std_ratio for *_, verdict in verdicts),
        "largest_std_ratio_of_5_positions_or_more": max(verdict.std_ratio for verdict in many),
        "least_overlap": min(verdict.overlap for *_, verdict in verdicts),
        "least_overlap_of_5_positions_or_more": min(verdict.overlap for verdict in many),
        "largest_worst_ratio": max(verdict.worst_ratio for *_, verdict in verdicts),
        "not_passed": [(fixture, prompt, vars(verdict)) for fixture, prompt, verdict in verdicts if not verdict.passed],
        "largest_bands": bands,
        "extreme": [
            f"{fixture}, {prompt}, {v.phase}, {v.positions} positions: ratio {v.std_ratio:.2f}, "
            f"overlap {v.overlap:.2f}, worst {v.worst_ratio:.2f}"
            for fixture, prompt, v in extreme
        ],
        "routing_flips": len(flips),
        "routing_flips_not_near_ties": sum(not flip.near_tie for flip in flips),
        "largest_flip_margin": max(flip.margin or 0.0 for flip in flips),
    }
    print(json.dumps(summary, indent=2))
    return 1 if summary["not_passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
