"""The rewritten linear layers compute what torch's own do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn import functional

from nxdi_qwen.compile.cpu import aot_compile
from nxdi_qwen.compile.cpu_linears import read_weights_in_place
from tests.comparison import relative

HIDDEN = 1024
WEIGHT = torch.zeros(HIDDEN, HIDDEN, dtype=torch.bfloat16)


class _Linear(nn.Module):
    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias) + 1


def rewritten(*inputs: Tensor) -> tuple[Tensor, bool]:
    """The result, and whether the linear layer is still there."""
    program = torch.export.export(_Linear(), inputs, strict=False)
    read_weights_in_place(program)
    linear = program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    return program.module()(*inputs), bool(linear)


@pytest.mark.parametrize(
    ("shape", "kept"),
    [((1, 1), False), ((8, 1), False), ((2, 16), False), ((1, 33), False), ((2, 64), False), ((1, 129), True)],
)
def test_rows(shape: tuple[int, int], kept: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, HIDDEN, generator=generator).to(torch.bfloat16) for size in (shape, (HIDDEN + 64,)))
    result, linear = rewritten(x, weight)
    assert linear == kept
    exact = functional.linear(x.double(), weight.double()) + 1
    assert result.shape == exact.shape and result.dtype == torch.bfloat16
    # Two roundings to bfloat16, of the product and of the sum.
    assert relative(result, exact) < 2**-8


@pytest.mark.parametrize("repacks", [False, True])
def test_only_where_weights_are_repacked(repacks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = torch.export.export(_Linear(), (torch.zeros(1, 1, HIDDEN).bfloat16(), WEIGHT), strict=False)
    kept = []

    def compile_and_package(program: ExportedProgram, **_: object) -> None:
        kept.extend(program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default))

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_and_package)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: repacks)
    aot_compile(program, tmp_path / "package.pt2")
    assert bool(kept) != repacks


@pytest.mark.parametrize("case", ["float32", "bias", "small"])
def test_left_alone(case: str) -> None:
    dtype = torch.float32 if case == "float32" else torch.bfloat16
    weight = torch.zeros(HIDDEN // 2 if case == "small" else HIDDEN, HIDDEN, dtype=dtype)
    inputs = [torch.zeros(1, HIDDEN, dtype=dtype), weight]
    if case == "bias":
        inputs.append(torch.zeros(HIDDEN, dtype=dtype))
    assert rewritten(*inputs)[1]
