"""Plants faults in random layers and looks whether they are found: `python -m tests.parity.measure_causes [--json]`.

Every fault of `tests.faults`, in a random layer of a model with random weights, several seeds: is the layer named, and
the cause? Faults outside the list must come out as "cause unknown". Unbroken models must pass at every dtype.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers.utils import logging

from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.config import FULL_ATTENTION, ModelConfig
from nxdi_qwen.parity.causes import STATE_ORDER, UNKNOWN
from nxdi_qwen.parity.drill import Runs, drill
from nxdi_qwen.parity.mistakes import base as mistakes
from nxdi_qwen.parity.records import Prompt, Target
from nxdi_qwen.parity.result import Drill
from nxdi_qwen.parity.targets.eager import EagerSide
from tests.fault_situations import alone
from tests.faults import (
    ATTENTION,
    ATTENTION_LAYER,
    CONVOLUTION,
    DELTA,
    EXPERTS,
    FAULTS,
    GDN_LAYER,
    MLP_LAYER,
    MODEL,
    NORMS,
    ROTARY,
    Edit,
    Fault,
)
from tests.parity.planting import Package, PlantedSide, broken_package, deep_checkpoint, has_no_layer, reference_of

# Where a fault can be planted (a kind of layer) and what it is called when found.
GDN, ATTENTIVE, SPARSE, ANY = "gdn", "attention", "sparse", "any"
EXPECTED = {
    "padding mask": (GDN, mistakes.PADDING),
    "beta mask": (GDN, mistakes.PADDING),
    "decay mask": (GDN, mistakes.PADDING),
    "conv tail": (GDN, mistakes.CONV_TAIL),
    "conv zeros": (GDN, mistakes.CONV_TAIL),
    "conv order": (GDN, mistakes.WEIGHTS),
    "grouped projections": (GDN, mistakes.WEIGHTS),
    "head mapping": (GDN, mistakes.HEADS),
    "kv head mapping": (ATTENTIVE, mistakes.HEADS),
    "gate split": (ATTENTIVE, mistakes.GATE_SPLIT),
    "+1 norm": (ANY, mistakes.NORM),
    "gated norm": (GDN, mistakes.NORM),
    "decay sign": (GDN, mistakes.DECAY),
    "decay without dt_bias": (GDN, mistakes.DECAY),
    "state dtype": (GDN, mistakes.PRECISION),
    "chunk boundary: decay": (GDN, mistakes.CHUNK_CARRY),
    "chunk boundary: decay twice": (GDN, mistakes.CHUNK_CARRY),
    "chunk boundary: restart": (GDN, mistakes.CHUNK_CARRY),
    "continuation: delta": (GDN, mistakes.CHUNK_CARRY),
    "continuation: positions": (ATTENTIVE, mistakes.ROPE),
    "alias swap": (GDN, STATE_ORDER),
    "alias swap: key and value": (ATTENTIVE, mistakes.CACHE),
    "fresh slot": (GDN, mistakes.RESET),
    "idle row": (ANY, mistakes.IDLE),
    "cache offset": (ATTENTIVE, mistakes.CACHE),
    "causal mask": (ATTENTIVE, mistakes.CAUSAL),
    "rope pairs": (ATTENTIVE, mistakes.ROPE),
    "mrope sections": (ATTENTIVE, mistakes.ROPE),
    "top-k renormalisation": (SPARSE, mistakes.MIXING),
    "expert blocks": (SPARSE, mistakes.MIXING),
    "shared expert gate": (SPARSE, mistakes.MIXING),
}


def _outside(name: str, file: str, old: str, new: str, fixture: str) -> Fault:
    return Fault(f"outside: {name}", name, (Edit(file, old, new),), fixture, alone, ())


# Mistakes that no list knows.
OUTSIDE = (
    (GDN, _outside("gelu behind the convolution", CONVOLUTION, "functional.silu(", "functional.gelu(", "qwen3_5")),
    (GDN, _outside("beta doubled", GDN_LAYER, "beta = torch.sigmoid(", "beta = 2.0 * torch.sigmoid(", "qwen3_next")),
    (ATTENTIVE, _outside("tanh for the gate", ATTENTION_LAYER, "torch.sigmoid(gate)", "torch.tanh(gate)", "qwen3_5")),
    (ATTENTIVE, _outside("scores' scale", ATTENTION, "dim**-0.5", "dim**-0.25", "qwen3_5_moe")),
    (SPARSE, _outside("gelu in the experts", EXPERTS, "functional.silu(", "functional.gelu(", "qwen3_5_moe_tied")),
    (GDN, _outside("keys are not normalised", DELTA, "_repeat_heads(_l2_normalize(k)", "_repeat_heads((k)", "qwen3_5")),
    (GDN, _outside("z takes part twice", NORMS, "functional.silu(gate", "gate * functional.silu(gate", "qwen3_next")),
    (ATTENTIVE, _outside("rope turns half as fast", ROTARY, "torch.cos(angles)", "torch.cos(angles / 2)", "qwen3_5")),
    (
        SPARSE,
        _outside("the shared expert counts twice", MLP_LAYER, "routed + shared", "routed + 2 * shared", "qwen3_next"),
    ),
    (ANY, _outside("the norms' eps", NORMS, "keepdim=True) + eps", "keepdim=True) + 0.1", "qwen3_5_tied")),
    (ANY, _outside("the mixer is added twice", MODEL, "x = x + mixed", "x = x + mixed + mixed", "qwen3_next_mixed")),
)


@dataclass(frozen=True)
class Finding:
    fault: str
    fixture: str
    seed: int
    planted: int | None
    expected_layer: int
    expected_cause: str
    found: str | None
    position: int | None
    cause: str | None
    evidence: str | None
    first_parting: str | None
    seconds: float

    @property
    def right_layer(self) -> bool:
        return self.found == f"layer {self.expected_layer}"

    @property
    def right_cause(self) -> bool:
        return self.cause == self.expected_cause


def layers_of(config: ModelConfig, kind: str) -> list[int]:
    return [
        index
        for index, layer_type in enumerate(config.layer_types)
        if kind == ANY
        or (kind == SPARSE and config.moe_layers[index])
        or (kind in (GDN, ATTENTIVE) and (layer_type == FULL_ATTENTION) == (kind == ATTENTIVE))
    ]


def look(
    reference: Target, target: Target, sixteen_bit: Target | None, seed: int, lengths: tuple[int, ...] = (70, 5)
) -> Drill:
    """The drill-down on random prompts with four decode steps each."""
    generator = torch.Generator().manual_seed(seed)
    runs = []
    for length in lengths:
        ids = torch.randint(0, reference.config.vocab_size, (length,), generator=generator).tolist()
        prompt = Prompt(f"{length} random tokens", tuple(ids))
        own = reference.run(prompt, None, 4)
        sixteen = None if sixteen_bit is None else sixteen_bit.run(prompt, own.forced, 0)
        runs.append(Runs(own, target.run(prompt, own.forced, 0), sixteen))
    return drill(reference, target, sixteen_bit, runs, lambda *_: None)


def plant_and_look(
    fault: Fault, package: Package, kind: str, cause: str, seed: int, dtype: str = "float32", times: int = 2
) -> Finding:
    """In a fixture with `times` its layers."""
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = deep_checkpoint(fault.fixture, seed, Path(folder), times)
        reference = reference_of(checkpoint)
        possible = layers_of(reference.config, kind)
        planted = None if has_no_layer(fault) else random.Random(f"{fault.name} {seed}").choice(possible)
        sixteen_bit = reference_of(checkpoint, dtype) if dtype != "float32" else None
        outcome = look(reference, PlantedSide(checkpoint, package, planted, dtype), sixteen_bit, seed)
    place, why = outcome.place, outcome.cause
    return Finding(
        fault=fault.name,
        fixture=fault.fixture,
        seed=seed,
        planted=planted,
        # A fault of the whole model enters in the first layer that it can reach.
        expected_layer=possible[0] if planted is None else planted,
        expected_cause=cause,
        found=place and place.name,
        position=place and place.position,
        cause=why and why.name,
        evidence=why and why.evidence,
        first_parting=why and why.first_parting,
        seconds=time.perf_counter() - begin,
    )


def unbroken(fixture: str, seed: int, dtype: str) -> Drill:
    """The drill-down on a model without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = deep_checkpoint(fixture, seed, Path(folder))
        source = ModelSource.from_checkpoint(checkpoint)
        sixteen_bit = reference_of(checkpoint, dtype) if dtype != "float32" else None
        own = EagerSide.of_checkpoint(source, dtype)
        return look(reference_of(checkpoint), own, sixteen_bit, seed)


def all_faults() -> list[tuple[Fault, str, str]]:
    listed = [(fault, *EXPECTED[fault.name]) for fault in FAULTS]
    return listed + [(fault, kind, UNKNOWN) for kind, fault in OUTSIDE]


def table_of(findings: list[Finding]) -> Table:
    table = Table(title="Planted faults")
    for heading in ("fault", "expected cause", "layer", "cause", "what was named instead"):
        table.add_column(heading)
    groups: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        groups[finding.fault].append(finding)
    for name, own in groups.items():
        layers, causes = (sum(getattr(finding, what) for finding in own) for what in ("right_layer", "right_cause"))
        others = {f"{f.found}: {f.cause}" for f in own if not (f.right_layer and f.right_cause)}
        good = layers == causes == len(own)
        table.add_row(
            name,
            own[0].expected_cause,
            f"{layers} of {len(own)}",
            f"{causes} of {len(own)}",
            ", ".join(sorted(others)),
            style=None if good else "bold red",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--seeds", type=int, default=2, help="random layers and weights per fault")
    parser.add_argument("--unbroken", type=int, default=20, help="seeds without a fault, per dtype")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the broken models")
    parser.add_argument("--only", action="append", metavar="NAME")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    chosen = [entry for entry in all_faults() if not options.only or entry[0].name in options.only]
    findings, wrong, stale = [], [], []
    fixtures = ("qwen3_5", "qwen3_next", "qwen3_5_moe_tied", "qwen3_next_mixed", "qwen3_5_wide")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("planted", total=len(chosen) * options.seeds + 2 * options.unbroken)
        for fault, kind, cause in chosen:
            try:
                package = broken_package(fault)
            except ValueError as error:  # an edit that does not apply to today's source
                stale.append(str(error))
                continue
            for seed in range(options.seeds):
                findings.append(plant_and_look(fault, package, kind, cause, seed, options.dtype))
                progress.advance(task)
        for dtype in ("float32", "bfloat16"):
            for seed in range(options.unbroken):
                outcome = unbroken(fixtures[seed % len(fixtures)], seed, dtype)
                if outcome.place is not None:
                    wrong.append({"dtype": dtype, "seed": seed, **asdict(outcome)})
                progress.advance(task)
    layers, causes = (sum(getattr(finding, what) for finding in findings) for what in ("right_layer", "right_cause"))
    summary: dict[str, Any] = {
        "faults": len(findings),
        "right_layer": layers,
        "right_cause": causes,
        "stale": stale,
        "unbroken": 2 * options.unbroken,
        "unbroken_but_found": wrong,
    }
    if options.json:
        print(json.dumps({**summary, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        Console(width=160).print(table_of(findings))
        print(
            f"layer: {layers} of {len(findings)}, cause: {causes} of {len(findings)}; "
            f"unbroken: {len(wrong)} of {2 * options.unbroken} taken for broken"
        )
        print("".join(f"{line}\n" for line in stale), end="")
    return 1 if wrong or stale or layers < len(findings) else 0


if __name__ == "__main__":
    sys.exit(main())
