"""Settings for every test, and the optional parts: skipped with a reason where they cannot run and listed then."""

from __future__ import annotations

import importlib.util
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: no test may reach the network

import pytest
import torch

torch.set_num_threads(1)  # the shapes are tiny; parallel test processes use the other cores


@pytest.hookimpl(tryfirst=True)  # before the test processes are started, and before torch or vLLM choose a folder
def pytest_sessionstart(session: pytest.Session) -> None:
    """All temporary files stand in pytest's own folder and go with it, also those of killed processes and the caches of
    torch's compiler, which the test processes share.
    """
    base = session.config._tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "temporary"
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _missing_module(name: str) -> str | None:
    return None if importlib.util.find_spec(name) else f"{name} is not installed"


def unavailable_parts() -> dict[str, str]:
    """Marker of each optional part that cannot run here, with the reason."""
    reasons = {
        "nxdi": _missing_module("neuronx_distributed_inference"),
        "vllm": _missing_module("vllm"),
        "vllm_neuron": _missing_module("vllm_neuron"),
        "gpu": None if torch.cuda.is_available() else "torch sees no CUDA device",
    }
    return {part: reason for part, reason in reasons.items() if reason}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unavailable = unavailable_parts()
    for item in items:
        for part, reason in unavailable.items():
            if item.get_closest_marker(part):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.section("optional parts not run here")
    for part, reason in unavailable_parts().items():
        count = sum(part in getattr(report, "keywords", ()) for report in skipped)
        terminalreporter.write_line(f"{part}: {reason} ({count} tests skipped)")
