"""The engine: the queue, sampling per request, ends, text; greedy output against Hugging Face's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import PreTrainedModel

from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.engine import Completion, Engine, Event
from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.sampling import SamplingParams
from nxdi_qwen.compile.text import TextCodec
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.model import Batch, State
from nxdi_qwen.modeling.state import describe_state
from tests.artifacts import FAMILY_NAMES, MAX_LENGTH, SLOTS, Served, artifact_of, served
from tests.byte_tokenizer import IM_END_ID, PAD_ID
from tests.hf_fixtures import prompt_ids, reference_logits
from tests.modeling.weights.synthetic import make_config

# Below this distance to the largest logit another token may be chosen: rounding decides.
NEAR_TIE = 1e-4
# Nine requests for three slots: (tokens of the prompt, tokens asked for).
REQUESTS = ((63, 3), (1, 9), (129, 5), (2, 7), (64, 1), (200, 10), (3, 12), (65, 2), (150, 6))
FORMS = [
    ("eager", "qwen3_next"),
    *(("exported", name) for name in FAMILY_NAMES),
    # From the last: another process takes them from the first, and would be waited for.
    *(pytest.param(("optimized", name), marks=pytest.mark.slow) for name in reversed(FAMILY_NAMES)),
]


@pytest.fixture(scope="module", params=FORMS, ids="-".join)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(tmp_path_factory, *request.param)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(tmp_path_factory, "exported", "qwen3_5")


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def prompts(model: PreTrainedModel) -> list[list[int]]:
    return [prompt_ids(model, length, seed).tolist() for seed, (length, _) in enumerate(REQUESTS)]


def near_ties(model: PreTrainedModel, prompt: list[int], output: list[int]) -> int:
    """How many tokens of `output` are only nearly Hugging Face's choice, teacher-forced; all others are its choice."""
    logits = reference_logits(model, torch.tensor(prompt + output))[len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
    margin = logits.max(dim=1).values - chosen
    assert margin.max() < NEAR_TIE, f"token {int(margin.argmax())} of {output} is not the most likely one: {margin}"
    return int((margin > 0).sum())


def alone(executor: Executor, prompt: list[int], params: SamplingParams) -> Completion:
    return Engine(executor).generate([prompt], [params])[0]


def test_greedy_requests_that_join_and_leave(each: Served) -> None:
    model, executor = each
    params = [greedy(count) for _, count in REQUESTS]
    done = Engine(executor).generate(prompts(model), params)
    ties = 0
    for number, (completion, (length, count)) in enumerate(zip(done, REQUESTS, strict=True)):
        assert completion.request == number and len(completion.prompt_ids) == length
        assert completion.finish_reason == "length" and len(completion.token_ids) == count
        ties += near_ties(model, list(completion.prompt_ids), completion.token_ids)
        if number % 3 == 2:
            other = alone(executor, list(completion.prompt_ids), params[number])
            assert other.token_ids == completion.token_ids
    assert ties <= 1
    assert len({tuple(completion.token_ids[:1]) for completion in done}) > 3, "the prompts do not tell requests apart"


def test_logprobs_are_hugging_faces(each: Served) -> None:
    model, executor = each
    prompt = prompts(model)[2]
    completion = alone(executor, prompt, SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=3))
    logits = reference_logits(model, torch.tensor(prompt + completion.token_ids))[len(prompt) - 1 : -1]
    for token, row in zip(completion.tokens, logits.log_softmax(-1), strict=True):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
        values, ids = row.topk(3)
        assert [number for number, _ in token.top] == ids.tolist()
        assert [value for _, value in token.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert token.top[0] == (token.id, token.logprob)


@pytest.mark.parametrize("special", [IM_END_ID, PAD_ID])
def test_special_ids_within_a_prompt_do_not_cut_it(one: Served, special: int) -> None:
    model, executor = one
    prompt = prompt_ids(model, 70, 3).tolist()
    for place in (0, 30, 63, 64, 69):
        prompt[place] = special
    done = alone(executor, prompt, greedy(4))
    assert len(done.token_ids) == 4 and near_ties(model, prompt, done.token_ids) == 0


def test_end_ids_are_a_union(one: Served) -> None:
    model, executor = one
    assert set(executor.config.eos_token_ids) == {IM_END_ID, PAD_ID}
    prompt = prompt_ids(model, 20, 0).tolist()
    tokens = alone(executor, prompt, greedy(12)).token_ids
    first, second = tokens[4], tokens[7]
    assert tokens.index(first) == 4 and tokens.index(second) == 7
    engine = Engine(executor)
    engine.config = dataclasses.replace(executor.config, eos_token_ids=(0, second))

    def end(**options: object) -> tuple[int, str | None]:
        params = SamplingParams(max_new_tokens=12, **options)  # type: ignore[arg-type]
        done = engine.generate([prompt], [params])[0]
        assert done.token_ids == tokens[: len(done.token_ids)]
        return len(done.token_ids), done.finish_reason

    assert end() == (8, "stop")
    assert end(stop_token_ids=(1, first)) == (5, "stop")
    assert end(stop_token_ids=(1,)) == (8, "stop")
    assert end(ignore_eos=True) == (12, "length")
    assert end(ignore_eos=True, stop_token_ids=(first,)) == (5, "stop")


def test_a_slot_that_is_full_ends_a_request(one: Served) -> None:
    model, executor = one
    ids = prompt_ids(model, MAX_LENGTH, 1).tolist()
    done = Engine(executor).generate([ids, ids[:-4], ids[:-5]], [greedy(100), greedy(100), greedy(3)])
    assert [len(completion.token_ids) for completion in done] == [1, 5, 3]
    assert [completion.finish_reason for completion in done] == ["length"] * 3
    assert near_ties(model, ids[:-4], done[1].token_ids) == 0


SAMPLED = SamplingParams(max_new_tokens=8, temperature=1.0, top_k=40, ignore_eos=True, seed=7)


def test_a_seed_gives_the_same_tokens_whatever_the_neighbours_do(one: Served) -> None:
    model, executor = one
    prompt = prompt_ids(model, 70, 0).tolist()
    expected = alone(executor, prompt, SAMPLED).token_ids
    assert alone(executor, prompt, SAMPLED).token_ids == expected
    others = [dataclasses.replace(SAMPLED, seed=seed, max_new_tokens=seed) for seed in (2, 3, 5)]
    done = Engine(executor).generate([*prompts(model)[1:4], prompt], [*others, SAMPLED])
    assert done[3].token_ids == expected
    seeded = [dataclasses.replace(SAMPLED, seed=seed) for seed in (7, 8, 7, 9)]
    same_prompt = Engine(executor).generate([prompt] * 4, seeded)
    assert same_prompt[0].token_ids == same_prompt[2].token_ids == expected
    assert len({tuple(completion.token_ids) for completion in same_prompt}) == 3


def test_without_a_seed_every_request_draws_its_own(one: Served) -> None:
    prompt, params = prompt_ids(one.model, 5, 0).tolist(), dataclasses.replace(SAMPLED, seed=None)
    done = Engine(one.executor).generate([prompt] * 3, [params] * 3)
    assert len({tuple(completion.token_ids) for completion in done}) == 3


# An executor that counts: the token after n is n + 1. What the engine does with tokens shows without a model.
CONFIG = make_config("qwen3_5", vocab_size=272, eos_token_ids=(IM_END_ID, PAD_ID))


class Counting(Executor):
    def __init__(self) -> None:
        description = describe_state(CONFIG, SLOTS, MAX_LENGTH, torch.float32)
        super().__init__(CONFIG, description, Buckets((64,)))

    def context(self, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        last = batch.input_ids[0, batch.valid.sum() - 1]
        return self.head(last[None, None].float()), batch.input_ids[..., None].float(), state

    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        return self.head(batch.input_ids.float()), state

    def head(self, hidden: Tensor) -> Tensor:
        return one_hot((hidden[:, 0].long() + 1) % CONFIG.vocab_size, CONFIG.vocab_size).float()


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.from_folder(artifact_of(tmp_path_factory, "qwen3_5"))


def texts(codec: TextCodec | None, prompt: str | list[int], **options: object) -> tuple[list[Event], Completion]:
    """The events of one request and its completion."""
    engine = Engine(Counting(), codec)
    ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
    engine.submit(ids, SamplingParams(**options))  # type: ignore[arg-type]
    events = list(engine.stream())
    assert all(event.completion is events[0].completion for event in events)
    assert [event.token.id for event in events] == events[0].completion.token_ids
    if codec is not None:
        assert "".join(event.text for event in events) == events[0].completion.text
    return events, events[0].completion


def test_text_comes_as_its_tokens_do(codec: TextCodec) -> None:
    events, done = texts(codec, "a", max_new_tokens=4)
    assert [event.text for event in events] == ["b", "c", "d", "e"]
    assert (done.text, done.finish_reason) == ("bcde", "length")


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [(("efg",), "bcd", 6), (("c", "b"), "", 1), (("xyz", "def", "cde"), "b", 4), (("nothing",), "bcdefghi", 8)],
)
def test_stop_strings_that_span_tokens(codec: TextCodec, stop: tuple[str, ...], text: str, tokens: int) -> None:
    events, done = texts(codec, "a", max_new_tokens=8, stop=stop)
    assert (done.text, len(done.tokens)) == (text, tokens)
    assert done.finish_reason == ("length" if tokens == 8 else "stop")
    assert events[-1].completion.finish_reason is not None


def test_the_beginning_of_a_stop_string_is_held_back_and_given_out_at_the_end(codec: TextCodec) -> None:
    events, done = texts(codec, "a", max_new_tokens=5, stop=("efgh",))
    assert [event.text for event in events] == ["b", "c", "d", "", "ef"]
    assert (done.text, done.finish_reason) == ("bcdef", "length")


def test_an_end_token_ends_the_text_and_is_no_part_of_it(codec: TextCodec) -> None:
    _, done = texts(codec, [253], max_new_tokens=9)
    assert done.token_ids == [254, 255, PAD_ID] and done.finish_reason == "stop"
    assert done.text == "\ufffd\ufffd"  # bytes that no UTF-8 text has
    _, done = texts(codec, [253], max_new_tokens=9, ignore_eos=True)
    assert done.token_ids == [*range(254, 263)] and done.finish_reason == "length"


def test_a_stop_token_is_no_part_of_the_text(codec: TextCodec) -> None:
    _, done = texts(codec, "a", max_new_tokens=9, stop_token_ids=(ord("e"),), stop=("ef",))
    assert (done.text, done.token_ids, done.finish_reason) == ("bcd", list(b"bcde"), "stop")


def test_a_stop_string_goes_before_the_end_token(codec: TextCodec) -> None:
    _, done = texts(codec, [253], max_new_tokens=9, stop=("\ufffd",))
    assert (done.text, done.finish_reason) == ("", "stop")


def test_without_a_tokenizer_there_is_no_text() -> None:
    events, done = texts(None, [5], max_new_tokens=3)
    assert done.text is None and [event.text for event in events] == [""] * 3
    assert done.to_dict() == {
        "request": 0, "prompt_ids": [5], "token_ids": [6, 7, 8], "text": None, "finish_reason": "length",
    }  # fmt: skip


def test_requests_wait_in_the_order_they_came() -> None:
    engine = Engine(Counting())
    for number in range(8):
        assert engine.submit([10 * number], greedy(1 + number % 3)) == number
    first_seen = list(dict.fromkeys(event.request for event in engine.stream()))
    assert first_seen == list(range(8))
    assert not engine.busy


def test_every_step_admits_and_decodes() -> None:
    engine = Engine(Counting())
    for count in (1, 3, 3, 2):
        engine.submit([1], greedy(count))
    steps = []
    while engine.busy:
        steps.append(sorted(event.request for event in engine.step()))
    # Request 0 ends with its first token; its slot is free in the next step, where 3 joins the two that decode.
    assert steps == [[0, 1, 2], [1, 2, 3], [1, 2, 3]]
    assert engine.step() == []


def test_cancelled_requests_say_nothing_more() -> None:
    engine = Engine(Counting())
    numbers = [engine.submit([20 * number], greedy(4)) for number in range(6)]
    running, waiting = numbers[1], numbers[4]
    first = {event.request: event.completion for event in engine.step()}
    assert sorted(first) == [0, 1, 2]
    engine.cancel(running)
    engine.cancel(waiting)
    events = list(engine.stream())
    assert {event.request for event in events} == {0, 2, 3, 5}
    done = {event.request: event.completion for event in events}
    for number, completion in done.items():
        assert completion.token_ids == [20 * number + n for n in range(1, 5)]
    assert first[running].token_ids == [21] and first[running].finish_reason == "cancelled"
    engine.cancel(running)
    engine.cancel(99)
    assert not engine.busy


def test_a_cancelled_neighbour_changes_nothing(one: Served) -> None:
    model, executor = one
    engine = Engine(executor)
    for prompt in prompts(model)[:5]:
        engine.submit(prompt, greedy(6))
    events = engine.step()
    engine.cancel(0)
    events += engine.step()
    engine.cancel(3)  # it has just joined in the slot of 0
    events += list(engine.stream())
    done = {event.request: event.completion for event in events}
    for number in (1, 2, 4):
        assert done[number].token_ids == alone(executor, prompts(model)[number], greedy(6)).token_ids


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 241, {}, "has 241 tokens, at most 240 fit"),
        ([272], {}, "token id 272 at position 0 is outside the vocabulary of 272"),
        ([1], {"stop": ("x",)}, "stop strings need a tokenizer"),
    ],
)
def test_what_cannot_be_served_is_not_queued(ids: list[int], options: dict[str, object], message: str) -> None:
    engine = Engine(Counting())
    with pytest.raises(InputError, match=message):
        engine.submit(ids, SamplingParams(**options))  # type: ignore[arg-type]
    assert not engine.busy
    assert engine.submit([1], greedy(1)) == 0
