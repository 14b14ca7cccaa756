"""This package's own platform serves an NxDI application: real vLLM 0.16 and NxDI, on the CPU, without the plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.serving import stored
from tests.serving.neuron.conftest import ENVIRONMENT, ROOT, SLOTS

pytestmark = [
    pytest.mark.vllm_neuron,
    pytest.mark.skipif(not (stored.FOLDER / "models").is_dir(), reason="build/serving is not made"),
]


@pytest.mark.parametrize("name", stored.FAMILIES)
def test_ragged_requests(name: str) -> None:
    completions = stored.references(name).completions[:16]
    requests = [
        {"prompt": each.prompt, "max_tokens": len(each.tokens), "temperature": 0.0, "ignore_eos": True}
        for each in completions
    ]
    job = {
        "model": str(stored.checkpoint(name)),
        "slots": SLOTS,
        "max_length": stored.MAX_LENGTH,
        "requests": requests,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving.neuron.own_platform"],
        input=json.dumps(job),
        env=os.environ | ENVIRONMENT | {"VLLM_PLUGINS": "nxdi_qwen"},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["platform"] == "nxdi_qwen.serving.platform"
    for completion, tokens in zip(completions, results["tokens"], strict=True):
        completion.check(tokens)
    assert results["refused"] == "prompt_logprobs cannot be had from an artifact for Neuron: leave it out"
