"""The NxDI-based plugin within one process, without Neuron hardware: `python -m tests.serving.neuron.engine < JOB`.

Real are vLLM, the plugin and NxDI, in NxDI's CPU mode. In the place of a device stand: a function of the plugin that
looks for one, and NxDI's compiling and loading, which become its `to_cpu`. A job: `engine`, keyword arguments of
`vllm.LLM`; `requests`, each with its `prompt` and the arguments of `SamplingParams`. The last line of the output holds
the results, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any


def main() -> None:
    job = json.load(sys.stdin)
    pretend_device()
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(**job["engine"], skip_tokenizer_init=True)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    most = watch(scheduler)
    prompts = [{"prompt_token_ids": request.pop("prompt")} for request in job["requests"]]
    outputs = llm.generate(prompts, [SamplingParams(**each) for each in job["requests"]], use_tqdm=False)
    cache, computed = llm.llm_engine.vllm_config.cache_config, scheduler.kv_cache_config
    results = {
        "platform": type(current_platform).__module__,
        "worker": llm.llm_engine.vllm_config.parallel_config.worker_cls,
        "prefix_caching": cache.enable_prefix_caching,
        "mamba_cache_mode": cache.mamba_cache_mode,
        "blocks": computed.num_blocks,
        "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "groups": [described(group) for group in computed.kv_cache_groups],
        "most_blocks": most["blocks"],
        "most_running": most["running"],
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }
    print("\n" + json.dumps(results))


def pretend_device() -> None:
    """Before anything imports vLLM."""
    import vllm_neuron

    vllm_neuron._is_neuron_dev = lambda: True
    import nxdi_qwen.modeling.nxdi  # isort: skip  # noqa: F401, stand-ins for a missing SDK, which the next import needs
    from neuronx_distributed_inference.models.application_base import NeuronApplicationBase

    NeuronApplicationBase.compile = lambda self, *_, **__: None
    NeuronApplicationBase.load = lambda self, *_, **__: self.to_cpu()


def described(group: Any) -> dict[str, Any]:
    """A group of layers of the computed configuration: its layers and its specification's type and fields."""
    spec = group.kv_cache_spec
    fields = {key: value for key, value in vars(spec).items() if isinstance(value, int | str)}
    if hasattr(spec, "shapes"):
        fields["shapes"], fields["dtypes"] = spec.shapes, [str(dtype) for dtype in spec.dtypes]
    return {"layers": group.layer_names, "type": type(spec).__name__, "page": spec.page_size_bytes, **fields}


def watch(scheduler: Any) -> dict[str, Any]:
    """Notes, after every step, the most blocks that one request has held in each group, and the most requests."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    most: dict[str, Any] = {"blocks": [0] * len(managers), "running": 0}
    schedule = scheduler.schedule

    def watched() -> Any:
        result = schedule()
        counts = [
            max(Counter({key: len(value) for key, value in m.req_to_blocks.items()}).values(), default=0)
            for m in managers
        ]
        most["blocks"] = [max(pair) for pair in zip(most["blocks"], counts, strict=True)]
        most["running"] = max(most["running"], len(scheduler.running))
        return result

    scheduler.schedule = watched
    return most


if __name__ == "__main__":
    main()
