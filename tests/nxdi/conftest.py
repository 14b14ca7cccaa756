"""XLA's settings, checkpoints of the fixtures, and applications in NxDI's CPU mode. NxDI is imported only where a test
runs: without it, all tests here are collected and skipped with their reason."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nxdi.calls import MAX_LENGTH
from tests.nxdi.references import write_checkpoint

# For XLA's CPU backend, before anything starts it: graphs run once or twice, so compiling must be fast, and 16-bit
# results are rounded where the graph says so.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_allow_excess_precision=false")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a fixture's checkpoint."""
    return functools.cache(lambda name: write_checkpoint(name, tmp_path_factory.mktemp("checkpoints") / name))


@pytest.fixture(scope="session")
def _made() -> dict[Any, Any]:
    return {}


@pytest.fixture
def cpu_app(checkpoint: Callable[[str], Path], _made: dict[Any, Any]) -> Iterator[Callable[..., Any]]:
    """Makes an application in NxDI's CPU mode, or takes the one made before for these options.

    Its state is that which the last test left, so that no test can rely on zeros.
    """
    from nxdi_qwen.parity.targets.nxdi_application import cpu_application, single_rank

    def app(name: str, **options: Any) -> Any:
        key = name, *sorted(options.items())
        if key not in _made:
            _made[key] = cpu_application(checkpoint(name), seq_len=MAX_LENGTH, **options)
        return _made[key]

    with single_rank():
        yield app
