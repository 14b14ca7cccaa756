"""NxDI's own generation adapter on this port generates Hugging Face's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.byte_tokenizer import IM_END_ID, PAD_ID
from tests.nxdi.calls import LIMIT, Requests, relative
from tests.nxdi.references import FAMILY_NAMES, GREEDY_LENGTHS, GREEDY_STEPS, NAMES, Greedy, reference

pytestmark = pytest.mark.nxdi

App = Callable[..., Any]
END_TOKENS = (IM_END_ID, PAD_ID)  # as every fixture's generation configuration has them
NEAR_TIE = 1e-4  # of the largest logit: rounding may choose the other token


def generate(app: Any, prompts: Sequence[Tensor]) -> tuple[list[list[int]], Tensor]:
    """24 tokens after each prompt, which no end token stops, in one batch padded on the right; and the logits
    [rows, 24, V] that they were taken from."""
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter
    from transformers import GenerationConfig

    adapter = HuggingFaceGenerationAdapter(app)
    adapter.generation_config = GenerationConfig(
        max_new_tokens=GREEDY_STEPS, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True
    )
    ids = pad_sequence(list(prompts), batch_first=True)
    mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
    output = adapter.generate(ids, attention_mask=mask)
    return output.sequences[:, ids.shape[1] :].tolist(), torch.stack(output.logits, dim=1)


def agree(tokens: Sequence[int], expected: Greedy) -> None:
    """Fails at the first other token, unless it is a near-tie: what follows one has no reference."""
    assert len(tokens) == GREEDY_STEPS
    for step, (token, best) in enumerate(zip(tokens, expected.tokens.tolist(), strict=True)):
        if token != best:
            margin = expected.margins[step].item()
            assert margin < NEAR_TIE, f"token {step} is {token}, not {best}, with a margin of {margin}"
            return


def test_near_ties_are_rare() -> None:
    margins = torch.stack([run.margins for name in NAMES for run in reference(name).greedy])
    assert margins.shape == (len(NAMES) * len(GREEDY_LENGTHS), GREEDY_STEPS)
    near = (margins < NEAR_TIE).float().mean().item()
    assert near <= 0.01, f"{near:.1%} of the positions are near-ties"


@pytest.mark.parametrize("place", range(len(GREEDY_LENGTHS)), ids=GREEDY_LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt(cpu_app: App, name: str, place: int) -> None:
    expected = reference(name).greedy[place]
    (tokens,), _ = generate(cpu_app(name, batch_size=1), [expected.ids])
    agree(tokens, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch(cpu_app: App, name: str) -> None:
    """Of three prompts where the application has four rows."""
    expected = reference(name).greedy
    rows, _ = generate(cpu_app(name, batch_size=4), [run.ids for run in expected])
    for tokens, run in zip(rows, expected, strict=True):
        agree(tokens, run)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_logits_of_a_batch_with_a_prompt_of_one_token(cpu_app: App, name: str) -> None:
    """The adapter takes the padding of such a row for its second token."""
    prompts = [prompt.ids for prompt in reference(name).ragged]
    assert 1 in map(len, prompts)
    rows, logits = generate(cpu_app(name, batch_size=4), prompts)
    for prompt, tokens, actual in zip(prompts, rows, logits, strict=True):
        requests = Requests(cpu_app(name, batch_size=1))
        expected = [requests.prefill({0: prompt})[0], *(requests.decode({0: token})[0] for token in tokens[:-1])]
        assert relative(actual, torch.stack(expected)) <= LIMIT


def test_generation_ends_at_the_end_tokens_of_the_checkpoint(cpu_app: App) -> None:
    from neuronx_distributed_inference.utils.hf_adapter import HuggingFaceGenerationAdapter

    ended = 0
    for name in NAMES:
        for run in reference(name).greedy:
            tokens = run.tokens.tolist()
            first = min((tokens.index(end) for end in END_TOKENS if end in tokens), default=None)
            if first is not None:
                adapter = HuggingFaceGenerationAdapter(cpu_app(name, batch_size=1))
                mask = torch.ones_like(run.ids)[None]
                output = adapter.generate(run.ids[None], attention_mask=mask, max_new_tokens=GREEDY_STEPS)
                assert output[0, len(run.ids) :].tolist() == tokens[: first + 1]
                ended += 1
    assert ended >= 2
