"""vLLM without a server: slots filled with NaN, every architecture, and a model of another kind, served as ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.serving import offline, stored
from tests.serving.rounds import SMALL_POOL
from tests.serving.server import ENVIRONMENT
from tests.serving.stored import FAMILIES, LLAMA, TEXT_FORMS, Greedy, references

pytestmark = pytest.mark.vllm

IN_PROCESS = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def run(
    engine: dict[str, Any],
    completions: list[Greedy],
    *,
    python: list[str] | None = None,
    environment: dict[str, str] | None = None,
    sampling: dict[str, Any] | None = None,
    **job: Any,
) -> dict[str, Any]:
    """Results of `offline`, and what it said as `said`."""
    asked = [completion.request(**(sampling or {})) for completion in completions]
    kept = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
    ran = subprocess.run(
        [*(python or [sys.executable]), str(Path(offline.__file__))],
        input=json.dumps({"engine": engine, "requests": asked, **job}),
        env=kept | IN_PROCESS | (environment or {}),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=stored.FOLDER,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1]) | {"said": ran.stdout + ran.stderr}


def run_artifact(name: str, completions: list[Greedy], engine: dict[str, Any], **job: Any) -> dict[str, Any]:
    """`run` on an artifact, as its users are told to; all answers compared with Hugging Face's."""
    from nxdi_qwen.serving.launch import engine_arguments

    arguments = engine_arguments(stored.artifact(name)) | engine
    results = run(arguments, completions, environment={"VLLM_PLUGINS": "nxdi_qwen"}, **job)
    assert results["platform"].startswith("nxdi_qwen.serving.")
    for completion, answer in zip(completions, results["answers"], strict=True):
        completion.check(answer["tokens"], answer["finish_reason"])
    return results


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_of_a_slots_past_reaches_a_request(name: str) -> None:
    """Also where requests are preempted, and each slot is used many times."""
    completions = references(name).completions
    blocks = int(SMALL_POOL[1])
    results = run_artifact(name, completions * 2, {"num_gpu_blocks_override": blocks}, poison=True)
    assert results["preemptions"] > 0
    assert results["poisoned"] >= 2 * len(completions) - stored.SLOTS  # the last ones leave after the last step


@pytest.mark.parametrize("name", TEXT_FORMS)
def test_text_forms_and_prefix_caching_asked_for(name: str) -> None:
    """Asking for prefix caching starts, says that it is off, and why, and gives the right answers; also the second
    time, when a cache would have the prompts."""
    results = run_artifact(name, references(name).completions * 2, {"enable_prefix_caching": True})
    assert results["architecture"].endswith("ForCausalLM")
    assert not results["prefix_caching"]
    assert "Prefix caching is turned off" in results["said"] and "recurrent state" in results["said"]


@pytest.fixture(scope="module")
def without_the_package(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A Python command that has everything of this environment but the package."""
    folder = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "nxdi" not in entry.name.lower():
            (folder / entry.name).symlink_to(entry)
    # No site module, hence no path files: they are how an editable package is found.
    code = f"import sys, runpy; sys.path.append({str(folder)!r}); runpy.run_path(sys.argv[1], run_name='__main__')"
    return [sys.executable, "-S", "-c", code]


def test_another_model_is_served_as_without_the_package(without_the_package: list[str]) -> None:
    engine = {
        "model": str(stored.checkpoint(LLAMA)),
        "dtype": "float32",
        "max_model_len": stored.MAX_LENGTH,
        "max_num_seqs": stored.SLOTS,
        "enforce_eager": True,
    }
    completions = references(LLAMA).completions
    sampling = {"logprobs": 5}
    installed = run(engine, completions, sampling=sampling)
    absent = run(engine, completions, sampling=sampling, python=without_the_package)
    assert (installed.pop("installed"), installed.pop("importable")) == (True, True)
    assert (absent.pop("installed"), absent.pop("importable")) == (False, False)
    del installed["said"], absent["said"]
    assert installed == absent
    assert all(answer["logprobs"] for answer in installed["answers"])
    for completion, answer in zip(completions, installed["answers"], strict=True):
        completion.check(answer["tokens"], answer["finish_reason"])
