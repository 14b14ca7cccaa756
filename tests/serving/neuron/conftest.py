"""Jobs for `engine`. Without what `tests.serving.references` writes, the tests that need it are skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.serving import stored

ROOT = Path(__file__).parents[3]
SLOTS = 4
# One process, and NxDI's CPU mode.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "NXD_CPU_MODE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
# In CPU mode there are no buckets and no kernels, and the sampler is vLLM's own.
OPTIONS: dict[str, Any] = {
    "on_cpu": True,
    "enable_bucketing": False,
    "attn_kernel_enabled": False,
    "on_device_sampling_config": None,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (stored.FOLDER / "models").is_dir():
        return
    reason = "build/serving is not made: make test-vllm-neuron makes it"
    for item in items:
        if item.get_closest_marker("vllm_neuron") and "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason=reason))


class Run(NamedTuple):
    """`results` as `engine` prints them, None where it failed; `log`: all that it wrote."""

    results: Any
    log: str

    @property
    def failure(self) -> str:
        """The log of an engine that did not start."""
        assert self.results is None, "the engine started"
        return self.log


@pytest.fixture
def engine(tmp_path: Path) -> Callable[..., Run]:
    """`engine(NAME, COMPLETIONS, ...)` asks a checkpoint's model for stored completions, all at once."""

    def run(
        name: str,
        completions: list[stored.Greedy],
        *,
        options: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> Run:
        requests = [
            {"prompt": each.prompt, "max_tokens": len(each.tokens), "temperature": 0.0, "ignore_eos": True}
            for each in completions
        ]
        asked = {
            "model": str(stored.checkpoint(name)),
            "dtype": "float32",
            "max_num_seqs": SLOTS,
            "max_model_len": stored.MAX_LENGTH,
            "additional_config": {"override_neuron_config": OPTIONS | (options or {})},
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.serving.neuron.engine"],
            input=json.dumps({"engine": asked | arguments, "requests": requests}),
            env=os.environ | ENVIRONMENT | {"NEURON_COMPILED_ARTIFACTS": str(tmp_path)} | (environment or {}),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            return Run(None, done.stdout)
        return Run(json.loads(done.stdout.splitlines()[-1]), done.stdout)

    return run
