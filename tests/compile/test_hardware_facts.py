"""Facts about a machine: what cannot be known is null with its reason, and nobody is named."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from nxdi_qwen.compile import hardware_facts


def test_what_is_not_known_is_null_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_facts, "DISTRIBUTIONS", ("torch", "not-there"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(hardware_facts, "_NEURON_TOOLS", "")
    versions, machine = hardware_facts.versions(), hardware_facts.machine()
    assert versions["torch"] == {"value": version("torch")}
    assert versions["not-there"] == {"value": None, "reason": "not-there is not installed"}
    assert versions["neuron driver"] == {"value": None, "reason": "modinfo is not installed"}
    assert machine["neuron_ls"] == {"value": None, "reason": "neuron-ls is not installed"}
    assert machine["kernel"]["value"] and machine["host_memory_bytes"]["value"] > 1e8


def test_device_memory_as_the_driver_counts_it(tmp_path: Path) -> None:
    for core, (used, peak) in {"neuron0/neuron_core0": (0, 5), "neuron1/neuron_core3": (70, 90)}.items():
        folder = tmp_path / core / "stats" / "memory_usage" / "device_mem"
        folder.mkdir(parents=True)
        (folder / "total").write_text(f"{used}\n")
        (folder / "peak").write_text(f"{peak}\n")
    expected = [{"core": "neuron1/neuron_core3", "bytes": 70, "peak_bytes": 90}]
    assert hardware_facts.device_memory(tmp_path) == {"value": expected}
    assert hardware_facts.device_memory(tmp_path / "none")["value"] is None


def test_neuron_ls_names_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "neuron-ls"
    device = {"neuron_device": 0, "nc_count": 8, "neuron_processes": [{"pid": 7, "command": "python /home/me/x.py"}]}
    program.write_text(f"#!/bin/sh\necho '{json.dumps([device])}'\n")
    program.chmod(0o755)
    monkeypatch.setattr(hardware_facts, "_NEURON_TOOLS", str(tmp_path))
    found = hardware_facts.machine()["neuron_ls"]
    assert found == {"value": [{"neuron_device": 0, "nc_count": 8, "neuron_processes": [{"pid": 7}]}]}
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(hardware_facts, "_SECONDS", 0.1)
    assert "timed out" in hardware_facts.machine()["neuron_ls"]["reason"]
    program.write_text("#!/bin/sh\necho no driver >&2; exit 3\n")
    assert "status 3: no driver" in hardware_facts.machine()["neuron_ls"]["reason"]
