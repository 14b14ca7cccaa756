"""The graph check: a fault planted in a small program, or in the model itself, is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from nxdi_qwen.compile import graphs as graphs_module
from nxdi_qwen.compile.graph_check import GraphError, check_graph
from nxdi_qwen.compile.graphs import CONTEXT, DECODE, HEAD, GraphSpec, capture, graph_state, layer_kind, pass_specs
from nxdi_qwen.modeling import model as model_module
from nxdi_qwen.modeling.parallel import VocabParallelHead
from nxdi_qwen.modeling.state import StateTensor, describe_state
from tests.modeling.weights.synthetic import make_config

SLOTS, WIDTH = 2, 6
SPEC = GraphSpec(DECODE, SLOTS, 1)
# Two tensors of one shape, as keys and values are: an exchange of the two leaves every shape as it was.
STATE = tuple(StateTensor(f"layers.0.{role}", 0, role, (SLOTS, WIDTH), torch.float32, ()) for role in ("key", "value"))
Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class _Program(nn.Module):
    """x [2, 6], active [2, 1] and the state -> logits and the new state, by `step`."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor, active: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        logits, *new = self.step(x, active, *state)
        return logits, new


def exported(step: Step, dynamic_shapes: object = None) -> ExportedProgram:
    x, active = torch.zeros(SLOTS, WIDTH), torch.zeros(SLOTS, 1, dtype=torch.bool)
    inputs = (x, active, [torch.zeros(SLOTS, WIDTH), torch.zeros(SLOTS, WIDTH)])
    return torch.export.export(_Program(step), inputs, strict=False, dynamic_shapes=dynamic_shapes)


def check(step: Step) -> dict[str, int]:
    return check_graph(exported(step), SPEC, STATE)


def good(x: Tensor, active: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + key + value, torch.where(active, x + key, key), torch.where(active, x - value, value)


def test_a_good_program_is_measured() -> None:
    size = check(good)
    assert size["max_rank"] == 2
    assert size["nodes"] == 6  # 2 adds, add, sub, 2 selections


class Faulty(nn.Module):
    """Computes 2 x, with a fault; torch.export keeps the source line of the innermost `forward` only."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "rank 5":
            return (x.view(1, 1, SLOTS, 2, 3) * 2).view(SLOTS, WIDTH)
        if self.fault == "unknown operation":
            return x * 2 + torch.erfinv(x) * 0
        return x * 2 + torch.nonzero(x).sum() * 0


def faulty(fault: str) -> Step:
    module = Faulty(fault)
    return lambda x, *rest: good(module(x), *rest)


def returned_as_it_came(x: Tensor, active: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + key + value, torch.where(active, x + key, key), value


def returned_as_a_copy(x: Tensor, active: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + key + value, torch.where(active, x + key, key), value.clone()


def never_read(x: Tensor, active: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + key, torch.where(active, x + key, key), torch.where(active, x, value)


def not_carried_over(x: Tensor, active: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x + key + value, torch.where(active, x + key, key), x - value + 1


def exchanged(x: Tensor, active: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, new_key, new_value = good(x, active, key, value)
    return logits, new_value, new_key


def not_contiguous(x: Tensor, active: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, new_key, new_value = good(x, active, key, value)
    return logits, new_key, new_value.t().contiguous().t()


def other_dtype(x: Tensor, active: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, new_key, new_value = good(x, active, key, value)
    return logits, new_key, new_value.to(torch.bfloat16)


def other_shape(x: Tensor, active: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, new_key, new_value = good(x, active, key, value)
    return logits, new_key, new_value[:1]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (faulty("rank 5"), r"rank 5 above 4 at File .*test_graph_check\.py.*: .*x\.view\(1, 1, SLOTS, 2, 3\)"),
        (faulty("unknown operation"), r"erfinv is not known to compile, at .*test_graph_check\.py.*: .*erfinv\(x\)"),
        (faulty("data-dependent"), r"dynamic shape .* at File .*test_graph_check\.py.*: .*torch\.nonzero\(x\)"),
        (returned_as_it_came, r"state layers\.0\.value is returned as it came"),
        (returned_as_a_copy, r"state layers\.0\.value is not carried over"),
        (never_read, r"state layers\.0\.value is never read"),
        (not_carried_over, r"state layers\.0\.value is not carried over"),
        (exchanged, r"state layers\.0\.key is not carried over"),
        (not_contiguous, r"state layers\.0\.value is not returned contiguous"),
        (other_dtype, r"state layers\.0\.value is \(2, 6\) torch\.bfloat16, not \(2, 6\) torch\.float32"),
        (other_shape, r"state layers\.0\.value is \(1, 6\)"),
    ],
)
def test_a_planted_fault_is_named(step: Step, message: str) -> None:
    with pytest.raises(GraphError, match=f"^decode: .*{message}"):
        check(step)


def test_a_dynamic_dimension_is_named() -> None:
    def step(x: Tensor, active: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * 2, *good(key, active, key, value)[1:]

    program = exported(step, ({0: Dim("rows", min=2, max=8)}, None, [None, None]))
    with pytest.raises(GraphError, match="decode: dynamic shape"):
        check_graph(program, SPEC, STATE)


CONFIG = make_config("qwen3_5", num_hidden_layers=1, layer_types=("full_attention",))
DESCRIPTION = describe_state(CONFIG, SLOTS, 64, torch.float32)


LAYER = GraphSpec(DECODE, SLOTS, 1, layer_kind(CONFIG, 0))


def check_captured(spec: GraphSpec = LAYER) -> dict[str, int]:
    program = capture(spec, CONFIG, torch.float32, DESCRIPTION)
    return check_graph(program, spec, graph_state(spec, CONFIG, DESCRIPTION))


def test_the_models_own_graphs_pass() -> None:
    sizes = {spec.part: check_captured(spec) for spec in pass_specs(CONFIG, DECODE, SLOTS, 1)}
    assert list(sizes) == ["embed", "full_attention_dense", "logits"]
    assert 3 <= sizes["full_attention_dense"]["max_rank"] <= 4 and sizes["full_attention_dense"]["nodes"] > 50


@pytest.mark.parametrize("kind", [CONTEXT, DECODE])
def test_graphs_hold_nothing_that_nobody_reads(kind: str) -> None:
    """Exported programs run every operation that stands in them, also those whose result goes nowhere."""
    config = make_config("qwen3_5", num_hidden_layers=2, layer_types=("linear_attention", "full_attention"))
    description = describe_state(config, SLOTS, 64, torch.float32)
    for spec in pass_specs(config, kind, SLOTS, 1 if kind == DECODE else 64):
        program = capture(spec, config, torch.float32, description)
        calls = [
            node for node in program.graph.nodes if node.op == "call_function" and "assert" not in str(node.target)
        ]
        assert [node.name for node in calls if not node.users] == [], spec.name


def test_exchanged_keys_and_values_of_the_model_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run_layer = graphs_module.run_layer

    def exchanging(*args: object) -> tuple[Tensor, list[list[Tensor]]]:
        x, states = run_layer(*args)
        return x, [[value, key] for key, value in states]

    monkeypatch.setattr(graphs_module, "run_layer", exchanging)
    with pytest.raises(GraphError, match=r"state layers\.0\.key is not carried over"):
        check_captured()


def test_a_state_that_the_model_does_not_write_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "write_slots", lambda state, *_: state)
    with pytest.raises(GraphError, match=r"state layers\.0\.key is returned as it came"):
        check_captured()


def test_an_operation_of_the_model_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: nn.Module, x: Tensor, embedding: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(torch.eye(x.shape[0]), x, upper=False)

    monkeypatch.setattr(VocabParallelHead, "forward", forward)
    with pytest.raises(GraphError, match=r"head: operation \w*triangular is not .*test_graph_check\.py.*: .*solve"):
        check_captured(GraphSpec(HEAD, SLOTS, 1))


def test_names_of_graphs() -> None:
    specs = [GraphSpec(CONTEXT, 1, 128, "embed"), LAYER, GraphSpec(HEAD, 1, 128)]
    assert [spec.name for spec in specs] == ["context_128.embed", "decode.full_attention_dense", "head"]
