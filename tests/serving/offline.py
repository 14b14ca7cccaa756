"""vLLM within one process: `python offline.py < JOB` reads a job and prints its results as the last line, both JSON.

Imports nothing of this project, so that it also runs where the package is not installed. A job: `engine`, keyword
arguments of `vllm.LLM`; `requests`, each with its `prompt` and the arguments of `SamplingParams`; `poison`, whether
every slot is filled with NaN now, when a request leaves it, and when one is about to be encoded into it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

PACKAGE = "nxdi-qwen"


def main() -> None:
    job = json.load(sys.stdin)
    from vllm import LLM, ModelRegistry, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(**job["engine"], disable_log_stats=False)
    poisoned = poison(llm) if job.get("poison") else []
    prompts = [{"prompt_token_ids": request.pop("prompt")} for request in job["requests"]]
    outputs = llm.generate(prompts, [SamplingParams(**request) for request in job["requests"]], use_tqdm=False)
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    config = llm.llm_engine.vllm_config
    results = {
        "installed": PACKAGE in {distribution.name for distribution in importlib.metadata.distributions()},
        "importable": importlib.util.find_spec("nxdi_qwen") is not None,
        "platform": f"{type(current_platform).__module__}.{type(current_platform).__qualname__}",
        "architectures": sorted(map(repr, ModelRegistry.models.items())),
        "architecture": config.model_config.architectures[0],
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "preemptions": metrics["vllm:num_preemptions"],
        "poisoned": len(poisoned),
        "answers": [answer(output.outputs[0]) for output in outputs],
    }
    print("\n" + json.dumps(results))


def answer(output: Any) -> dict[str, Any]:
    """The tokens, and the logprobs where they were asked for, as exact numbers."""
    logprobs = [{str(token): entry.logprob.hex() for token, entry in found.items()} for found in output.logprobs or ()]
    return {"tokens": list(output.token_ids), "finish_reason": output.finish_reason, "logprobs": logprobs}


def poison(llm: Any) -> list[int]:
    """Fills slots with NaN whenever what they hold must not matter. Returns the list of slots that requests left."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.runner
    model, left = runner.model, []

    def fill(slot: int) -> None:
        for tensor in model.state:
            tensor[slot] = float("nan")

    def and_fill(release: Callable[[str], int | None], request: str) -> int | None:
        slot = release(request)
        if slot is not None:
            fill(slot)
            left.append(slot)
        return slot

    def fill_and(encode: Callable[..., Any], slot: int, ids: Sequence[int]) -> Any:
        fill(slot)
        return encode(slot, ids)

    for slot in range(len(model.lengths)):
        fill(slot)
    runner.release = partial(and_fill, runner.release)
    model.prefill = partial(fill_and, model.prefill)
    model.prefill_blocks = partial(fill_and, model.prefill_blocks)
    return left


if __name__ == "__main__":
    main()
