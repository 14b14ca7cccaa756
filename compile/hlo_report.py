"""What a lowered graph consists of, and what speaks against handing it to a Neuron compiler.

Counts are those of the module as it was lowered, before any compiler's optimisation.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from nxdi_qwen.compile import hlo_proto
from nxdi_qwen.compile.lowering import LoweredGraph

MAX_RANK = 4

# All opcodes in the graphs of NxDI's own Qwen3 and Qwen3-MoE (NxDI 0.9.0; context encoding and token generation at
# degree 1 and 2), which ship and compile.
KNOWN_OPCODES = frozenset({
    "abs", "add", "all-gather", "all-reduce", "broadcast", "call", "clamp", "compare", "concatenate", "constant",
    "convert", "cosine", "divide", "dot", "dynamic-update-slice", "exponential", "gather", "get-tuple-element", "iota",
    "logistic", "maximum", "minimum", "multiply", "negate", "parameter", "power", "reduce", "reshape", "rsqrt",
    "scatter", "select", "sine", "slice", "sort", "subtract", "transpose", "tuple",
})  # fmt: skip
# Opcodes beyond that list that are accepted: opcode -> the public Neuron model, kernel or document that shows that
# it compiles.
EXTRA_OPCODES: dict[str, str] = {
    "log": "softplus of the decay: nki.language.log exists on every NeuronCore that NKI supports (log1p from v4 on)",
    "and": "NxD's own ParallelEmbedding cut by vocabulary, an option of the models that NxDI ships (vocab_parallel)",
}
# Sources whose 64-bit floating point is accepted: part of the path -> why.
FLOAT64_SOURCES: dict[str, str] = {
    "neuronx_distributed/modules/moe/": "NxD's own router and experts, in every MoE model that NxDI ships",
    "torch/nn/functional.py": "a normalisation that NxD's experts call",
}


@dataclass(frozen=True)
class Report:
    """Findings on one graph. Places are texts: opcode, shape, and the source line that made the instruction.

    instructions: of all computations. unknown_opcodes: opcode -> places, of those neither known nor accepted.
    extra_opcodes: accepted ones that occur -> evidence. custom_calls: target -> count. above_rank: places of more
    than MAX_RANK dimensions. float64: places with 64-bit floating point, but for `FLOAT64_SOURCES`. state_faults: a
    state's name and what is wrong with it. unused: inputs, weights and buffers without a parameter in the graph.
    constants: name -> shape of tensors that the call made itself. parameter_bytes: of weights and buffers;
    state_bytes: of states that the graph reads. flops, bytes_moved: XLA's cost analysis, every instruction reading
    and writing memory; None with the reason in `cost_note` when that is not available. largest: the place of the
    tensor with the most elements.
    """

    instructions: int
    opcodes: dict[str, int]
    unknown_opcodes: dict[str, tuple[str, ...]]
    extra_opcodes: dict[str, str]
    custom_calls: dict[str, int]
    max_rank: int
    above_rank: tuple[str, ...]
    dynamic_shapes: tuple[str, ...]
    float64: tuple[str, ...]
    state_faults: tuple[str, ...]
    unused: tuple[str, ...]
    mutated: tuple[str, ...]
    fallbacks: tuple[str, ...]
    constants: dict[str, str]
    parameter_bytes: int
    state_bytes: int
    flops: float | None
    bytes_moved: float | None
    cost_note: str
    largest: str
    largest_elements: int

    @property
    def problems(self) -> list[str]:
        """One line for each thing that must not be; empty for a graph that can be handed over."""
        lines = [
            f"opcode {opcode} is not known to compile: {_some(places)}"
            for opcode, places in self.unknown_opcodes.items()
        ]
        groups = (
            (f"rank above {MAX_RANK}", self.above_rank),
            ("dynamic shape", self.dynamic_shapes),
            ("64-bit floating point", self.float64),
        )
        lines += [f"{what}: {_some(places)}" for what, places in groups if places]
        lines += [f"state {fault}" for fault in self.state_faults]
        lines += [f"{name} is changed in place, which the graph does not show" for name in self.mutated]
        lines += [f"{name} ran while tracing, so that its result is a constant" for name in self.fallbacks]
        return lines

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "problems": self.problems}


def report(graph: LoweredGraph | bytes, states: Collection[str] | None = None) -> Report:
    """Examines a graph, or the bytes of its module alone (then nothing is known of what is not in it).

    states: the names that have to be threaded through the graph; None: those with an alias. From bytes, names are those
    that `lower` wrote.
    """
    data = graph if isinstance(graph, bytes) else graph.proto
    module = hlo_proto.parse_module(data)
    instructions = [each for computation in module.computations for each in computation.instructions]
    opcodes = Counter(each.opcode for each in instructions)
    names = list(module.host_program_shape.parameter_names)
    parameters = dict(zip(names, hlo_proto.entry_parameters(module), strict=False))
    aliases = {names[number]: index for number, index in hlo_proto.alias_table(module).items()}
    if states is None:
        states = list(aliases if isinstance(graph, bytes) else graph.aliases)
    rank, largest = max(_ranks(instructions), default=0), max(instructions, key=_elements)
    flops, bytes_moved, cost_note = _cost(data)
    weights = [name for name in parameters if name not in states and not name.startswith(("input:", "constant:"))]
    return Report(
        instructions=len(instructions),
        opcodes=dict(sorted(opcodes.items())),
        unknown_opcodes={
            opcode: _places(each for each in instructions if each.opcode == opcode)
            for opcode in sorted(opcodes)
            if opcode not in KNOWN_OPCODES and opcode not in EXTRA_OPCODES
        },
        extra_opcodes={opcode: EXTRA_OPCODES[opcode] for opcode in sorted(opcodes) if opcode in EXTRA_OPCODES},
        custom_calls=dict(Counter(each.custom_call_target for each in instructions if each.opcode == "custom-call")),
        max_rank=rank,
        above_rank=_places(each for each in instructions if max(_ranks([each]), default=0) > MAX_RANK),
        dynamic_shapes=_places(
            each
            for each in instructions
            if any(any(shape.is_dynamic_dimension) for shape in hlo_proto.arrays(each.shape))
        ),
        # A computation that an instruction calls, such as the sum of a reduction, has no source of its own.
        float64=_places(
            each
            for each in hlo_proto.entry_computation(module).instructions
            if not any(source in each.metadata.source_file for source in FLOAT64_SOURCES)
            and any(hlo_proto.element_name(shape) in ("f64", "c128") for shape in hlo_proto.arrays(each.shape))
        ),
        state_faults=tuple(_state_faults(module, states, parameters, aliases)),
        unused=() if isinstance(graph, bytes) else graph.missing,
        mutated=() if isinstance(graph, bytes) else graph.mutated,
        fallbacks=() if isinstance(graph, bytes) else graph.fallbacks,
        constants={
            name: hlo_proto.shape_text(each.shape) for name, each in parameters.items() if name.startswith("constant:")
        },
        parameter_bytes=sum(hlo_proto.byte_count(parameters[name].shape) for name in weights),
        state_bytes=sum(hlo_proto.byte_count(parameters[name].shape) for name in states if name in parameters),
        flops=flops,
        bytes_moved=bytes_moved,
        cost_note=cost_note,
        largest=place(largest),
        largest_elements=_elements(largest),
    )


def large_in_two_dimensions(graph: LoweredGraph | bytes, size: int) -> list[str]:
    """The places of computed tensors with two dimensions of at least `size`, such as scores over `size` tokens."""
    module = hlo_proto.parse_module(graph if isinstance(graph, bytes) else graph.proto)
    return list(
        _places(
            each
            for computation in module.computations
            for each in computation.instructions
            if each.opcode != "parameter"
            and any(sum(length >= size for length in shape.dimensions) >= 2 for shape in hlo_proto.arrays(each.shape))
        )
    )


def place(instruction: Any) -> str:
    """An instruction with its source line; without one, with its operation's or its own name."""
    metadata = instruction.metadata
    if metadata.source_file:
        where = f"{metadata.source_file}:{metadata.source_line}"
    else:
        where = metadata.op_name or instruction.name
    return f"{instruction.opcode} {hlo_proto.shape_text(instruction.shape)} at {where}"


def _places(instructions: Iterator[Any]) -> tuple[str, ...]:
    """Each place once, in the module's order."""
    return tuple(dict.fromkeys(place(each) for each in instructions))


def _some(places: Collection[str]) -> str:
    shown = list(places)[:3]
    return ", ".join(shown) + (f" and {len(places) - len(shown)} more" if len(places) > len(shown) else "")


def _ranks(instructions: list[Any]) -> list[int]:
    return [len(shape.dimensions) for each in instructions for shape in hlo_proto.arrays(each.shape)]


def _elements(instruction: Any) -> int:
    return max((hlo_proto.element_count(shape) for shape in hlo_proto.arrays(instruction.shape)), default=0)


def _state_faults(
    module: Any, states: Collection[str], parameters: dict[str, Any], aliases: dict[str, int]
) -> Iterator[str]:
    """A state is threaded when its own parameter's value reaches the one output that is aliased to it."""
    entry = hlo_proto.entry_computation(module)
    by_id = {each.id: each for each in entry.instructions}
    root = hlo_proto.root_instruction(entry)
    outputs = list(root.operand_ids) if root.opcode == "tuple" else [root.id]
    for name in states:
        if name not in parameters:
            yield f"{name} is unused: no parameter of the graph stands for it"
            continue
        if name not in aliases:
            yield f"{name} is unaliased: no output takes its place"
            continue
        parameter, output = parameters[name], by_id[outputs[aliases[name]]]
        kept, returned = hlo_proto.shape_text(parameter.shape), hlo_proto.shape_text(output.shape)
        if kept != returned:
            yield f"{name} is {kept}, output {aliases[name]} that takes its place {returned}"
        elif output.id == parameter.id:
            yield f"{name} is returned as it came: nothing is written"
        elif parameter.id not in _ancestors(output.id, by_id):
            yield f"{name} is not carried over: output {aliases[name]} that takes its place does not depend on it"


def _ancestors(start: int, by_id: dict[int, Any]) -> set[int]:
    """Ids of all instructions that instruction `start` depends on."""
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        for operand in by_id[waiting.pop()].operand_ids:
            if operand not in seen:
                seen.add(operand)
                waiting.append(operand)
    return seen


@functools.cache
def _cpu_client() -> Any:
    from jaxlib import xla_client

    return xla_client.make_cpu_client()


def _cost(data: bytes) -> tuple[float | None, float | None, str]:
    """FLOPs, bytes accessed and why there are none. torch_xla does not expose XLA's cost analysis; jaxlib does."""
    try:
        from jaxlib import _hlo, xla_client

        module = _hlo.HloModule.from_serialized_hlo_module_proto(data)
        costs = xla_client._xla.hlo_module_cost_analysis(_cpu_client(), module)
    except (ImportError, AttributeError) as error:
        return None, None, f"not available: {error}; pip install 'nxdi-qwen[hlo]' brings a jaxlib that has it"
    except xla_client.XlaRuntimeError as error:
        return None, None, f"not available: XLA refuses the module: {error}"
    return costs["flops"], costs["bytes accessed"], ""
