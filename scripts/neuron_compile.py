"""Compiles a checkpoint (or a preset with random weights) into an artifact."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nxdi_qwen.compile.cpu import TARGET, CompileOptions, compile_cpu
from nxdi_qwen.compile.manifest import Manifest
from nxdi_qwen.compile.source import DTYPES, ModelSource
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.partition import Parallel
from nxdi_qwen.modeling.state import describe_state
from nxdi_qwen.scripts import command


def build_parser() -> command.Parser:
    parser = command.Parser(prog="neuron-compile", description=__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="DIR", help="checkpoint folder: config.json and safetensors files")
    model.add_argument("--preset", metavar="NAME", help="a public size by name, with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="fill the preset with random weights")
    parser.add_argument("--target", choices=[TARGET], required=True, help="what to compile for")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the artifact; must not exist yet")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="requests that run at once (default 4)")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="longest prompt plus output, in tokens (default 2048)"
    )
    parser.add_argument("--buckets", type=command.integers, metavar="N,N", help="prompt lengths, multiples of 64")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: the checkpoint's own")
    parser.add_argument("--degree", type=int, default=1, metavar="N", help="ranks that share the model (default 1)")
    parser.add_argument(
        "--expert-degree", type=int, default=1, metavar="E", help="groups of ranks that share the experts (default 1)"
    )
    parser.add_argument("--optimize", action="store_true", help="compile with AOTInductor (needs a C++ compiler; slow)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def compile_model(arguments: list[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    if options.preset is not None and not options.random_weights:
        raise InputError("a preset has no weights: add --random-weights, or give a checkpoint with --model")
    if options.model is not None and options.random_weights:
        raise InputError("--random-weights goes with --preset; a checkpoint brings its own weights")
    choices = CompileOptions(
        slots=options.batch_size,
        max_length=options.max_length,
        buckets=options.buckets,
        dtype=options.dtype,
        degree=options.degree,
        expert_degree=options.expert_degree,
        optimize=options.optimize,
    )
    source = ModelSource.from_checkpoint(options.model) if options.model else ModelSource.from_preset(options.preset)
    notes = Console(stderr=True)
    for note in source.notes:
        notes.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    with command.progress_bars() as progress:
        manifest = compile_cpu(source, options.out, choices, progress)
    if options.json:
        print(json.dumps({"artifact": str(options.out), **_figures(manifest)}))
    else:
        _print_table(options.out, manifest)
    return 0


def _figures(manifest: Manifest) -> dict[str, object]:
    parallel = Parallel(manifest.degree, 0, manifest.expert_degree)
    state = describe_state(manifest.model, manifest.slots, manifest.max_length, DTYPES[manifest.dtype], parallel)
    return {
        "target": manifest.target,
        "optimized": manifest.optimized,
        "model": manifest.source["name"],
        "dtype": manifest.dtype,
        "degree": manifest.degree,
        "expert_degree": manifest.expert_degree,
        "slots": manifest.slots,
        "max_length": manifest.max_length,
        "weight_bytes": sum(entry.bytes for entry in manifest.weights),
        "state_bytes_per_slot": state.bytes_per_slot,
        "graphs": {name: {"nodes": graph.nodes, "max_rank": graph.max_rank} for name, graph in manifest.graphs.items()},
    }


def _print_table(out: Path, manifest: Manifest) -> None:
    figures = _figures(manifest)
    graphs = figures.pop("graphs")
    assert isinstance(graphs, dict)
    table = Table(title=f"{out}: {len(graphs)} graphs", show_header=False)
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if type(value) is int else str(value))
    for name, graph in graphs.items():
        table.add_row(f"graph {name}", f"{graph['nodes']:,} operations, largest rank {graph['max_rank']}")
    Console().print(table)
    ranks = manifest.degree
    program = f"torchrun --nproc-per-node {ranks} -m nxdi_qwen.scripts.generate" if ranks > 1 else "nxdi-qwen-generate"
    print(f"Run it with: {program} --artifacts {out}")


def main() -> int:
    return command.run(compile_model)


if __name__ == "__main__":
    raise SystemExit(main())
