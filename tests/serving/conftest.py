"""Servers, each started once in a test process. Without vLLM, or without what `tests.serving.references` and
`tests.serving.artifacts` write, all tests here are collected and skipped with their reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import stored
from tests.serving.server import Server, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if all((stored.FOLDER / kind).is_dir() for kind in ("models", "artifacts")):
        return
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason="build/serving is not made: make test-vllm makes it"))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """`served(NAME, OPTION, ...)`: the server of an artifact, the same one for the same options."""
    running: dict[Any, Server] = {}
    with contextlib.ExitStack() as stack:

        def start(name: str, *options: object) -> Server:
            if (name, *options) not in running:
                log = tmp_path_factory.mktemp("server") / f"{name}.log"
                running[name, *options] = stack.enter_context(serving(stored.artifact(name), log, options))
            return running[name, *options]

        yield start


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Where a server that a test starts itself may write what it says."""
    return tmp_path / "server.log"
