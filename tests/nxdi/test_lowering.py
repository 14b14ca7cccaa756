"""Lowering to HLO and running the result, on small modules whose own CPU run is the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nxdi_qwen.compile import hlo_proto
from nxdi_qwen.compile.lowering import LoweredGraph, lower, named_tensors
from nxdi_qwen.modeling.errors import InputError

pytestmark = pytest.mark.nxdi


@pytest.fixture(autouse=True)
def _needs() -> None:
    pytest.importorskip("torch_xla")
    pytest.importorskip("google.protobuf")


class Cell(nn.Module):
    """Two states of one shape, updated from tokens [N, 4] -> [output, total, trace]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5), requires_grad=False)
        self.total = nn.Parameter(torch.zeros(1, 4), requires_grad=False)
        self.trace = nn.Parameter(torch.zeros(1, 4), requires_grad=False)
        self.never_read = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, tokens: Tensor, gate: Tensor) -> list[Tensor]:
        new = tokens.sum(0, keepdim=True) * self.scale
        total = self.total + torch.where(gate > 0, new, 0.0)
        trace = 0.5 * self.trace + new
        return [(total + 3 * trace) @ self.weight, total, trace]


@pytest.fixture
def cell() -> Cell:
    torch.manual_seed(0)
    return Cell()


def lower_cell(cell: Cell, rows: int = 1) -> LoweredGraph:
    inputs = (torch.zeros(rows, 4), torch.tensor(0, dtype=torch.int32))
    return lower(cell, inputs, named_tensors(cell), {cell.total: 1, cell.trace: 2})


def step(cell: Cell, tokens: Tensor, gate: Tensor) -> Tensor:
    """One run of the module itself, with its states carried over."""
    output, total, trace = cell(tokens, gate)
    cell.total.copy_(total)
    cell.trace.copy_(trace)
    return output


def gate(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


def test_two_graphs_that_share_their_values_equal_the_module(cell: Cell) -> None:
    context, decode = lower_cell(cell, rows=3), lower_cell(cell)
    values = {**context.values, **decode.values}
    for graph, rows, value in ((context, 3, 1), (decode, 1, 1), (decode, 1, 0), (decode, 1, 1)):
        tokens = torch.randn(rows, 4)
        outputs = graph.run([tokens, gate(value)], values)
        torch.testing.assert_close(outputs[0], step(cell, tokens, gate(value)), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(values["total"], cell.total.data, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(values["trace"], cell.trace.data, rtol=1e-6, atol=1e-6)


def test_the_module_is_what_it_was(cell: Cell) -> None:
    before = {name: (id(tensor), tensor.clone()) for name, tensor in named_tensors(cell).items()}
    reference = cell(torch.ones(1, 4), gate(1))
    lower_cell(cell)
    for name, tensor in named_tensors(cell).items():
        assert id(tensor) == before[name][0] and isinstance(tensor, nn.Parameter) == (name != "scale")
        assert torch.equal(tensor, before[name][1])
    for output, expected in zip(cell(torch.ones(1, 4), gate(1)), reference, strict=True):
        assert torch.equal(output, expected)


def test_a_call_sees_parameters_on_the_xla_device_and_may_raise(cell: Cell) -> None:
    def call(tokens: Tensor) -> list[Tensor]:
        assert cell.weight.device.type == "xla" and isinstance(cell.weight, nn.Parameter)
        assert cell.weight.partition_dim == 1
        raise ValueError("no")

    cell.weight.partition_dim = 1
    with pytest.raises(ValueError, match="no"):
        lower(call, [torch.ones(1, 4)], named_tensors(cell), {})
    assert cell.weight.device.type == "cpu"


def test_a_failure_that_holds_parameters_is_the_one_that_is_seen(cell: Cell) -> None:
    """As one inside an autograd function does; such parameters cannot be put back."""
    held = []

    def call(tokens: Tensor) -> list[Tensor]:
        held.append(cell.weight.requires_grad_().view(-1))
        raise ValueError("no")

    with torch.enable_grad(), pytest.raises(ValueError, match="no"):
        lower(call, [torch.ones(1, 4)], named_tensors(cell), {})


def test_a_table_made_on_first_use_does_not_stay_on_the_xla_device() -> None:
    class Lazy(nn.Module):
        table: Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", None)
            self.other: Tensor | None = None

        def forward(self, x: Tensor) -> list[Tensor]:
            if self.table is None:
                self.table = self.other = torch.arange(4, device=x.device)
            return [x + self.table]

    module = Lazy()
    first = lower(module, [torch.zeros(4)], named_tensors(module), {})
    assert module.table is None and module.other is None
    assert first.parameters == lower(module, [torch.zeros(4)], named_tensors(module), {}).parameters == ("input:0",)


def test_every_parameter_is_known_by_name(cell: Cell) -> None:
    graph = lower_cell(cell)
    assert sorted(graph.parameters) == ["input:0", "input:1", "scale", "total", "trace", "weight"]
    assert graph.missing == ("never_read",)
    assert graph.mutated == graph.fallbacks == () and graph.constants == {}
    shapes = {
        name: hlo_proto.shape_text(parameter.shape)
        for name, parameter in zip(
            graph.parameters, hlo_proto.entry_parameters(hlo_proto.parse_module(graph.proto)), strict=True
        )
    }
    assert shapes == {
        "input:0": "f32[1,4]",
        "input:1": "s32[]",
        "scale": "f32[4]",
        "total": "f32[1,4]",
        "trace": "f32[1,4]",
        "weight": "f32[4,5]",
    }


def test_the_alias_table_is_in_the_written_module(cell: Cell, tmp_path: Path) -> None:
    graph = lower_cell(cell)
    graph.save(tmp_path / "cell.hlo")
    module = hlo_proto.parse_module((tmp_path / "cell.hlo").read_bytes())
    names = list(module.host_program_shape.parameter_names)
    assert tuple(names) == graph.parameters
    assert {names[number]: index for number, index in hlo_proto.alias_table(module).items()} == graph.aliases
    assert graph.aliases == {"total": 1, "trace": 2}


def test_xla_reads_the_alias_table(cell: Cell) -> None:
    hlo = pytest.importorskip("jaxlib._hlo")
    graph = lower_cell(cell)
    text = hlo.HloModule.from_serialized_hlo_module_proto(graph.proto).to_string()
    for name, index in (("total", 1), ("trace", 2)):
        assert f"{{{index}}}: ({graph.parameters.index(name)}, {{}}, must-alias)" in text


def test_nothing_is_folded(cell: Cell) -> None:
    graph = lower_cell(cell)
    tokens = torch.ones(1, 4)

    def first_output(**changed: Tensor) -> Tensor:
        return graph.run([tokens, gate(1)], {**graph.values, **changed})[0]

    reference = first_output()
    for name in ("total", "trace", "scale", "weight"):
        assert not torch.equal(first_output(**{name: graph.values[name] + 1}), reference), name
    assert torch.equal(first_output(), reference)


@pytest.mark.parametrize("aliases", [{}, {"total": 1}, {"total": 2, "trace": 1}], ids=["none", "one", "swapped"])
def test_states_that_are_not_threaded_or_swapped_do_not_equal_the_module(cell: Cell, aliases: dict[str, int]) -> None:
    graph = lower(cell, (torch.zeros(1, 4), gate(0)), named_tensors(cell), aliases)
    values = dict(graph.values)
    tokens = torch.randn(1, 4)
    torch.testing.assert_close(graph.run([tokens, gate(0)], values)[0], step(cell, tokens, gate(0)))
    assert (graph.run([tokens, gate(0)], values)[0] - step(cell, tokens, gate(0))).abs().max() > 0.1


def test_what_a_graph_does_not_read_or_reads_unnamed_is_recorded(cell: Cell) -> None:
    made_outside = torch.full((1, 4), 7.0)

    def call(tokens: Tensor) -> list[Tensor]:
        return [tokens + made_outside + torch.tensor([1.0, 2.0, 3.0, 4.0], device=tokens.device), tokens * 2]

    graph = lower(call, [torch.zeros(1, 4)], named_tensors(cell), {"total": 1})
    assert set(graph.missing) == {"weight", "total", "trace", "never_read", "scale"}
    assert sorted(tensor.sum().item() for tensor in graph.constants.values()) == [10.0, 28.0]
    assert hlo_proto.alias_table(hlo_proto.parse_module(graph.proto)) == {}
    outputs = graph.run([torch.ones(1, 4)], {})
    assert torch.equal(outputs[0], 8 + torch.tensor([[1.0, 2.0, 3.0, 4.0]]))


def test_constants_of_graphs_that_share_their_values_stay_apart() -> None:
    graphs = [
        lower(lambda x, k=k: [x + torch.tensor([k, k], device=x.device)], [torch.zeros(2)], {}, {}) for k in (1.0, 2.0)
    ]
    values: dict[str, Tensor] = {}
    assert [graph.run([torch.zeros(2)], values)[0][0].item() for graph in graphs] == [1.0, 2.0]


def test_mutation_in_place_and_work_on_the_cpu_are_recorded() -> None:
    def in_place(new: Tensor, state: Tensor) -> list[Tensor]:
        state[:1] = new
        return [state.sum()]

    graph = lower(in_place, [torch.ones(1, 2), torch.zeros(2, 2)], {}, {})
    assert graph.mutated == ("input:1",) and "input:1" in graph.parameters
    assert graph.run([torch.ones(1, 2), torch.ones(2, 2)], {})[0].item() == 4
    assert "aten::_local_scalar_dense" in lower(lambda x: [x * x.sum().item()], [torch.ones(2)], {}, {}).fallbacks


def test_an_output_may_be_an_input_or_stand_twice() -> None:
    def call(x: Tensor, y: Tensor) -> list[Tensor]:
        total = x + y
        return [total, x, total, y]

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    graph = lower(call, [torch.zeros(2, 3), torch.zeros(2, 3)], {}, {})
    for output, expected in zip(graph.run([x, y], {}), call(x, y), strict=True):
        assert torch.equal(output, expected)


def test_equal_scalars_are_parameters_of_their_own() -> None:
    pairs = [gate(0), gate(0), torch.tensor(2.0), torch.tensor(2.0), torch.tensor(True), torch.tensor(True)]
    graph = lower(lambda a, b, c, d, e, f: [a - b, c / d, e & ~f], pairs, {}, {})
    assert sorted(graph.parameters) == [f"input:{number}" for number in range(6)]
    others = [gate(7), gate(3), torch.tensor(9.0), torch.tensor(2.0), torch.tensor(True), torch.tensor(False)]
    assert [output.item() for output in graph.run(others, {})] == [4, 4.5, True]


def test_a_tied_weight_is_one_parameter_under_its_first_name(cell: Cell) -> None:
    parameters = {"embedding": cell.weight, "head": cell.weight}
    graph = lower(lambda x: [x @ cell.weight], [torch.zeros(1, 4)], parameters, {})
    assert sorted(graph.parameters) == ["embedding", "input:0"] and graph.missing == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_dtypes_pass_through(dtype: torch.dtype) -> None:
    graph = lower(lambda x: [x + x], [torch.zeros(2, dtype=dtype)], {}, {})
    x = torch.tensor([1, 3], dtype=dtype)
    assert torch.equal(graph.run([x], {})[0], x + x)


def test_weights_on_the_meta_device_give_the_same_graph(cell: Cell) -> None:
    def text(graph: LoweredGraph) -> list[tuple[str, str]]:
        module = hlo_proto.parse_module(graph.proto)
        instructions = hlo_proto.entry_computation(module).instructions
        return [(each.opcode, hlo_proto.shape_text(each.shape)) for each in instructions]

    graph = lower_cell(cell)
    values = graph.values
    meta_cell = Cell().to("meta")
    meta_graph = lower_cell(meta_cell)
    assert meta_cell.weight.is_meta and meta_graph.values == {}
    assert text(meta_graph) == text(graph) and meta_graph.parameters == graph.parameters
    tokens = torch.randn(1, 4)
    outputs = meta_graph.run([tokens, gate(1)], dict(values))
    for output, expected in zip(outputs, graph.run([tokens, gate(1)], dict(values)), strict=True):
        assert torch.equal(output, expected)


def test_meta_weights_larger_than_memory() -> None:
    weight = nn.Parameter(torch.empty(1 << 20, 1 << 20, device="meta", dtype=torch.bfloat16), requires_grad=False)
    graph = lower(lambda x: [x @ weight], [torch.zeros(1, 1 << 20, dtype=torch.bfloat16)], {"weight": weight}, {})
    assert sorted(graph.parameters) == ["input:0", "weight"]


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"nothing": 1}, "output 1 is aliased to nothing, which is not among the parameters"),
        ({torch.zeros(2): 1}, "output 1 is aliased to a tensor .2,., which is not"),
        ({"total": 3}, "total is aliased to output 3 of 3"),
        ({"total": 1, "trace": 1}, "trace and total are both aliased to output 1"),
    ],
)
def test_wrong_aliases_are_refused(cell: Cell, aliases: dict[Tensor | str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        lower(cell, (torch.zeros(1, 4), gate(0)), named_tensors(cell), aliases)


def test_an_output_on_the_cpu_is_refused() -> None:
    with pytest.raises(InputError, match="output 1 lies on cpu"):
        lower(lambda x: [x + 1, torch.zeros(2)], [torch.zeros(2)], {}, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inputs, values: values.pop("total"), "total has no value"),
        (lambda inputs, values: inputs.pop(), "1 inputs were given, the graph reads input:1"),
        (
            lambda inputs, values: values.update(total=torch.zeros(2, 4)),
            r"total is f32\[2,4\], the graph takes f32\[1,4",
        ),
        (lambda inputs, values: inputs.__setitem__(1, torch.tensor(1)), r"input:1 is s64\[\], the graph takes s32\[\]"),
    ],
)
def test_a_run_with_wrong_tensors_is_refused(
    cell: Cell, change: Callable[[list[Tensor], dict[str, Tensor]], object], message: str
) -> None:
    graph = lower_cell(cell)
    inputs, values = [torch.zeros(1, 4), gate(0)], dict(graph.values)
    change(inputs, values)
    with pytest.raises(InputError, match=message):
        graph.run(inputs, values)
