"""`python -m tests.serving.references` writes `build/serving` anew: tiny checkpoints, and what Hugging Face computes
with them. Needs transformers 5.24.0; `tests.serving.stored` reads the results without it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.byte_tokenizer import IM_END_ID, PAD_ID, write_tokenizer
from tests.hf_fixtures import hf_model, reference_logits, save_checkpoint
from tests.nxdi.make_references import TRANSFORMERS
from tests.serving import stored
from tests.serving.stored import FAMILIES, LLAMA, MAX_LENGTH, PROCESSES, TEXT_FORMS, Chat, Greedy

# The fixture of each checkpoint, and how it is saved.
FIXTURES: dict[str, tuple[str, dict[str, bool]]] = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5", {"nested": True}),
    "qwen3_5_moe": ("qwen3_5_moe", {"nested": True, "stacked": True}),
    "qwen3_5_text": ("qwen3_5_tied", {}),
    "qwen3_5_moe_text": ("qwen3_5_moe_tied", {}),
}
END_IDS = (IM_END_ID, PAD_ID)
END_TOKEN_SCALE = 1.3
LETTERS = tuple(range(ord("a"), ord("z") + 1))
# Around the buckets and the grid; the rest of the 32 is drawn.
LENGTHS = (1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 257, 320, 511, 512, 513, 600)
PROMPTS, FEW_PROMPTS, LONGEST_PROMPT = 32, 8, 600
TOKENS = (16, 48)  # least and most
CONVERSATIONS: tuple[tuple[list[dict[str, str]], dict[str, Any]], ...] = (
    ([{"role": "user", "content": "Hello, Trainium"}], {}),
    ([{"role": "user", "content": "Hello, Trainium"}], {"enable_thinking": False}),
    (
        [
            {"role": "system", "content": "Answer briefly. Réponds en français."},
            {"role": "user", "content": "How many slots are there?"},
            {"role": "assistant", "content": "Eight."},
            {"role": "user", "content": "And how many tokens fit in one of them?"},
        ],
        {},
    ),
)

Process = Callable[[Tensor, Sequence[int]], Tensor]  # scores [V] and the output so far -> scores [V]


def main() -> int:
    """Write the folder anew; 2 and one line under another transformers."""
    console = Console(stderr=True)
    if transformers.__version__ != TRANSFORMERS:
        console.print(
            f"error: transformers {transformers.__version__} is not the reference: install transformers {TRANSFORMERS}",
            highlight=False,
            soft_wrap=True,
        )
        return 2
    shutil.rmtree(stored.FOLDER, ignore_errors=True)
    names = (*FAMILIES, *TEXT_FORMS, LLAMA)
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        for _ in track(pool.map(write, names), description="references", total=len(names), console=console):
            pass
    return 0


def write(name: str) -> None:
    """Everything for one checkpoint."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = llama() if name == LLAMA else fixture(name)
    write_checkpoint(name, model)
    write_results(name, model)


def write_checkpoint(name: str, model: PreTrainedModel) -> None:
    folder = stored.checkpoint(name)
    if name == LLAMA:
        model.save_pretrained(folder)
        write_tokenizer(folder)
    else:
        save_checkpoint(model, folder, tokenizer=True, **FIXTURES[name][1])


def llama() -> PreTrainedModel:
    """A tiny Llama with random parameters, the fixtures' vocabulary and a head_dim that vLLM's CPU attention takes."""
    config = LlamaConfig(
        vocab_size=272,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=PAD_ID,
        bos_token_id=None,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 1.5 / math.sqrt(parameter.shape[1])
    return model.eval().requires_grad_(False)


def fixture(name: str) -> PreTrainedModel:
    """The model of a checkpoint: end tokens are likelier than the fixture has them, so that some answers end early."""
    model = copy.deepcopy(hf_model(FIXTURES[name][0]))
    if not model.config.tie_word_embeddings:
        model.lm_head.weight[list(END_IDS)] *= END_TOKEN_SCALE
    return model


def write_results(name: str, model: PreTrainedModel) -> None:
    """`NAME.json`, and `NAME.safetensors` with log probabilities, as `stored.references` reads them."""
    generator = torch.Generator().manual_seed(17)
    prompts = draw_prompts(generator, PROMPTS if name in FAMILIES else FEW_PROMPTS)
    counts = torch.randint(TOKENS[0], TOKENS[1] + 1, (len(prompts),), generator=generator).tolist()
    kept = {"ignore_eos": True}
    results: dict[str, Any] = dict.fromkeys(("steered", "constrained", "long", "chats", "scored"), ())
    completions = [greedy(model, ids, count, kept) for ids, count in zip(prompts, counts, strict=True)]
    results |= {"completions": completions, "ended": [cut_at_end(completion) for completion in completions]}
    assert stored.near_ties(completions) <= stored.NEAR_TIES_ALLOWED, f"{name}: too many near ties"
    logprobs: dict[str, Tensor] = {}
    if name in FAMILIES:
        early = [item.prompt for item in results["ended"] if item.finish_reason == "stop" and len(item.tokens) < 30]
        assert 2 <= len(early) <= len(prompts) // 2, f"{name}: {len(early)} answers end early, draw others"
        longest = max(prompts, key=len)
        results |= {
            "steered": steered(model, prompts, early),
            "constrained": [letters(model, prompts[place]) for place in (3, 8)],
            "long": [greedy(model, longest, MAX_LENGTH - len(longest), kept)],
            "chats": [chat(model, stored.checkpoint(name), *conversation) for conversation in CONVERSATIONS],
            "scored": [greedy(model, ids, 8, kept) for ids in (prompts[0], prompts[5], prompts[12])],
        }
        for place, completion in enumerate(results["scored"]):
            scores = reference_logits(model, torch.tensor(completion.prompt)).log_softmax(-1)
            logprobs[f"{place}.prompt"] = scores
            logprobs[f"{place}.output"] = torch.stack(stepwise(model, completion.prompt, completion.tokens[:-1]))
    plain = {key: [dataclasses.asdict(item) for item in items] for key, items in results.items()}
    (stored.FOLDER / f"{name}.json").write_text(json.dumps({"transformers": TRANSFORMERS, **plain}))
    save_file(logprobs, stored.FOLDER / f"{name}.safetensors")


def draw_prompts(generator: torch.Generator, count: int) -> list[list[int]]:
    """Prompts of all `LENGTHS`, then of random ones; one is a single token repeated. Few: of some `LENGTHS` only."""
    drawn = torch.randint(1, LONGEST_PROMPT + 1, (max(0, count - len(LENGTHS)),), generator=generator).tolist()
    lengths = [*LENGTHS[:: 1 if drawn else len(LENGTHS) // count], *drawn][:count]
    prompts = [torch.randint(0, 272, (length,), generator=generator).tolist() for length in lengths]
    if drawn:
        prompts[LENGTHS.index(320)] = [17] * 320
    return prompts


@torch.no_grad()
def greedy(
    model: PreTrainedModel,
    prompt: Sequence[int],
    count: int,
    asked: dict[str, Any],
    *,
    process: Process = lambda scores, _: scores,
    ends: Collection[int] = (),
) -> Greedy:
    """At most `count` tokens, the last of which may be one of `ends`; each is the largest score after `process`."""
    cache = DynamicCache(config=model.config)
    step, tokens, margins = list(prompt), [], []
    for _ in range(count):
        logits = model(input_ids=torch.tensor([step]), cache=cache, use_cache=True).logits[0, -1].float()
        best = process(logits, tokens).topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(min(1.0, float((best.values[0] - best.values[1]) / logits.abs().max())))
        step = tokens[-1:]
        if tokens[-1] in ends:
            return Greedy(list(prompt), tokens, margins, "stop", asked)
    return Greedy(list(prompt), tokens, margins, "length", asked)


def cut_at_end(completion: Greedy) -> Greedy:
    """The same request, which an end token stops."""
    ends = [place for place, token in enumerate(completion.tokens) if token in END_IDS]
    count = ends[0] + 1 if ends else len(completion.tokens)
    reason = "stop" if ends else "length"
    asked = {"max_tokens": len(completion.tokens)}
    return Greedy(completion.prompt, completion.tokens[:count], completion.margins[:count], reason, asked)


def steered(model: PreTrainedModel, prompts: Sequence[list[int]], early: Sequence[list[int]]) -> list[Greedy]:
    """Requests whose scores are changed before each choice, by the definitions of the OpenAI and vLLM documentation.

    `early`: prompts whose answers an end token stops soon.
    """
    penalties = (
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.4},
    )
    results = []
    for place, asked in zip((2, 4, 9, 10), penalties, strict=True):
        prompt = prompts[place]

        def penalise(scores: Tensor, output: Sequence[int], ids: Any = prompt, own: Any = asked) -> Tensor:
            return penalised(scores, [*ids, *output], output, **own)

        results.append(greedy(model, prompt, 40, asked | {"ignore_eos": True}, process=penalise))
    favoured, forbidden = {100: 4.0, 40: 3.0, 7: -100.0}, list(range(48, 58))

    def favour(scores: Tensor, output: Sequence[int]) -> Tensor:
        scores = scores.clone()
        for token, bias in favoured.items():
            scores[token] += bias
        return scores

    def allow(scores: Tensor, output: Sequence[int]) -> Tensor:
        return torch.full_like(scores, -math.inf).index_copy(0, torch.tensor(forbidden), scores[forbidden])

    def lengthen(scores: Tensor, output: Sequence[int]) -> Tensor:
        scores = scores.clone()
        if len(output) < 30:
            scores[list(END_IDS)] = -math.inf
        return scores

    bias = {"logit_bias": {str(token): value for token, value in favoured.items()}, "ignore_eos": True}
    results.append(greedy(model, prompts[6], 24, bias, process=favour))
    results.append(greedy(model, prompts[7], 24, {"allowed_token_ids": forbidden}, process=allow))
    least = {"min_tokens": 30, "max_tokens": 40}
    results.extend(greedy(model, prompt, 40, least, process=lengthen, ends=END_IDS) for prompt in early[:2])
    return results


def penalised(
    scores: Tensor,
    seen: Sequence[int],
    output: Sequence[int],
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> Tensor:
    """The repetition penalty for every token of prompt and output, then the other two for those of the output."""
    scores = scores.clone()
    for token in set(seen):
        scores[token] = scores[token] * repetition_penalty if scores[token] < 0 else scores[token] / repetition_penalty
    for token in set(output):
        scores[token] -= presence_penalty + frequency_penalty * output.count(token)
    return scores


def letters(model: PreTrainedModel, prompt: Sequence[int]) -> Greedy:
    """Five lower-case letters, and then an end token."""

    def process(scores: Tensor, output: Sequence[int]) -> Tensor:
        allowed = LETTERS if len(output) < 5 else END_IDS
        return torch.full_like(scores, -math.inf).index_copy(0, torch.tensor(allowed), scores[list(allowed)])

    asked = {"structured_outputs": {"regex": "[a-z]{5}"}, "max_tokens": 20}
    return greedy(model, prompt, 20, asked, process=process, ends=END_IDS)


def chat(model: PreTrainedModel, folder: Path, messages: list[dict[str, str]], arguments: dict[str, Any]) -> Chat:
    """The answer to a conversation that transformers renders with the checkpoint's own template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **arguments)
    answer = greedy(model, ids, 24, {"ignore_eos": True})
    return Chat(messages, arguments, answer)


@torch.no_grad()
def stepwise(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> list[Tensor]:
    """Log probabilities [V] after the prompt and after each of the tokens, which are fed one by one."""
    cache = DynamicCache(config=model.config)
    steps = [list(prompt), *([token] for token in tokens)]
    outputs = (model(input_ids=torch.tensor([step]), cache=cache, use_cache=True) for step in steps)
    return [output.logits[0, -1].float().log_softmax(-1) for output in outputs]


if __name__ == "__main__":
    sys.exit(main())
