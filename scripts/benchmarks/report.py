"""Tables, plots and JSON-ready figures of the benchmark."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from nxdi_qwen.modeling.config import FULL_ATTENTION
from nxdi_qwen.scripts.benchmarks.cost import PIECE, Cost
from nxdi_qwen.scripts.benchmarks.serve import NEW_TOKENS, PEERS, PROMPT_TOKENS, REQUESTS, SLOTS, Serve
from nxdi_qwen.scripts.benchmarks.speed import Speed, Task
from nxdi_qwen.scripts.plots import new_figure, write_plot


def speed_figures(speed: Speed) -> dict[str, Any]:
    """Everything measured, and what follows from it, ready for JSON."""
    derived = {
        task.name: {
            "floor_seconds": speed.floor_seconds(task),
            "median_seconds": {peer: median(speed.seconds(task.name, peer)) for peer in _peers(speed, task)},
            "times_as_fast_as": {peer: speed.ratio(task.name, peer) for peer in _peers(speed, task) if peer != "ours"},
        }
        for task in speed.tasks
    }
    return asdict(speed) | {"derived": derived}


def print_speed(speed: Speed) -> None:
    versions = ", ".join(f"{name} {number}" for name, number in speed.versions.items())
    table = Table(title=f"{speed.model}, bfloat16, 2 threads, {speed.rounds} rounds; {versions}", title_justify="left")
    for heading in (
        "task",
        "implementation",
        "tokens/s",
        "median ms",
        "spread ms",
        "ours: times as fast",
        "over the floor",
    ):
        table.add_column(heading, justify="left" if heading in ("task", "implementation") else "right")
    for task in speed.tasks:
        floor = speed.floor_seconds(task)
        for peer in _peers(speed, task):
            seconds = speed.seconds(task.name, peer)
            ratio = None if peer == "ours" else speed.ratio(task.name, peer)
            table.add_row(
                task.name if peer == "ours" else "",
                peer,
                f"{task.tokens / median(seconds):,.1f}",
                f"{median(seconds) * 1e3:,.1f}",
                f"{min(seconds) * 1e3:,.1f} to {max(seconds) * 1e3:,.1f}",
                "" if ratio is None else f"{ratio:.2f} x",
                "" if floor is None else f"{median(seconds) / floor:.2f} x",
            )
        table.add_section()
    Console().print(table)
    read, matmul = (median(speed.floors[name]) for name in ("read", "matmul"))
    print(f"floors of this machine: {read / 1e9:.1f} GB/s read, {matmul / 1e12:.2f} TFLOP/s bfloat16 matmul")
    print(f"float32 build against transformers, before anything was timed: {speed.parity:.1e} of the largest logit")
    limit = 1.3 * speed.weights + 800e6
    peaks = ", ".join(f"{name} {bytes_ / 1e9:.2f} GB" for name, bytes_ in speed.memory.items())
    print(f"peak memory of a process: {peaks}; 1.3 x weights + 800 MB is {limit / 1e9:.2f} GB")


def plot_speed(speed: Speed, path: Path) -> None:
    """Times of every implementation relative to ours, a group of bars a task, with the spread over rounds."""
    figure, axes = new_figure((9, 5))
    peers = list(dict.fromkeys(timing.peer for timing in speed.timings))
    width = 0.8 / len(peers)
    for number, peer in enumerate(peers):
        places, heights, low, high = [], [], [], []
        for place, task in enumerate(speed.tasks):
            seconds = speed.seconds(task.name, peer)
            if seconds:
                own = median(speed.seconds(task.name, "ours"))
                relative = [own / taken for taken in seconds]
                places.append(place + number * width)
                heights.append(median(relative))
                low.append(median(relative) - min(relative))
                high.append(max(relative) - median(relative))
        axes.bar(places, heights, width, yerr=[low, high], label=peer, capsize=2)
    axes.set_xticks(
        [place + 0.4 - width / 2 for place in range(len(speed.tasks))], [task.name for task in speed.tasks], rotation=20
    )
    axes.set_ylabel("speed, ours = 1")
    axes.set_title(f"{speed.model}, bfloat16, CPU, 2 threads, {speed.rounds} rounds (bars: medians, lines: all rounds)")
    axes.grid(axis="y", alpha=0.25)
    axes.legend()
    write_plot(figure, path)


def serve_figures(serve: Serve) -> dict[str, Any]:
    """Everything measured, and what follows from it, ready for JSON."""
    derived = {
        "tokens_per_second": {peer: median(serve.throughput(peer)) for peer in PEERS},
        "times_the_tokens_of_vllm": serve.ratio(),
    }
    return asdict(serve) | {"derived": derived}


def print_serve(serve: Serve) -> None:
    table = Table(title=_serve_title(serve), title_justify="left")
    for heading in ("server", "new tokens/s", "spread", "median s a request"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for peer, what in PEERS.items():
        tokens = serve.throughput(peer)
        requests = [seconds for one in serve.rounds if one.peer == peer for seconds in one.request_seconds]
        spread = f"{min(tokens):.1f} to {max(tokens):.1f}"
        table.add_row(what, f"{median(tokens):.1f}", spread, f"{median(requests):.1f}")
    Console().print(table)
    print(f"the artifact gives {serve.ratio():.2f} times the tokens of vLLM's own model (median over rounds)")


def plot_serve(serve: Serve, path: Path) -> None:
    """New tokens a second of both servers, round by round."""
    figure, axes = new_figure((7, 4))
    for peer, what in PEERS.items():
        tokens = serve.throughput(peer)
        axes.plot(range(1, len(tokens) + 1), tokens, marker="o", label=what)
    axes.set_xticks(range(1, len(serve.throughput("ours")) + 1))
    axes.set_xlabel("round")
    axes.set_ylabel("new tokens/s")
    axes.set_ylim(0, 1.1 * max(one.tokens_per_second for one in serve.rounds))
    axes.set_title(_serve_title(serve).replace("; ", "\n"), fontsize="small")
    axes.grid(alpha=0.25)
    axes.legend()
    write_plot(figure, path)


def _serve_title(serve: Serve) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in serve.versions.items())
    load = f"{REQUESTS} requests of {PROMPT_TOKENS} tokens and {NEW_TOKENS} new ones, {SLOTS} at once"
    return f"{serve.model}, bfloat16, CPU, 2 threads; {load}; {versions}"


def print_cost(cost: Cost) -> None:
    what = f"token mixers of {cost.model}, one layer of each kind, {cost.dtype}, {cost.threads} threads, eager, CPU"
    title = f"{what}; prefill in pieces of {PIECE:,}"
    table = Table(title=title, title_justify="left")
    for heading in ("kind", "phase", "tokens", "median ms", "state bytes", "attention's share of the model's mixers"):
        table.add_column(heading, justify="left" if heading in ("kind", "phase") else "right")
    for point in cost.points:
        share = cost.attention_share(point.phase, point.tokens) if point.kind == FULL_ATTENTION else None
        table.add_row(
            point.kind,
            point.phase,
            f"{point.tokens:,}",
            f"{median(point.seconds) * 1e3:,.2f}",
            f"{point.state_bytes:,}",
            "" if share is None else f"{share:.0%}",
        )
    Console().print(table)
    for name, exponent in cost.exponents().items():
        print(f"{name}: seconds grow with tokens to the power {exponent:.2f}")


def plot_cost(cost: Cost, path: Path) -> None:
    """Decode time, state bytes and prefill time of one layer against the context."""
    figure, axes = new_figure((12, 4), 3)
    panels = (("decode", "one decode step, ms"), ("decode", "state of a slot, MB"), ("prefill", "prefill, ms"))
    for panel, (phase, label) in zip(axes, panels, strict=True):
        for kind in cost.layers:
            points = cost.curve(kind, phase)
            values = [point.state_bytes / 1e6 if "state" in label else median(point.seconds) * 1e3 for point in points]
            panel.plot([point.tokens for point in points], values, marker="o", label=kind.replace("_", " "))
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("tokens")
        panel.set_title(label)
        panel.grid(alpha=0.25)
    axes[0].legend()
    figure.suptitle(f"one layer of {cost.model}, {cost.dtype}, eager, CPU, {cost.threads} threads", fontsize="medium")
    write_plot(figure, path)


def _peers(speed: Speed, task: Task) -> list[str]:
    return [timing.peer for timing in speed.timings if timing.task == task.name]
