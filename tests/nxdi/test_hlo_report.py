"""The report on lowered graphs: hand-made modules for each finding, and small torch modules through torch_xla."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxdi_qwen.compile import hlo_proto, hlo_report
from nxdi_qwen.compile.hlo_report import Report, large_in_two_dimensions, report
from nxdi_qwen.modeling.errors import InputError


@pytest.fixture(autouse=True)
def _needs() -> None:
    pytest.importorskip("google.protobuf")


NUMBERS = {name: number for number, (name, _) in hlo_proto.PRIMITIVE_TYPES.items()}
State = Callable[[Tensor, Tensor, Tensor], list[Tensor]]


def shape(dtype: str, *dimensions: int) -> Any:
    return hlo_proto.message("ShapeProto")(element_type=NUMBERS[dtype], dimensions=dimensions)


def module(*instructions: tuple[str, Any, list[int]], aliases: dict[int, int] | None = None) -> Any:
    """One computation: instruction i is (opcode, shape, operands by their index); the last one is returned."""
    entry = hlo_proto.message("HloComputationProto")(name="entry", id=9, root_id=len(instructions))
    for index, (opcode, its_shape, operands) in enumerate(instructions):
        each = entry.instructions.add(name=f"{opcode}.{index}", opcode=opcode, id=index + 1, shape=its_shape)
        each.operand_ids.extend(operand + 1 for operand in operands)
        if opcode == "parameter":
            each.parameter_number = sum(before[0] == "parameter" for before in instructions[:index])
    result = hlo_proto.message("HloModuleProto")(name="m", entry_computation_id=9, computations=[entry])
    parameters = sum(opcode == "parameter" for opcode, _, _ in instructions)
    result.host_program_shape.parameter_names.extend(f"s{number}" for number in range(parameters))
    for number, output in (aliases or {}).items():
        result.input_output_alias.entries.add(parameter_number=number, output_shape_index=[output])
    return result


def examine(made: Any, states: list[str] | None = None) -> Report:
    return report(made.SerializeToString(), states)


def test_undeclared_fields_survive_a_round_trip() -> None:
    data = module(("parameter", shape("f32", 2), [])).SerializeToString()
    undeclared = data + b"\x58\x01" + b"\x8a\x01\x03\x0a\x01x"  # is_dynamic = 11 and stack_frame_index = 17
    assert hlo_proto.parse_module(undeclared).SerializeToString(deterministic=True).endswith(undeclared[len(data) :])


@pytest.mark.parametrize("data", [b"", b"\x0a\x05ab", b"\xff" * 9, b'{"a": 1}'])
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="HLO module"):
        hlo_proto.parse_module(data)


def test_counts_ranks_types_and_sizes() -> None:
    made = module(
        ("parameter", shape("f32", 2, 3), []),
        ("parameter", shape("bf16", 3, 4), []),
        ("custom-call", shape("f64", 2, 2, 2, 2, 2), [0, 1]),
        ("pad", shape("f32", 70, 65), [2]),
        ("add", shape("f32", 70, 65), [3, 3]),
    )
    made.computations[0].instructions[2].custom_call_target = "topk"
    made.computations[0].instructions[3].shape.is_dynamic_dimension.extend([True, False])
    made.computations[0].instructions[3].metadata.op_name = "aten__pad"
    found = examine(made)
    assert found.instructions == 5 and found.opcodes["parameter"] == 2
    assert found.unknown_opcodes == {
        "custom-call": ("custom-call f64[2,2,2,2,2] at custom-call.2",),
        "pad": ("pad f32[70,65] at aten__pad",),
    }
    assert found.custom_calls == {"topk": 1}
    assert found.max_rank == 5 and found.above_rank == found.float64 == found.unknown_opcodes["custom-call"]
    assert found.dynamic_shapes == ("pad f32[70,65] at aten__pad",)
    assert found.parameter_bytes == 2 * 3 * 4 + 3 * 4 * 2 and found.state_bytes == 0
    assert found.largest == "pad f32[70,65] at aten__pad" and found.largest_elements == 70 * 65
    assert len(found.problems) == 5
    data = made.SerializeToString()
    assert len(large_in_two_dimensions(data, 65)) == 2 and large_in_two_dimensions(data, 66) == []
    assert large_in_two_dimensions(data, 3) == ["pad f32[70,65] at aten__pad", "add f32[70,65] at add.4"]


def test_an_accepted_opcode_is_listed_with_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    made = module(("parameter", shape("f32", 2), []), ("log", shape("f32", 2), [0]))
    monkeypatch.setitem(hlo_report.EXTRA_OPCODES, "log", "a model that ships")
    found = examine(made)
    assert found.extra_opcodes == {"log": "a model that ships"} and found.unknown_opcodes == {} == found.custom_calls


def two_states(
    second: tuple[str, int] = ("f32", 2), aliases: dict[int, int] | None = None, outputs: tuple[int, int] = (2, 3)
) -> Any:
    """Each state is negated; instruction numbers `outputs` are returned."""
    shapes = [shape("f32", 2), shape(*second)]
    whole = hlo_proto.message("ShapeProto")(element_type=NUMBERS["tuple"], tuple_shapes=shapes)
    return module(
        ("parameter", shapes[0], []),
        ("parameter", shapes[1], []),
        ("negate", shapes[0], [0]),
        ("negate", shapes[1], [1]),
        ("tuple", whole, list(outputs)),
        aliases=aliases,
    )


@pytest.mark.parametrize(
    ("second", "aliases", "outputs", "faults"),
    [
        (("f32", 2), {0: 0, 1: 1}, (2, 3), []),
        (("f32", 2), {0: 0}, (2, 3), ["s1 is unaliased: no output"]),
        (("f32", 2), {0: 1, 1: 0}, (2, 3), ["s0 is not carried over: output 1", "s1 is not carried over: output 0"]),
        (("f32", 3), {0: 1, 1: 0}, (2, 3), ["s0 is f32[2], output 1", "s1 is f32[3], output 0"]),
        (("bf16", 2), {0: 1, 1: 0}, (2, 3), ["s0 is f32[2], output 1", "s1 is bf16[2], output 0"]),
        (("f32", 2), {0: 0, 1: 1}, (2, 1), ["s1 is returned as it came"]),
    ],
    ids=["right", "unaliased", "swapped", "shapes", "dtypes", "unwritten"],
)
def test_state_faults(
    second: tuple[str, int], aliases: dict[int, int], outputs: tuple[int, int], faults: list[str]
) -> None:
    made = two_states(second, aliases, outputs)
    found = examine(made, ["s0", "s1"])
    assert len(found.state_faults) == len(faults)
    for fault, expected in zip(found.state_faults, faults, strict=True):
        assert fault.startswith(expected)
    assert examine(made, ["s2"]).state_faults == ("s2 is unused: no parameter of the graph stands for it",)


def test_states_are_counted_apart_from_weights() -> None:
    found = examine(two_states(("bf16", 3), {1: 1}))
    assert (found.state_bytes, found.parameter_bytes) == (6, 8)


def test_without_protobuf_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    hlo_proto._declare.cache_clear()
    with pytest.raises(InputError, match="need the package protobuf"):
        hlo_proto.parse_module(b"")
    hlo_proto._declare.cache_clear()


def test_costs_that_are_not_available_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxlib", None)
    found = examine(two_states())
    assert found.flops is None and found.bytes_moved is None and found.cost_note.startswith("not available: ")


def test_a_module_of_another_writer_reads_the_same() -> None:
    hlo = pytest.importorskip("jaxlib._hlo")
    text = """
HloModule other, input_output_alias={ {1}: (0, {}, must-alias) }
add { x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT sum = f32[] add(x, y) }
ENTRY entry { p = f32[2,3] parameter(0)
  n = f32[<=8] parameter(1)
  zero = f32[] constant(0)
  c = f32[2,3] custom-call(p), custom_call_target="there", metadata={op_name="here" source_file="m.py" source_line=7}
  r = f32[2] reduce(c, zero), dimensions={1}, to_apply=add
  ROOT t = (f32[2], f32[2,3]) tuple(r, c) }"""
    data = hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    made = hlo_proto.parse_module(data)
    assert hlo_proto.alias_table(made) == {0: 1}
    assert [hlo_proto.shape_text(each) for each in hlo_proto.output_shapes(made)] == ["f32[2]", "f32[2,3]"]
    found = report(data)
    assert found.instructions == 9 and found.custom_calls == {"there": 1} and len(found.dynamic_shapes) == 1
    assert found.unknown_opcodes == {"custom-call": ("custom-call f32[2,3] at m.py:7",)}


# Through torch_xla from here on.


class Recurrent(nn.Module):
    def __init__(self, update: State) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.update = update

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.update(x, self.a, self.b)


def lowered(update: State, aliases: dict[str, int] | None = None) -> Report:
    pytest.importorskip("torch_xla")
    from nxdi_qwen.compile.lowering import lower, named_tensors

    model = Recurrent(update)
    graph = lower(model, [torch.zeros(2, 3)], named_tensors(model), {"a": 1, "b": 2} if aliases is None else aliases)
    return report(graph, ["a", "b"])


def threaded(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [x + a + b, a + x, b * x]


def rank_five(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
    return [x.reshape(1, 2, 1, 3, 1).expand(1, 2, 2, 3, 1) * 2, a + x, b * x]


@pytest.mark.nxdi
def test_a_threaded_graph_has_no_problems() -> None:
    found = lowered(threaded)
    assert found.problems == [] and found.unused == ()
    assert (found.state_bytes, found.parameter_bytes) == (48, 0)
    assert json.loads(json.dumps(found.as_dict()))["problems"] == []


@pytest.mark.nxdi
@pytest.mark.parametrize(
    ("update", "aliases", "problem"),
    [
        (threaded, {"a": 1}, "state b is unaliased"),
        (threaded, {"a": 2, "b": 1}, "state a is not carried over"),
        (lambda x, a, b: [x + a, a + x, x * 2], None, "state b is unused"),
        (lambda x, a, b: [x + a, a + x, torch.zeros(2, 3, device=x.device) + x], None, "state b is unused"),
        (lambda x, a, b: [x + a, a + x, b], None, "state b is returned as it came"),
        (lambda x, a, b: [x + a, a + x, (b * x).bfloat16()], None, "state b is f32[2,3], output 2"),
        (lambda x, a, b: [x.cumsum(1), a + x, b * x], None, "opcode reduce-window is not known to compile"),
        (rank_five, None, "rank above 4: "),
        (lambda x, a, b: [x.double() * 2, a + x, b * x], None, "64-bit floating point: "),
        (lambda x, a, b: [x + x.sum().item(), a + x, b * x], None, "aten::_local_scalar_dense ran while tracing"),
        (lambda x, a, b: [x + 1, a.add_(x), b * x], None, "a is changed in place"),
    ],
    ids=["unaliased", "swapped", "unused", "folded", "unwritten", "dtype", "opcode", "rank", "f64", "item", "in place"],
)
def test_what_is_wrong_is_a_problem(update: State, aliases: dict[str, int] | None, problem: str) -> None:
    problems = lowered(update, aliases).problems
    assert any(line.startswith(problem) for line in problems), problems


@pytest.mark.nxdi
def test_an_opcode_is_named_with_its_source_line() -> None:
    line = sys._getframe().f_lineno + 1
    places = lowered(lambda x, a, b: [x.cumsum(1), a + x, b * x]).unknown_opcodes["reduce-window"]
    assert len(places) == 1 and places[0].endswith(f"test_hlo_report.py:{line}")


@pytest.mark.nxdi
def test_a_folded_state_that_nobody_named_shows_as_a_constant() -> None:
    pytest.importorskip("torch_xla")
    from nxdi_qwen.compile.lowering import lower

    state = torch.zeros(2, 3)
    found = report(lower(lambda x: [x + state], [torch.zeros(2, 3)], {}, {}))
    assert list(found.constants.values()) == ["f32[2,3]"]


@pytest.mark.nxdi
def test_costs_are_those_of_a_matmul() -> None:
    pytest.importorskip("torch_xla")
    pytest.importorskip("jaxlib")
    from nxdi_qwen.compile.lowering import lower

    found = report(lower(lambda x, w: [x @ w], [torch.zeros(8, 16), torch.zeros(16, 32)], {}, {}))
    assert found.cost_note == "" and found.flops == 2 * 8 * 16 * 32
    assert found.bytes_moved is not None and found.bytes_moved >= 4 * (8 * 16 + 16 * 32 + 8 * 32)
