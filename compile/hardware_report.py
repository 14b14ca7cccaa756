"""The report on an artifact on the device it was loaded to: parity, speed, memory, as JSON that can be compared.

A section that fails is part of the report: whoever runs this has hardware that we have not.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from nxdi_qwen.compile import hardware_parity
from nxdi_qwen.compile.hardware_facts import device_memory, host_rss_bytes, machine, versions
from nxdi_qwen.compile.neuron_artifact import NeuronArtifact, chosen_bucket
from nxdi_qwen.compile.neuron_requests import Requests
from nxdi_qwen.compile.source import ModelSource, Progress

FORMAT = "nxdi-qwen hardware report"
FORMAT_VERSION = 1
ON_NEURON = "neuron"
ON_CPU = "cpu (NxDI CPU mode)"
SPEED_DEFINITION = (
    "Host wall time (time.perf_counter) around calls of the application's forward, in milliseconds, NxDI's own padding "
    "and copies included, tokenization not. ttft: prefill of one prompt of random ids, alone, until its first token is "
    "on the host (the argmax of its logits there, where the graph returns logits). tpot: one decode call for `rows` "
    "requests, each fed its own last token, until their next tokens are on the host; a sample is the mean of "
    "`new_tokens` successive steps that begin behind the prompt. A decode graph always computes all slots. Each is "
    "measured once for warming up, not counted, then in `repeat` rounds, a sample each. Tokens per second: "
    "prompt_tokens / median ttft, and rows / median tpot."
)


@dataclass(frozen=True)
class Choices:
    """What to measure: `parity_prompts` by name, `tolerance` in largest logits; see SPEED_DEFINITION for the rest."""

    parity_prompts: Mapping[str, Sequence[int]]
    tolerance: float
    prompt_lengths: Sequence[int]
    new_tokens: int
    repeat: int


def device_of(application: Any) -> str:
    """Where a loaded NxDI application runs: each of its submodels knows."""
    on_neuron = [model.is_neuron() for model in application.models]
    return ON_NEURON if all(on_neuron) else ON_CPU


def make_report(
    load: Callable[[], Any],
    artifact: NeuronArtifact,
    source: ModelSource,
    choices: Choices,
    progress: Progress,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Loads the application and measures it. `save` gets the report after every section, should the next end the
    process. An exception ends its section, and is an entry of `failures`; without an application, the rest is null.
    """
    report: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "complete": False,
        "device": None,
        "artifact": _describe(artifact, source),
        "versions": versions(),
        "machine": machine(),
        "load_seconds": None,
        "parity": None,
        "speed": None,
        "memory": None,
        "failures": [],
    }
    loaded: list[Any] = []

    def section(name: str, measure: Callable[[], Any]) -> None:
        try:
            report[name] = measure()
        except Exception as error:
            failure = {"section": name, "error": f"{type(error).__name__}: {error}"}
            report["failures"].append(failure | {"traceback": traceback.format_exc().splitlines()})
        save(report)

    def load_seconds() -> float:
        begin = time.perf_counter()
        loaded.append(load())
        seconds = time.perf_counter() - begin
        report["device"] = device_of(loaded[0])
        return seconds

    save(report)
    section("load_seconds", load_seconds)
    if loaded:
        requests = Requests(loaded[0])
        section("parity", lambda: _parity(requests, artifact, source, choices, progress))
        section("speed", lambda: _speed(requests, artifact, choices, progress))
    section("memory", lambda: _memory(artifact))
    report["complete"] = not report["failures"]
    save(report)
    return report


def _describe(artifact: NeuronArtifact, source: ModelSource) -> dict[str, Any]:
    return {
        "name": artifact.folder.resolve().name,
        "neuron_config_sha256": artifact.config_sha256,
        "checkpoint": source.name,
        "family": artifact.model.family,
        "layers": artifact.model.num_hidden_layers,
        "hidden_size": artifact.model.hidden_size,
        "experts": artifact.model.num_experts,
        "dtype": artifact.dtype,
        "degree": artifact.degree,
        "logical_cores": artifact.logical_cores,
        "slots": artifact.slots,
        "max_length": artifact.max_length,
        "context_buckets": list(artifact.context_buckets),
        "decode_buckets": list(artifact.decode_buckets),
        "continuation_buckets": list(artifact.continuation_buckets),
        "on_device_sampling": artifact.samples,
    }


def _parity(
    requests: Requests, artifact: NeuronArtifact, source: ModelSource, choices: Choices, progress: Progress
) -> dict[str, Any]:
    prompts, skipped = hardware_parity.fitting(artifact, choices.parity_prompts)
    room = hardware_parity.check_host_memory(source)
    if not prompts or room["value"] is None:
        reason = room.get("reason") or "no prompt fits the artifact"
        return {"passed": None, "not_run": reason, "skipped": skipped}
    expected = hardware_parity.reference(source, prompts, progress)
    results = hardware_parity.compare(requests, artifact, prompts, expected, progress)
    return hardware_parity.summary(results, artifact, skipped, choices.tolerance)


def _speed(requests: Requests, artifact: NeuronArtifact, choices: Choices, progress: Progress) -> dict[str, Any]:
    plan = [(length, rows) for length in choices.prompt_lengths for rows in sorted({1, artifact.slots})]
    ttft, tpot = [], []
    for done, (length, rows) in enumerate(plan):
        progress("speed", done, len(plan))
        rounds = [_round(requests, artifact, length, rows, choices.new_tokens) for _ in range(1 + choices.repeat)][1:]
        if rows == 1:
            ttft.append(_ttft(artifact, length, [first for first, _ in rounds]))
        tpot.append(_tpot(artifact, length, rows, choices.new_tokens, [step for _, step in rounds]))
    progress("speed", len(plan), len(plan))
    return {
        "definition": SPEED_DEFINITION,
        "new_tokens": choices.new_tokens,
        "repeat": choices.repeat,
        "ttft": ttft,
        "tpot": tpot,
    }


def _round(
    requests: Requests, artifact: NeuronArtifact, length: int, rows: int, new_tokens: int
) -> tuple[float, float]:
    """Milliseconds until the first token of the first request, and a decode step of all `rows`."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, artifact.model.vocab_size, (rows, length), generator=generator).tolist()
    begin = time.perf_counter()
    tokens = {0: requests.prefill(0, prompts[0]).tokens[0]}
    first = time.perf_counter() - begin
    for slot in range(1, rows):
        tokens[slot] = requests.prefill(slot, prompts[slot]).tokens[0]
    begin = time.perf_counter()
    for _ in range(new_tokens):
        tokens = dict(zip(tokens, requests.decode(tokens).tokens, strict=True))
    steps = time.perf_counter() - begin
    return 1e3 * first, 1e3 * steps / new_tokens


def _ttft(artifact: NeuronArtifact, length: int, samples: list[float]) -> dict[str, Any]:
    return {
        "prompt_tokens": length,
        "buckets": artifact.buckets_of_prompt(length),
        **_spread(samples),
        "tokens_per_second": 1e3 * length / statistics.median(samples),
    }


def _tpot(artifact: NeuronArtifact, length: int, rows: int, new_tokens: int, samples: list[float]) -> dict[str, Any]:
    reached = range(length + 1, length + new_tokens + 1)
    return {
        "prompt_tokens": length,
        "rows": rows,
        "buckets": sorted({chosen_bucket(tokens, artifact.decode_buckets) for tokens in reached}),
        **_spread(samples),
        "tokens_per_second": 1e3 * rows / statistics.median(samples),
    }


def _spread(samples: list[float]) -> dict[str, Any]:
    return {
        "median_ms": statistics.median(samples),
        "min_ms": min(samples),
        "max_ms": max(samples),
        "samples_ms": samples,
    }


def _memory(artifact: NeuronArtifact) -> dict[str, Any]:
    state = artifact.state
    return {
        "weight_bytes": {file.name: file.stat().st_size for file in artifact.weights},
        "state_bytes_per_slot_and_rank": state.bytes_per_slot,
        "state_bytes_per_rank": state.bytes_per_slot * state.slots,
        "host_rss_bytes": host_rss_bytes(),
        "device_memory": device_memory(),
    }
