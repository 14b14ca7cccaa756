"""This package's own vLLM platform with an NxDI application: `python -m tests.serving.neuron.own_platform < JOB`.

In the place of a compiled artifact on a device stands the application in NxDI's CPU mode, which `load` makes. A job:
`model`, a checkpoint folder; `slots`; `max_length`; `requests` as those of `engine`. The last line of the output holds
the results, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from nxdi_qwen.compile.neuron_application import NeuronSlots
from nxdi_qwen.modeling.config_loader import load_config
from nxdi_qwen.modeling.state import describe_state
from nxdi_qwen.parity.targets.nxdi_application import cpu_application
from nxdi_qwen.serving import targets


def main() -> None:
    job = json.load(sys.stdin)
    folder, slots, length = Path(job["model"]), job["slots"], job["max_length"]

    def load(rank: int) -> NeuronSlots:
        options = {"batch_size": slots, "ctx_batch_size": 1, "is_continuous_batching": True}
        return NeuronSlots(cpu_application(folder, seq_len=length, **options), slots)

    state = describe_state(load_config(folder).config, slots, length, torch.float32)
    target = targets.Target("model", "float32", 1, state, False, load)
    targets.open_target = lambda folder: target
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(
        str(folder), dtype="float32", max_model_len=length, max_num_seqs=slots, enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": request.pop("prompt")} for request in job["requests"]]
    outputs = llm.generate(prompts, [SamplingParams(**each) for each in job["requests"]], use_tqdm=False)
    try:
        llm.generate(prompts[:1], SamplingParams(prompt_logprobs=1), use_tqdm=False)
        refused = None
    except ValueError as error:
        refused = str(error)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    results = {"platform": type(current_platform).__module__, "tokens": tokens, "refused": refused}
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    main()
