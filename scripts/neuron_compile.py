"""Compiles a checkpoint, or a public size without one, for a target.

cpu: an artifact that runs here. hlo: the graphs that the Neuron compiler would be given, each with a report; needs NxDI
and torch_xla, no Neuron SDK. neuron: NxDI's own artifact; needs the Neuron SDK.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nxdi_qwen.compile.cpu import CompileOptions, compile_cpu
from nxdi_qwen.compile.distributed import library_output_on_stderr
from nxdi_qwen.compile.manifest import HLO_REPORT, Manifest
from nxdi_qwen.compile.neuron_options import NeuronOptions, check_hlo_target, check_neuron_target
from nxdi_qwen.compile.source import DTYPES, ModelSource
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.partition import Parallel
from nxdi_qwen.modeling.state import describe_state
from nxdi_qwen.scripts import command

if TYPE_CHECKING:
    from nxdi_qwen.compile.hlo import GraphReport

TARGETS = ("cpu", "hlo", "neuron")
# NxDI's names of its submodels, in short.
_KINDS = {
    "context_encoding_model": "context",
    "continuation_model": "continue",
    "token_generation_model": "decode",
}
PROBLEMS = 1  # exit status where a lowered graph has something that must not be


def build_parser() -> command.Parser:
    parser = command.Parser(prog="neuron-compile", description=__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="DIR", help="checkpoint folder: config.json and safetensors files")
    model.add_argument("--preset", metavar="NAME", help="a public size by name; target cpu: with --random-weights")
    parser.add_argument("--random-weights", action="store_true", help="cpu: fill the preset with random weights")
    parser.add_argument("--target", choices=list(TARGETS), required=True, help="what to compile for")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the artifact; must not exist yet")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="requests that run at once (default 4)")
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="longest prompt plus output, in tokens; the last one needs no room (default 2048)",
    )
    parser.add_argument("--buckets", type=command.integers, metavar="N,N", help="prompt lengths, multiples of 64")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: the checkpoint's own")
    parser.add_argument("--degree", type=int, default=1, metavar="N", help="ranks that share the model (default 1)")
    parser.add_argument(
        "--expert-degree", type=int, default=1, metavar="E", help="groups of ranks that share the experts (default 1)"
    )
    parser.add_argument(
        "--optimize", action="store_true", help="cpu: compile with AOTInductor (needs a C++ compiler; slow)"
    )
    neuron = parser.add_argument_group("targets hlo and neuron")
    neuron.add_argument(
        "--decode-buckets",
        type=command.integers,
        metavar="N,N",
        help="cache lengths to decode at (default: the maximum)",
    )
    neuron.add_argument(
        "--logical-cores",
        type=int,
        metavar="N",
        help="physical cores to a logical one, 1 or 2 (default: NEURON_LOGICAL_NC_CONFIG, or what the platform has)",
    )
    neuron.add_argument("--compiler-flags", metavar="FLAGS", help="appended to NxDI's flags for neuronx-cc")
    neuron.add_argument("--on-device-sampling", action="store_true", help="graphs return greedy tokens, not logits")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def compile_model(arguments: list[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    _check(options)
    shared = CompileOptions(
        slots=options.batch_size,
        max_length=options.max_length,
        buckets=options.buckets,
        dtype=options.dtype,
        degree=options.degree,
        expert_degree=options.expert_degree,
        optimize=options.optimize,
    )
    if options.target == "hlo":
        check_hlo_target()
    elif options.target == "neuron":
        check_neuron_target()
    source = ModelSource.from_checkpoint(options.model) if options.model else ModelSource.from_preset(options.preset)
    notes = Console(stderr=True)
    for note in (*source.notes, *source.notes_on_text()) if options.target == "cpu" or options.model else ():
        notes.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    if options.target == "cpu":
        return _compile_cpu(source, shared, options)
    choices = NeuronOptions(
        shared,
        decode_buckets=options.decode_buckets,
        logical_cores=options.logical_cores,
        compiler_flags=options.compiler_flags or "",
        on_device_sampling=options.on_device_sampling,
    )
    choices.resolve(source)
    return (_compile_hlo if options.target == "hlo" else _compile_neuron)(source, choices, options)


def _check(options: Any) -> None:
    """Raises InputError for options that do not go together."""
    if options.model is not None and options.random_weights:
        raise InputError("--random-weights goes with --preset; a checkpoint brings its own weights")
    if options.target == "cpu":
        if options.preset is not None and not options.random_weights:
            raise InputError("a preset has no weights: add --random-weights, or give a checkpoint with --model")
        for name in ("decode_buckets", "logical_cores", "compiler_flags", "on_device_sampling"):
            if getattr(options, name):
                raise InputError(f"--{name.replace('_', '-')} is for the targets hlo and neuron: leave it out")
    elif options.random_weights:
        raise InputError("--random-weights is for the target cpu: leave it out, no weights are needed for --target hlo")
    elif options.target == "neuron" and options.preset is not None:
        raise InputError("--target neuron needs weights: give a checkpoint with --model (--target hlo takes presets)")


def _compile_cpu(source: ModelSource, choices: CompileOptions, options: Any) -> int:
    with command.progress_bars() as progress:
        manifest = compile_cpu(source, options.out, choices, progress)
    if options.json:
        print(json.dumps({"artifact": str(options.out), **_figures(manifest)}))
    else:
        _print_table(options.out, manifest)
    return 0


def _compile_hlo(source: ModelSource, choices: NeuronOptions, options: Any) -> int:
    from nxdi_qwen.compile import hlo  # imports NxDI

    with library_output_on_stderr(), command.progress_bars() as progress:
        graphs = hlo.compile_hlo(source, options.out, choices, progress)
    if options.json:
        print((options.out / HLO_REPORT).read_text(), end="")
    else:
        _print_graphs(options.out, graphs, source)
    return PROBLEMS if any(graph.report.problems for graph in graphs) else 0


def _compile_neuron(source: ModelSource, choices: NeuronOptions, options: Any) -> int:
    from nxdi_qwen.compile import neuron  # imports NxDI

    with library_output_on_stderr():
        neuron.compile_neuron(source, options.out, choices)
    if options.json:
        print(json.dumps({"artifact": str(options.out), "target": "neuron", "model": source.name}))
    else:
        hint = f"nxdi-qwen-hardware-report --artifacts {quote(str(options.out))} --model DIR"
        print(f"{options.out}: compiled by NxDI. Try it: {hint}")
    return 0


def _print_graphs(out: Path, graphs: Sequence[GraphReport], source: ModelSource) -> None:
    table = Table(title=escape(f"{out}: {len(graphs)} graphs as the Neuron compiler would get them"))
    for heading in ("graph", "ranks", "ops", "rank", "weights MB", "state MB", "GFLOP", "GB moved"):
        table.add_column(heading, justify="left" if heading == "graph" else "right")
    for graph in graphs:
        found = graph.report
        table.add_row(
            f"{_KINDS.get(graph.tag, graph.tag)} {graph.bucket}",
            f"{graph.ranks[0]}-{graph.ranks[-1]}" if len(graph.ranks) > 1 else str(graph.ranks[0]),
            f"{found.instructions:,}",
            str(found.max_rank),
            f"{found.parameter_bytes / 1e6:,.0f}",
            f"{found.state_bytes / 1e6:,.0f}",
            "-" if found.flops is None else f"{found.flops / 1e9:,.1f}",
            "-" if found.bytes_moved is None else f"{found.bytes_moved / 1e9:,.2f}",
        )
    Console().print(table)
    print("Lowered only: not compiled for Neuron, not run on it. FLOP and bytes a rank are XLA's count before fusion.")
    if source.config.num_experts:
        print("Routed experts of prompts are lowered as all experts over all tokens, in place of NxD's own kernel.")
    for opcode, evidence in sorted({item for graph in graphs for item in graph.report.extra_opcodes.items()}):
        print(f"opcode {opcode} is beyond NxDI's own models; {evidence}")
    for note in sorted({graph.report.cost_note for graph in graphs if graph.report.cost_note}):
        print(f"note: FLOP and bytes are {note}")
    problems = [(graph, line) for graph in graphs for line in graph.report.problems]
    for graph, line in problems:
        print(f"PROBLEM in {graph.tag} {graph.bucket}: {line}")
    if not problems:
        print("No problem found: all opcodes known, every state threaded and aliased, no dynamic shape.")


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
    table = Table(title=escape(f"{out}: {len(graphs)} graphs"), show_header=False)
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,}" if type(value) is int else escape(str(value)))
    for name, graph in graphs.items():
        table.add_row(f"graph {name}", f"{graph['nodes']:,} operations, largest rank {graph['max_rank']}")
    Console().print(table)
    ranks = manifest.degree
    program = f"torchrun --nproc-per-node {ranks} -m nxdi_qwen.scripts.generate" if ranks > 1 else "nxdi-qwen-generate"
    print(f"Run it with: {program} --artifacts {quote(str(out))}")


def main() -> int:
    return command.run(compile_model)


if __name__ == "__main__":
    raise SystemExit(main())
