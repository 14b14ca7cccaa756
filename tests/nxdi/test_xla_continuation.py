"""Graphs that go on from the stored state: prompts in pieces, and verification of drafts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.comparison import relative
from tests.nxdi.hosted import (
    BLOCKS,
    CONTEXT,
    CONTINUATION,
    DECODE,
    ONE_BUCKET,
    VERIFY,
    Hosted,
    Requests,
    assert_close,
    lowered,
)
from tests.nxdi.references import FAMILY_NAMES, Prompt, reference

pytestmark = pytest.mark.nxdi
# The short one takes pieces of two tokens, fewer than the kernel of the convolution keeps.
PIECES = ONE_BUCKET | {"continuation_buckets": (3, 129)}
DRAFT = 4  # k + 1, which is the length of a context bucket too
VERIFYING = ONE_BUCKET | {"context_encoding_buckets": (DRAFT, 130), "token_generation_buckets": (72, 146)}
VERIFYING |= {"speculation_length": DRAFT}


def assert_states_close(actual: Hosted, expected: Hosted, slot: int, length: int) -> None:
    """The states of a slot that holds `length` tokens; of keys and values as many."""
    for name, tensor in zip(actual.state_names, actual.description.tensors, strict=True):
        rows = (hosted.values[name][slot] for hosted in (actual, expected))
        a, b = (row[:, :length] for row in rows) if tensor.role in ("key", "value") else rows
        assert_close(a, b, f"{tensor.name} after {length} tokens")


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_prompt_in_pieces_is_one_prompt(name: str) -> None:
    prompt = reference(name).prompts[130]
    whole = Hosted(lowered(name, **PIECES))
    assert_close(Requests(whole).prefill(1, prompt.ids), prompt.logits[0], "one piece")
    ran = set()
    for sizes in ((63, 67), (1, 129), (128, 2), (2, 2, 126), (61, 2, 67), (64, 64, 2), (50, 50, 30)):
        hosted = Hosted(lowered(name, **PIECES))
        requests = Requests(hosted)
        first, *rest = prompt.ids.split(sizes)
        requests.prefill(1, first)
        logits = torch.stack([requests.go_on(1, piece) for piece in rest])[-1]
        assert_close(logits, prompt.logits[0], sizes)
        assert_states_close(hosted, whole, 1, 130)
        assert [tag for tag, _ in hosted.calls] == [CONTEXT] + [CONTINUATION] * len(rest), sizes
        for step in range(3):
            logits = requests.decode({1: int(prompt.continuation[step])})[0]
            assert_close(logits, prompt.logits[step + 1], (sizes, step))
        ran |= set(hosted.calls)
    assert ran == set(hosted.graphs)


def test_pieces_as_long_as_prompts_have_graphs_of_their_own() -> None:
    """NxD's model, and `Hosted` after it, picks a graph by the shapes of its inputs: no two may be alike."""
    prompt = reference("qwen3_5").prompts[130]
    options = ONE_BUCKET | {"continuation_buckets": (130,)}
    Hosted(lowered("qwen3_5", **options | BLOCKS | {"pa_block_size": 80}))  # tables are as wide, too
    requests = Requests(Hosted(lowered("qwen3_5", **options)))
    requests.prefill(0, prompt.ids[:60])
    assert_close(requests.go_on(0, prompt.ids[60:]), prompt.logits[0], "continued")
    assert requests.hosted.calls == [(CONTEXT, 130), (CONTINUATION, 130)]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_continuation_leaves_other_requests_alone(name: str) -> None:
    """Pieces of two prompts in turn, with decode steps of a third between them; every call compares the idle slots."""
    prompts = reference(name).prompts
    requests = Requests(Hosted(lowered(name, **PIECES)))
    decoded = prompts[65]
    requests.prefill(0, decoded.ids)
    pieces = zip(prompts[130].ids.split((40, 60, 30)), prompts[63].ids.split(21), strict=True)
    for step, (one, other) in enumerate(pieces):
        logits = []
        for slot, piece in ((3, one), (1, other)):
            logits.append(requests.go_on(slot, piece) if step else requests.prefill(slot, piece))
        actual = requests.decode({0: int(decoded.continuation[step])})[0]
        assert_close(actual, decoded.logits[step + 1], step)
    for actual, length in zip(logits, (130, 63), strict=True):
        assert_close(actual, prompts[length].logits[0], length)


def draft_of(prompt: Prompt, good: int) -> list[int]:
    """Tokens to verify, of which as many are the right ones."""
    right = prompt.continuation[:DRAFT].tolist()
    return right[:good] + [(token + 1) % 256 for token in right[good:]]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_verification_is_decoding_token_by_token(name: str) -> None:
    """Logits at every token, and the states after each: of GDN layers, behind the state, for every token but the last.

    A draft is accepted in part, so decoding goes on from a state in the middle of it. Prompts are as long as they must
    be for the graph of k + 1 tokens, for another, and for each of the decode buckets.
    """
    application = lowered(name, **VERIFYING)
    verifying, decoding = Hosted(application), Hosted(application)
    prompts = {slot: reference(name).prompts[length] for slot, length in ((2, 3), (0, 65), (3, 130))}
    for hosted in (verifying, decoding):
        requests = Requests(hosted)
        for slot, prompt in prompts.items():
            assert_close(requests.prefill(slot, prompt.ids), prompt.logits[0], slot)
        assert hosted.calls == [(CONTEXT, DRAFT), (CONTEXT, 130), (CONTEXT, 130)]

    slots, good = (2, -1, 0, 3), 2
    drafts = {slot: draft_of(prompt, good) for slot, prompt in prompts.items()}
    starts = [len(prompts[slot].ids) if slot >= 0 else 9 for slot in slots]
    logits = verifying.forward([drafts.get(slot, [77] * DRAFT) for slot in slots], starts, slots)
    assert verifying.calls[-1] == (VERIFY, 146) and logits.shape[:2] == (len(slots), DRAFT)
    states = after_each_token(verifying)
    for token in range(DRAFT):
        tokens = [[drafts[slot][token]] if slot >= 0 else [77] for slot in slots]
        expected = decoding.forward(tokens, [start + token for start in starts], slots)
        for row, slot in enumerate(slots):
            if slot < 0:
                continue
            assert_close(logits[row, token], expected[row, -1], (slot, token))
            if token < good:
                assert_close(logits[row, token], prompts[slot].logits[token + 1], (slot, token))
            for state, rows in states[token].items():
                assert_close(rows[row], decoding.values[state][slot], (state, slot, token))
    for slot in prompts:
        assert_states_close(verifying, decoding, slot, len(prompts[slot].ids) + DRAFT)

    for state, rows in states[good - 1].items():
        verifying.values[state] = verifying.values[state].clone()
        for row, slot in enumerate(slots):
            if slot >= 0:
                verifying.values[state][slot] = rows[row]
    requests = Requests(verifying)
    requests.lengths |= {slot: len(prompt.ids) + good for slot, prompt in prompts.items()}
    for step in range(good, good + 3):
        actual = requests.decode({slot: int(prompt.continuation[step]) for slot, prompt in prompts.items()})
        assert_close(actual, torch.stack([prompt.logits[step + 1] for prompt in prompts.values()]), step)


def after_each_token(hosted: Hosted) -> list[dict[str, Tensor]]:
    """What a verification returned: the rows [B, ...] of each GDN state after every token but the last."""
    recurrent = [
        name
        for name, tensor in zip(hosted.state_names, hosted.description.tensors, strict=True)
        if tensor.role in ("recurrent", "conv")
    ]
    rows = hosted.outputs[1 + len(hosted.state_names) :]
    assert len(rows) == (DRAFT - 1) * len(recurrent)
    per_token = [rows[n : n + len(recurrent)] for n in range(0, len(rows), len(recurrent))]
    return [dict(zip(recurrent, each, strict=True)) for each in per_token] + [{}]


@pytest.mark.parametrize("name", ["qwen3_5"])
def test_the_bucket_of_a_verification_holds_all_of_it(name: str) -> None:
    """Rows that NxDI fills up, each draft in the first bucket that is longer than prompt and draft together."""
    hosted = Hosted(lowered(name, **VERIFYING))
    requests = Requests(hosted)
    for length, bucket in ((3, 72), (63, 72), (64, 72), (65, 72), (130, 146)):
        prompt = reference(name).prompts[length]
        requests.prefill(1, prompt.ids)
        logits = hosted.forward([prompt.continuation[:DRAFT].tolist()], [length], [1])
        assert_close(logits[0], prompt.logits[1 : DRAFT + 1], length)
        assert hosted.calls[-1] == (VERIFY, bucket), length


def test_a_prompt_as_long_as_a_draft_is_a_prompt() -> None:
    hosted = Hosted(lowered("qwen3_5", **VERIFYING))
    prompt = reference("qwen3_5").prompts[4]
    logits = hosted.forward([prompt.ids.tolist()], [0], [1])
    assert_close(logits[0, -1], prompt.logits[0], DRAFT)
    assert hosted.calls[-1][0] == CONTEXT
    assert_close(hosted.forward([[int(prompt.continuation[0])]], [DRAFT], [1])[0, -1], prompt.logits[1], DRAFT)
    assert hosted.calls[-1][0] == DECODE and relative(logits[0, -1], prompt.logits[1]) > 1e-3
