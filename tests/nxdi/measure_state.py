"""State bytes of the lowered decode graphs against the state description: ``python -m tests.nxdi.measure_state``.

Every public model in bfloat16 at every degree that it runs at, with all its layers. Beside the model's own state stands
what the same requests would take with a dummy KV: the state plus keys and values, of the attention layers' kind, in
every GDN layer too. The exit status is 1 where a graph and the description disagree. Needs NxDI and torch_xla.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from nxdi_qwen.compile import hlo_proto
from nxdi_qwen.compile.cpu import CompileOptions
from nxdi_qwen.compile.distributed import library_output_on_stderr
from nxdi_qwen.compile.lowering import LoweredGraph
from nxdi_qwen.compile.neuron_options import NeuronOptions, check_hlo_target
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.partition import Parallel, allowed_degrees
from nxdi_qwen.modeling.presets import PRESETS
from nxdi_qwen.modeling.state import StateDescription, describe_state
from nxdi_qwen.scripts import command

# More than one, so that a tensor that is not per slot shows as a fraction or a remainder.
SLOTS = 3
MAX_LENGTH = 32768
_MANAGER = "kv_mgr."  # the module that holds NxDI's state


@dataclass(frozen=True)
class Measured:
    """Bytes of a slot on one rank. `graph`, `description`: of each state tensor, in ascending order."""

    model: str
    degree: int
    graph: tuple[float, ...]
    description: tuple[int, ...]
    dummy_kv: int

    @property
    def agrees(self) -> bool:
        return self.graph == self.description

    @property
    def own(self) -> float:
        """Of all states in the graph."""
        return sum(self.graph)

    @property
    def with_dummy_kv(self) -> float:
        """The same with keys and values in the GDN layers too."""
        return self.own + self.dummy_kv


def lower_decode(source: ModelSource, degree: int, max_length: int) -> LoweredGraph:
    """The token-generation graph of rank 0 for `SLOTS` requests, in bfloat16; weights are not allocated."""
    from nxdi_qwen.compile.hlo import lower_application
    from nxdi_qwen.compile.neuron import application_of

    shared = CompileOptions(slots=SLOTS, max_length=max_length, dtype="bfloat16", degree=degree)
    application = application_of(source, NeuronOptions(shared))
    application.models = [application.token_generation_model]
    (graph,) = lower_application(application, device="meta").values()
    return graph


def state_bytes(graph: LoweredGraph) -> tuple[float, ...]:
    """Bytes of a slot, of each state tensor in ascending order: what is replaced by an output, and everything else that
    the cache manager holds and the graph reads.
    """
    module = hlo_proto.parse_module(graph.proto)
    aliased = hlo_proto.alias_table(module)
    states = (
        parameter
        for parameter, name in zip(hlo_proto.entry_parameters(module), graph.parameters, strict=True)
        if parameter.parameter_number in aliased or name.startswith(_MANAGER)
    )
    return tuple(sorted(hlo_proto.byte_count(state.shape) / SLOTS for state in states))


def measure(source: ModelSource, degree: int, max_length: int) -> Measured:
    """The state in the decode graph beside its description."""
    graph = lower_decode(source, degree, max_length)
    description = describe_state(source.config, SLOTS, max_length, torch.bfloat16, Parallel(degree))
    described = tuple(sorted(tensor.bytes_per_slot for tensor in description.tensors))
    return Measured(source.name, degree, state_bytes(graph), described, _dummy_kv(description))


def _dummy_kv(description: StateDescription) -> int:
    """Bytes of a slot that keys and values in the layers without attention would take."""
    cache = [tensor.bytes_per_slot for tensor in description.tensors if tensor.role in ("key", "value")]
    layers = len(description.tensors) // 2
    return sum(cache[:2]) * (layers - len(cache) // 2)


def _table(rows: Sequence[Measured], max_length: int) -> Table:
    table = Table(title=f"State of a request of up to {max_length} tokens in the lowered decode graph, bfloat16, MiB")
    for heading in ("model", "degree", "graph, a rank", "description", "", "all ranks", "with dummy KV", "times"):
        table.add_column(heading, justify="left" if heading in ("model", "") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.model,
            str(row.degree),
            _mib(row.own),
            _mib(sum(row.description)),
            "=" if row.agrees else "DIFFERS",
            _mib(row.own * row.degree),
            _mib(row.with_dummy_kv * row.degree),
            f"{row.with_dummy_kv / row.own:.2f}",
            end_section=row is rows[-1] or rows[rows.index(row) + 1].model != row.model,
        )
    return table


def _mib(count: float) -> str:
    return f"{count / 2**20:,.2f}"


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser(prog="python -m tests.nxdi.measure_state", description=__doc__)
    parser.add_argument(
        "--max-length", type=int, default=MAX_LENGTH, metavar="N", help=f"tokens (default {MAX_LENGTH})"
    )
    parser.add_argument("--json", action="store_true", help="bytes, exact, instead of the table")
    options = parser.parse_args(arguments)
    check_hlo_target()
    places = [(name, degree) for name, config in PRESETS.items() for degree in allowed_degrees(config)]
    rows: list[Measured] = []
    logging.disable(logging.INFO)  # NxD's, a dozen lines a graph
    with library_output_on_stderr(), command.progress_bars() as progress:
        for name, degree in places:
            progress("graphs", len(rows), len(places))
            rows.append(measure(ModelSource.from_preset(name), degree, options.max_length))
        progress("graphs", len(rows), len(places))
    if options.json:
        print(json.dumps([_as_dict(row) for row in rows], indent=2))
    else:
        Console(width=None if Console().is_terminal else 120).print(_table(rows, options.max_length))
    return 0 if all(row.agrees for row in rows) else 1


def _as_dict(row: Measured) -> dict[str, object]:
    """For JSON: bytes of a slot on a rank, and on all of them."""
    return {
        "model": row.model,
        "degree": row.degree,
        "graph": row.own,
        "description": sum(row.description),
        "agrees": row.agrees,
        "all_ranks": row.own * row.degree,
        "all_ranks_with_dummy_kv": row.with_dummy_kv * row.degree,
        "ratio": row.with_dummy_kv / row.own,
    }


if __name__ == "__main__":
    raise SystemExit(command.run(main))
