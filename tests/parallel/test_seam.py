"""The seam itself: collectives, the cut layers, and experts of other ranks.

`seam_checks` computes in 2 and 4 processes; what needs no collective is computed here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nxdi_qwen.modeling.ops.experts import experts_by_block, experts_by_token
from nxdi_qwen.modeling.parallel import VocabParallelEmbedding, all_gather, all_reduce
from nxdi_qwen.modeling.partition import SINGLE, Parallel
from tests.comparison import relative
from tests.parallel.launch import DEGREES, Results, results
from tests.parallel.seam_checks import normal

EXPERTS, INNER, HIDDEN, TOP_K = 8, 6, 10, 3
FORMS = [experts_by_token, experts_by_block]
EXACT = 1e-6


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results(tmp_path_factory)


def checked(computed: Results, degree: int, check: str) -> list[Any]:
    """What every rank found."""
    return [rank["seam", check] for rank in computed.ranks[degree]]


@pytest.mark.slow
@pytest.mark.parametrize("degree", DEGREES)
class TestCollectives:
    def test_captured_shapes_are_the_real_ones(self, degree: int, computed: Results) -> None:
        """Shape, strides, dtype and device."""
        for pairs in checked(computed, degree, "fake_and_real"):
            assert pairs
            for real, fake in pairs:
                assert real == fake

    def test_are_proper_custom_operations(self, degree: int, computed: Results) -> None:
        """`torch.library.opcheck` raised nothing in any process."""
        assert checked(computed, degree, "opcheck") == [None] * degree

    def test_sums(self, degree: int, computed: Results) -> None:
        for pairs in checked(computed, degree, "sums"):
            for number, (actual, expected) in enumerate(pairs):
                assert torch.allclose(actual, expected, rtol=2**-8 if number == 2 else 1e-6, atol=1e-2 * (number == 2))

    def test_gathers_in_order(self, degree: int, computed: Results) -> None:
        for pairs in checked(computed, degree, "gathered"):
            assert all(torch.equal(actual, expected) for actual, expected in pairs)

    def test_bfloat16_is_summed_in_float32(self, degree: int, computed: Results) -> None:
        exact = torch.tensor(256.0 + degree - 1).bfloat16()
        assert all((actual == exact).all() for actual in checked(computed, degree, "bfloat16_sum"))


@pytest.mark.slow
@pytest.mark.parametrize("degree", DEGREES)
class TestLayers:
    def test_embedding(self, degree: int, computed: Results) -> None:
        """Bit by bit, for the other ranks add zeros; also where their tables hold NaN."""
        for pairs in checked(computed, degree, "embedding"):
            assert len(pairs) == 1 + degree
            assert all(torch.equal(actual, expected) for actual, expected in pairs)

    @pytest.mark.parametrize("check", ["head", "linears"])
    def test_linear_layers(self, degree: int, check: str, computed: Results) -> None:
        for pairs in checked(computed, degree, check):
            assert len(pairs) == 2
            for actual, expected in pairs:
                assert actual.shape == expected.shape
                assert relative(actual, expected) < EXACT

    def test_sparse_layer(self, degree: int, computed: Results) -> None:
        """At every expert degree and in both forms; a shared expert that every rank adds shows."""
        for pairs in checked(computed, degree, "sparse_layer"):
            assert len(pairs) == 3 * (2 if degree == 2 else 3)
            for name, (actual, expected) in pairs.items():
                if name.startswith("counted twice"):
                    assert relative(actual, expected) > 0.1, name
                else:
                    assert relative(actual, expected) < EXACT, name


def weights_of() -> list[Tensor]:
    shapes = (EXPERTS, INNER, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    return [normal(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def routing(tokens: int) -> tuple[Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(n)) for n in range(tokens)])
    return chosen[:, :TOP_K], normal(tokens, TOP_K, seed=9).abs()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 7, 65])
def test_expert_groups_add_up(form: Any, groups: int, tokens: int) -> None:
    """To what a loop over the tokens gives."""
    x, (chosen, weights) = normal(tokens, HIDDEN, seed=5), routing(tokens)
    expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    gate, up, down = (tensor.double() for tensor in weights_of())
    for token, entry in ((token, entry) for token in range(tokens) for entry in range(TOP_K)):
        expert, row = chosen[token, entry], x[token].double()
        inner = torch.nn.functional.silu(gate[expert] @ row) * (up[expert] @ row)
        expected[token] += weights[token, entry] * (down[expert] @ inner)
    held = EXPERTS // groups
    shares = [
        form(x, *(tensor[group * held :][:held] for tensor in weights_of()), chosen - group * held, weights)
        for group in range(groups)
    ]
    assert relative(sum(shares), expected) < EXACT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offset", [-4, 4, 100])
@pytest.mark.parametrize("tokens", [1, 7, 65])
def test_experts_of_other_ranks_add_nothing(form: Any, offset: int, tokens: int) -> None:
    """All tokens went to another rank: zeros, whatever this rank's own weights would give."""
    x, (chosen, weights) = normal(tokens, HIDDEN, seed=5), routing(tokens)
    own = [torch.full_like(tensor[:4], torch.inf) for tensor in weights_of()]
    out = form(x, *own, chosen % 4 + offset, weights)
    assert out.shape == x.shape
    assert not out.any()


@pytest.mark.parametrize("form", FORMS)
def test_rows_with_a_foreign_expert_keep_their_own(form: Any) -> None:
    """One of the three is here, in any place of the row: the same as if it were alone."""
    x, weights = normal(6, HIDDEN, seed=5), routing(6)[1]
    own = [tensor[:4] for tensor in weights_of()]
    chosen = torch.tensor([[0, 7, -1], [4, 1, -4], [9, 5, 2], [3, -2, 8], [4, 0, 5], [-1, 4, 1]])
    here = (chosen >= 0) & (chosen < 4)
    alone = form(x, *own, chosen[here][:, None], weights[here][:, None])
    assert relative(form(x, *own, chosen, weights), alone) < EXACT


def test_degree_1_needs_no_process_group() -> None:
    assert not torch.distributed.is_initialized()
    x = normal(3, 4)
    assert all_reduce(x, SINGLE) is x
    assert all_gather(x, SINGLE) is x


def test_an_embedding_reads_no_row_beyond_its_own() -> None:
    """Ids of other ranks, below and above, are looked up as own ids and then dropped, never out of range."""
    layer = VocabParallelEmbedding(12, 4, Parallel(4, 2), torch.float32)
    layer.weight.data.fill_(torch.nan)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nxdi_qwen.modeling.parallel.all_reduce", lambda x, parallel: seen.append(x) or x)
        layer(torch.tensor([0, 5, 9, 11]), torch.tensor([2]))
    assert not seen[0].any()
