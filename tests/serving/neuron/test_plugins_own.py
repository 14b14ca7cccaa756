"""The plugin's own tests of its platform and its runner, with this package loaded by vLLM before them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.neuron.conftest import ROOT

pytestmark = pytest.mark.vllm_neuron
FILES = ("test/unit/test_platform.py", "test/unit/worker/test_model_runner.py")


def test_they_pass() -> None:
    found = importlib.util.find_spec("vllm_neuron")
    assert found is not None and found.origin is not None
    checkout = Path(found.origin).parents[1]
    if not (checkout / "test" / "unit").is_dir():
        pytest.skip(f"{checkout} is no checkout of the plugin: install it with pip install --no-deps -e CHECKOUT")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.serving.neuron.active"]
    done = subprocess.run(
        [*command, "-o", "addopts=", *FILES],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) == 289 and "skipped" not in done.stdout, done.stdout[-1000:]
