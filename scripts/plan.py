"""Plans a model on an instance: memory per core, requests that fit, and roofline floors of decode and prefill."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nxdi_qwen.compile.instances import Machine, groupings, instance_names, machine
from nxdi_qwen.compile.planner import ContextPlan, Floor, Plan, gib, plan, slots_by_degree
from nxdi_qwen.compile.source import DTYPES, ModelSource
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.presets import preset
from nxdi_qwen.scripts import command
from nxdi_qwen.scripts.plots import check_plot, new_figure, write_plot

_MIB = 1 << 20
_PLOT_POINTS = 128
_WIDTH = 100  # of text that no terminal narrows


def build_parser() -> command.Parser:
    parser = command.Parser(prog="nxdi-qwen-plan", description=__doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, metavar="DIR", help="checkpoint folder; config.json alone is enough")
    model.add_argument("--preset", metavar="NAME", help="a public size by name")
    parser.add_argument("--instance", choices=instance_names(), required=True, help="what to run on")
    parser.add_argument("--degree", type=int, required=True, metavar="N", help="cores that share one model")
    parser.add_argument(
        "--expert-degree", type=int, default=1, metavar="N", help="groups of cores that share the experts"
    )
    parser.add_argument(
        "--logical-cores",
        type=int,
        choices=groupings(),
        default=2,
        help="physical cores that form one core (LNC; default 2)",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16", help="default bfloat16")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N", help="requests that must fit (default 1)")
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="their prompt plus output, in tokens (default 2048)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the slots against the context")
    return parser


def plan_model(arguments: list[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    if options.plot is not None:
        check_plot(options.plot)
    name, config, notes = _read_model(options.model, options.preset)
    on = machine(options.instance, options.logical_cores)
    longest = config.max_position_embeddings
    result = plan(
        config,
        name,
        on,
        options.degree,
        options.expert_degree,
        options.dtype,
        options.batch_size,
        min(2048, longest) if options.max_length is None else options.max_length,
    )
    console = Console(stderr=True)
    for note in notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    if options.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        _print_tables(result)
    if options.plot is not None:
        _plot(options.plot, config, on, result)
    return 0


def _read_model(folder: Path | None, preset_name: str | None) -> tuple[str, ModelConfig, tuple[str, ...]]:
    """(name, configuration, notes). Weights that are there are checked: they decide whether the head is tied."""
    if folder is None:
        assert preset_name is not None
        return preset_name, preset(preset_name), ()
    if any(folder.glob("*.safetensors")):
        source = ModelSource.from_checkpoint(folder)
        return source.name, source.config, source.notes
    loaded = load_config(folder)
    note = f"{folder} has no weights: planned from config.json alone"
    return folder.resolve().name, loaded.config, (*loaded.notes, note)


def _print_tables(result: Plan) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    on = result.machine
    summary = Table(
        title=escape(f"{result.model}, {result.dtype}, degree {result.degree}{_experts(result)} on {on.instance}"),
        show_header=False,
    )
    physical = f"{on.physical_per_logical} physical core{'s' if on.physical_per_logical > 1 else ''} each"
    rows = [
        ("cores", f"{on.cores} ({physical}): room for {result.replicas} replica{'s' if result.replicas > 1 else ''}"),
        (
            "memory of a core",
            f"{gib(on.memory_bytes)} GiB, of which {gib(on.reserve_bytes)} reserved (estimate: runtime, activations)",
        ),
        ("weights of a core", f"{gib(result.weight_bytes)} GiB, which leaves {gib(result.free_bytes)} for slots"),
        (
            "a slot on a core",
            f"{result.kv_bytes_per_token:,} bytes of KV a token, {result.state_bytes_per_slot:,} bytes of GDN state",
        ),
        ("largest context of 1 slot", _context(result.largest_context, result)),
    ]
    if result.batch > 1:
        rows.append((f"largest context of {result.batch} slots", _context(result.largest_context_of_batch, result)))
    rows.append((f"decode, {result.batch} x {result.max_length:,} tokens", _floor_text(result.decode)))
    for row in rows:
        summary.add_row(*row)
    console.print(summary)

    table = Table(title="By context. Times are floors, rates are ceilings")
    for heading in (
        "context",
        "KV a slot\nMiB",
        "GDN a slot\nMiB",
        "slots",
        "decode\n1 slot, ms",
        "decode\nall, ms",
        "decode all\ntokens/s",
        "prefill\nms",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for context in result.contexts:
        table.add_row(*_context_cells(context))
    console.print(table)
    sources = [f"source of {subject}: {source}" for subject, source in on.sources.items()]
    for line in (result.label.upper(), *result.assumptions, *sources):
        print(
            textwrap.fill(
                line,
                _WIDTH,
                initial_indent="- ",
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


def _experts(result: Plan) -> str:
    return f" (expert degree {result.expert_degree})" if result.expert_degree > 1 else ""


def _context(tokens: int, result: Plan) -> str:
    limit = ", the model's limit" if tokens == result.longest_context_of_model else ""
    return f"{tokens:,} tokens{limit}"


def _floor_text(floor: Floor) -> str:
    experts = "" if floor.distinct_experts is None else f", {floor.distinct_experts:.1f} experts a layer expected"
    gigabytes = floor.bytes_moved / 1e9
    return f"at least {_milliseconds(floor)} ms a step, bound by {floor.bound} ({gigabytes:.2f} GB a core{experts})"


def _context_cells(context: ContextPlan) -> list[str]:
    cells = [f"{context.context:,}", f"{context.kv_bytes_per_slot / _MIB:,.1f}"]
    cells += [f"{context.state_bytes_per_slot / _MIB:,.1f}", f"{context.slots:,}"]
    if context.decode_one is None or context.decode_all is None or context.prefill is None:
        return [*cells, "-", "-", "-", "-"]
    rate = f"{context.decode_all.tokens_per_second:,.0f}"
    times = [_milliseconds(floor) for floor in (context.decode_one, context.decode_all, context.prefill)]
    return [*cells, times[0], times[1], rate, times[2]]


def _milliseconds(floor: Floor) -> str:
    milliseconds = floor.seconds * 1e3
    return f"{milliseconds:,.2f}" if milliseconds < 1000 else f"{milliseconds:,.0f}"


def _plot(path: Path, config: ModelConfig, on: Machine, result: Plan) -> None:
    """Slots of one replica against the context; the asked degree stands out among the others that fit."""
    from matplotlib.ticker import FuncFormatter

    longest = result.longest_context_of_model
    first = min(512, longest)
    steps = [first * (longest / first) ** (step / (_PLOT_POINTS - 1)) for step in range(_PLOT_POINTS)]
    contexts = sorted({round(step) for step in steps})
    figure, axes = new_figure((8, 5))
    lines = slots_by_degree(config, on, result, contexts)
    for degree, slots in reversed(lines.items()):
        asked = degree == result.degree
        label = f"degree {degree}" + _experts(result) * asked
        style: dict[str, Any] = {"linewidth": 2.5, "zorder": 3} if asked else {"linewidth": 1, "linestyle": "--"}
        shown = [(context, count) for context, count in zip(contexts, slots, strict=True) if count]
        axes.step(*zip(*shown, strict=True), where="pre", label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1024:g}k" if value >= 1024 else f"{value:g}")
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("context of every slot, tokens")
    axes.set_ylabel("slots of one replica")
    axes.set_title(
        f"{result.model}, {result.dtype}, on {on.instance} ({on.cores} cores of {gib(on.memory_bytes)} GiB, "
        f"{gib(on.reserve_bytes)} reserved)\nestimate from shapes, nothing measured on hardware",
        fontsize="medium",
    )
    axes.grid(which="both", alpha=0.25)
    axes.legend()
    write_plot(figure, path)


def main() -> int:
    return command.run(plan_model)


if __name__ == "__main__":
    raise SystemExit(main())
