"""For pytest, which finds it by itself: the fixture `assert_parity`, and one line a comparison at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nxdi_qwen.parity.result import Comparison

_PROPERTY = "parity"


@pytest.fixture
def assert_parity(record_property: Callable[[str, object], None]) -> Callable[..., Comparison]:
    """`nxdi_qwen.parity.assert_parity`, whose outcome also stands in the summary and in JUnit reports::

    def test_port(assert_parity):
        assert_parity("checkpoints/tiny", target="artifact:build/tiny", tolerance=1e-5)
    """
    from nxdi_qwen.parity.check import assert_parity as check

    def checked(model: Any, target: str = "eager", **options: Any) -> Comparison:
        try:
            outcome = check(model, target, **options)
        except AssertionError as error:
            record_property(_PROPERTY, f"{target}: {str(error).splitlines()[1]}")
            raise
        worst = max(value for result in outcome.prompts for value in result.positions_rel if value is not None)
        record_property(_PROPERTY, f"{target}: passed {len(outcome.prompts)} prompts, max_rel {worst:.1e}")
        return outcome

    return checked


def pytest_terminal_summary(terminalreporter: Any) -> None:
    lines = [
        f"{report.nodeid}: {value}"
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for name, value in getattr(report, "user_properties", [])
        if name == _PROPERTY
    ]
    if lines:
        terminalreporter.section("parity")
        for line in lines:
            terminalreporter.write_line(line)
