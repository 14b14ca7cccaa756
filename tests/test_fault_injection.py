"""The faults of `make faults` still apply and still show in the logits; whether tests notice them is for the script."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.fault_injection import ROOT, TOLERANCE, VISIBLE, copy_package, imported_from, measure
from tests.fault_situations import alone
from tests.faults import FAULTS, Edit, Fault


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_package(tmp_path_factory.mktemp("copy") / "unbroken")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_shows_in_the_logits(fault: Fault, unbroken: Path, tmp_path: Path) -> None:
    broken = copy_package(tmp_path / "broken", fault)
    assert measure(unbroken, fault.fixture, fault.situation) <= TOLERANCE
    assert measure(broken, fault.fixture, fault.situation) >= VISIBLE


def test_names_differ() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_the_named_tests_exist() -> None:
    for node_id in sorted({test for fault in FAULTS for test in fault.tests}):
        file, function = node_id.split("[")[0].split("::")
        assert f"def {function}(" in (ROOT / file).read_text(), node_id


def test_an_edit_that_does_not_apply_is_named(tmp_path: Path) -> None:
    fault = Fault("stale", "", (Edit("modeling/model.py", "no such text", ""),), "qwen3_5", alone, ())
    with pytest.raises(ValueError, match=r"stale: modeling/model.py holds 0 times 'no such text', not once"):
        copy_package(tmp_path / "copy", fault)


def test_the_installed_package_comes_back(unbroken: Path) -> None:
    installed = importlib.import_module("nxdi_qwen.modeling.model")
    with imported_from(unbroken):
        assert importlib.import_module("nxdi_qwen.modeling.model") is not installed
    assert importlib.import_module("nxdi_qwen.modeling.model") is installed
