"""One peer of the benchmark in a process of its own: reads a request a line from standard input, answers in JSON.

Requests: ``prefill T``, ``decode BATCH CONTEXT STEPS``, ``operation T``, and of ours ``memory``. Answers: seconds (of
one prefill, of one decode step, of one call), or bytes. Whatever libraries print goes to standard error. Run as
``python worker.py PEER MODEL [ARTIFACT-FOR-1 ARTIFACT-FOR-8 PACKAGE]``; imports nothing of this package unless the peer
needs it, so that vLLM's own Python can run it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

THREADS = 2
OPERATION_HEADS, OPERATION_DIM = 16, 128  # of the 0.8B shape


def random_ids(rows: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Fresh ids at every call, so that no cache of prefixes can help."""
    import torch

    return torch.randint(1, vocabulary, (rows, tokens)).tolist()


def operation_inputs(tokens: int) -> tuple[Any, ...]:
    """query, key, value [1, T, 16, 128] bfloat16; log decay, beta [1, T, 16]; state [1, 16, 128, 128] float32."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens, OPERATION_HEADS, OPERATION_DIM)
    q, k, v = (torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(3))
    gates = torch.rand(2, *shape[:3], generator=generator)
    state = torch.randn(1, OPERATION_HEADS, OPERATION_DIM, OPERATION_DIM, generator=generator)
    return q, k, v, -0.1 * gates[0], gates[1], state


class Ours:
    """Optimised artifacts of this project: one of a single slot for prompts, one for each batch of decode."""

    def __init__(self, one: str, eight: str, package: str) -> None:
        from nxdi_qwen.compile.artifact import open_artifact

        self.folders, self.package = {1: Path(one), 8: Path(eight)}, package
        self.vocabulary = open_artifact(self.folders[1]).model.vocab_size

    @functools.cache  # noqa: B019 - one object for the whole process
    def runner(self, batch: int) -> Any:
        """Loaded when first needed, so that a process that runs one artifact holds one."""
        from nxdi_qwen.compile.artifact import open_artifact
        from nxdi_qwen.compile.cpu import load_cpu
        from nxdi_qwen.compile.slot_runner import SlotRunner

        folder = self.folders[batch]
        return SlotRunner(load_cpu(folder, open_artifact(folder)))

    @functools.cached_property
    def rule(self) -> Any:
        import torch

        return torch._inductor.aoti_load_package(self.package)

    def prefill(self, tokens: int) -> float:
        (ids,) = random_ids(1, tokens, self.vocabulary)
        runner = self.runner(1)
        begin = time.perf_counter()
        runner.prefill(0, ids)
        return time.perf_counter() - begin

    def decode(self, batch: int, context: int, steps: int) -> float:
        runner = self.runner(batch)
        for slot, ids in enumerate(random_ids(batch, context, self.vocabulary)):
            runner.prefill(slot, ids)
        begin = time.perf_counter()
        for _ in range(steps):
            logits = runner.decode(dict.fromkeys(range(batch), 1))
            [int(row.argmax()) for row in logits.values()]
        return (time.perf_counter() - begin) / steps

    def operation(self, tokens: int) -> float:
        import torch

        inputs = (*operation_inputs(tokens), torch.ones(1, tokens, dtype=torch.bool))
        rule = self.rule
        begin = time.perf_counter()
        rule(*inputs)
        return time.perf_counter() - begin

    def memory(self) -> int:
        from nxdi_qwen.compile.hardware_facts import peak_rss_bytes

        return peak_rss_bytes()


class Transformers:
    """transformers in bfloat16 with sdpa and its cache, logits of the last token only."""

    def __init__(self, model: str) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.vocabulary = self.model.config.get_text_config().vocab_size
        module = sys.modules[type(self.model).__module__]
        self.rule: Any = module.torch_chunk_gated_delta_rule

    def prefill(self, tokens: int) -> float:
        return self._prefill(1, tokens)[0]

    def decode(self, batch: int, context: int, steps: int) -> float:
        import torch

        _, cache = self._prefill(batch, context)
        begin = time.perf_counter()
        for _ in range(steps):
            out = self.model(input_ids=torch.ones(batch, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
            out.logits[:, -1].argmax(dim=-1).tolist()
        return (time.perf_counter() - begin) / steps

    def operation(self, tokens: int) -> float:
        q, k, v, g, beta, state = operation_inputs(tokens)
        begin = time.perf_counter()
        self.rule(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        return time.perf_counter() - begin

    def _prefill(self, rows: int, tokens: int) -> tuple[float, Any]:
        import torch

        ids = torch.tensor(random_ids(rows, tokens, self.vocabulary))
        begin = time.perf_counter()
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        return time.perf_counter() - begin, out.past_key_values


class Vllm:
    """vLLM's CPU build in bfloat16, in this process; a prefill includes the sampling of its first token."""

    def __init__(self, model: str) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        import vllm

        self.vllm = vllm
        self.llm = vllm.LLM(
            model,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_batched_tokens=4096,
            max_num_seqs=8,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
        )
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()

    def prefill(self, tokens: int) -> float:
        return self._generate(1, tokens, 1)

    def decode(self, batch: int, context: int, steps: int) -> float:
        return (self._generate(batch, context, steps + 1) - self._generate(batch, context, 1)) / steps

    def _generate(self, rows: int, tokens: int, new: int) -> float:
        params = self.vllm.SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in random_ids(rows, tokens, self.vocabulary)]
        begin = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin


def main() -> None:
    peer, model, *own = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log on standard output
    import torch

    torch.set_num_threads(THREADS)
    with contextlib.redirect_stdout(sys.stderr), torch.inference_mode():
        made: Any = Ours(*own) if peer == "ours" else {"transformers": Transformers, "vllm": Vllm}[peer](model)
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            name, *numbers = line.split()
            answer: float = getattr(made, name)(*map(int, numbers))
            print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
