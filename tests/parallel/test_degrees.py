"""Degrees 2 and 4 over gloo agree with Hugging Face and with degree 1, for every way through the model.

`launch.SPECS` says what each case is there for: heads above the degree, zero-filled ranks, expert parallel.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.partition import Parallel, query_heads, value_heads
from tests.comparison import relative
from tests.parallel.faults import FAULTS, Case
from tests.parallel.launch import CASES, DEGREES, EXPORTED, SPECS, Results, finish, results, started
from tests.parallel.worker import DECODE_STEPS, ROW_LENGTHS, Report
from tests.support import TOLERANCE, assert_close

pytestmark = pytest.mark.slow
ALL_CASES = [(degree, case) for degree in DEGREES for case in CASES[degree]]


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results(tmp_path_factory)


def assert_agrees(reports: list[Report], name: str, computed: Results) -> None:
    """With Hugging Face's logits, on rank 0; all other ranks have the very same bits."""
    assert reports[0].pieces
    for piece in reports[0].pieces:
        expected = computed.expected[name][piece.prompt, piece.begin : piece.begin + len(piece.logits)]
        assert_close(piece.logits, expected, f"{piece.what}, prompt {piece.prompt}, token {piece.begin}")
    assert all(report.kept for report in reports), "a slot without part in a call changed"
    assert len({report.digest for report in reports}) == 1, "the ranks have different logits"


def describe(value: object) -> str:
    return f"{value.name}-{value.expert_degree}" if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("degree", "case"), ALL_CASES, ids=describe)
def test_agrees_with_hugging_face_and_with_degree_1(degree: int, case: Case, computed: Results) -> None:
    task = ("parity", case)
    reports = [rank[task] for rank in computed.ranks[degree]]
    assert_agrees(reports, case.name, computed)
    alone = computed.single["parity", Case(case.name)]
    for piece, expected in zip(reports[0].pieces, alone.pieces, strict=True):
        assert piece[:3] == expected[:3]
        assert_close(piece.logits, expected.logits, f"degree 1: {piece.what}")


@pytest.mark.parametrize("name", SPECS)
def test_degree_1_agrees_with_hugging_face(name: str, computed: Results) -> None:
    """What the degrees are compared with, so that two equal mistakes cannot hide."""
    assert_agrees([computed.single["parity", Case(name)]], name, computed)


def test_every_situation_ran(computed: Results) -> None:
    pieces = computed.ranks[4][0]["parity", Case("qwen3_next")].pieces
    assert {len(piece.logits) for piece in pieces if piece.what.startswith("row")} == {1, *ROW_LENGTHS}
    steps = [piece.begin for piece in pieces if piece.what == "decode after ragged right" and piece.prompt == 3]
    assert steps == list(range(130, 130 + DECODE_STEPS))
    assert {"verify", "verify again", "decode after verify", "pieces", "ragged left"} <= {p.what for p in pieces}


def test_the_cases_hold_what_they_are_for(computed: Results) -> None:
    configs = {name: load_config(computed.folder / name).config for name in computed.expected}

    def filled(name: str, degree: int) -> tuple[int, int]:
        """Zero-filled value heads and query heads, over all ranks."""
        config = configs[name]
        cuts = value_heads(config, 0, 1), query_heads(config, 0, 1)
        return tuple(cut.part(Parallel(degree)).size * degree - cut.size for cut in cuts)

    assert filled("qwen3_5", 4) == (2, 2)
    assert filled("qwen3_next_mixed", 4) == (2, 0)
    assert filled("one_group", 2) == (1, 1)
    assert filled("one_group", 4) == (1, 1)
    assert all(
        min(config.num_key_value_heads, config.linear_num_key_heads) < 4 or name == "four_groups"
        for name, config in configs.items()
    )
    assert {config.family for config in configs.values()} == {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
    assert {config.linear_conv_kernel_dim for config in configs.values()} == {3, 4, 5}
    assert any(config.tie_word_embeddings for config in configs.values())
    assert any(config.attention_bias for config in configs.values())


def test_exported_programs_at_degree_2(computed: Results) -> None:
    """Their logits; and that both ranks captured the same graph, without a constant of its own."""
    reports, code, constants = zip(*(rank["exported", EXPORTED] for rank in computed.ranks[2]), strict=True)
    assert_agrees(list(reports), EXPORTED.name, computed)
    assert code[0] == code[1]
    for name, text in code[0].items():
        assert ("all_gather" if name.endswith(("head", "logits")) else "all_reduce") in text, name
    for name, own in constants[0].items():
        other = constants[1][name]
        assert own.keys() == other.keys()
        assert all(torch.equal(tensor, other[constant]) for constant, tensor in own.items())


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_shows(name: str, computed: Results) -> None:
    fault = FAULTS[name]
    pieces = computed.ranks[fault.degree][0]["faulty", name].pieces
    worst = max(
        relative(piece.logits, computed.expected[fault.case.name][piece.prompt, piece.begin :][: len(piece.logits)])
        for piece in pieces
    )
    assert worst > 1000 * TOLERANCE


def test_a_hang_ends_with_all_its_processes() -> None:
    parent = """
import os, subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
os.wait()
"""
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="no end after 1 s") as raised, started(parent) as process:
        finish(process, 1)
    assert time.monotonic() - begin < 20
    child = int(str(raised.value).split()[-1])
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() - begin < 20, "the child still runs"


def test_a_failure_is_told() -> None:
    with (
        pytest.raises(RuntimeError, match=r"status 1\nthis went wrong"),
        started("raise SystemExit('this went wrong')") as process,
    ):
        finish(process, 60)
