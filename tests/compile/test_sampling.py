"""Sampling against transformers' processors, closed formulas and chi-square."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from transformers.generation import logits_process as hf

from nxdi_qwen.compile.sampling import SampledToken, Sampler, SamplingParams
from nxdi_qwen.modeling.errors import InputError

VOCABULARY = 300


def logits_of(seed: int, vocabulary: int = VOCABULARY, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def draw_many(params: SamplingParams, logits: torch.Tensor, number: int) -> list[int]:
    sampler = Sampler(params, [], logits.shape[0])
    return [sampler.sample(logits).id for _ in range(number)]


def filtered_logits(params: SamplingParams, logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    sampler = Sampler(params, prompt, logits.shape[0])
    for token_id in output:
        sampler.accept(token_id)
    ids, scores = sampler.candidates(logits)
    return torch.full_like(logits, -math.inf).scatter(0, ids, scores)


HF_CASES = [
    {"temperature": 0.7},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.8},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.5, "top_k": 20},
    {"temperature": 1.0, "top_k": VOCABULARY + 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 3.0, "top_p": 0.99},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 2.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("options", HF_CASES, ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_the_distribution_is_transformers(options: dict, seed: int) -> None:
    logits = logits_of(seed)
    logits[7] = -math.inf
    prompt, output = [3, 3, 250, 7], [11, 3, 12]
    params = SamplingParams(**options)

    chain = hf.LogitsProcessorList()
    if "repetition_penalty" in options:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    chain.append(hf.TemperatureLogitsWarper(float(options["temperature"])))
    if "top_k" in options:
        chain.append(hf.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        chain.append(hf.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        chain.append(hf.MinPLogitsWarper(options["min_p"]))
    expected = chain(torch.tensor([prompt + output]), logits[None].clone())[0]

    assert torch.equal(filtered_logits(params, logits, prompt, output), expected)


def test_presence_and_frequency_follow_the_formula_over_the_output_only() -> None:
    logits = logits_of(1)
    prompt, output = [1, 2, 2, 5], [2, 9, 9, 9, 5]
    params = SamplingParams(temperature=1.0, presence_penalty=0.75, frequency_penalty=-0.5)
    expected = logits.clone()
    for token_id, count in Counter(output).items():
        expected[token_id] += 0.5 * count - 0.75
    torch.testing.assert_close(filtered_logits(params, logits, prompt, output), expected, rtol=0, atol=1e-6)
    assert torch.equal(filtered_logits(params, logits, prompt, []), logits)


def test_repetition_comes_before_presence() -> None:
    logits = torch.tensor([4.0, 1.0, -2.0])
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.25)
    assert filtered_logits(params, logits, [2], [0, 0]).tolist() == [4 / 2 - 1 - 0.5, 1.0, -4.0]


def test_penalties_change_a_greedy_choice() -> None:
    sampler = Sampler(SamplingParams(frequency_penalty=1.0), [0, 0, 0], 3)
    chosen = []
    for _ in range(6):
        chosen.append(sampler.sample(torch.tensor([5.0, 4.5, 0.0])).id)
        sampler.accept(chosen[-1])
    assert chosen == [0, 1, 0, 1, 0, 1]


def test_frequencies_match_the_distribution() -> None:
    probabilities = torch.tensor([0.4, 0.25, 0.0, 0.2, 0.1, 0.05])
    number = 20_000
    counts = Counter(draw_many(SamplingParams(temperature=1.0, seed=5), probabilities.log(), number))
    assert 2 not in counts
    chi_square = sum(
        (counts[i] - number * p) ** 2 / (number * p) for i, p in enumerate(probabilities.tolist()) if p > 0
    )
    assert chi_square < 18.5  # 4 degrees of freedom: p = 0.001


@pytest.mark.parametrize(("point", "expected"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_uniform_draw_are_possible_tokens(
    point: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    sampler = Sampler(SamplingParams(temperature=1.0), [], 5)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(point, dtype=torch.float64))
    assert sampler.sample(logits).id == expected


def test_temperature_and_filters_shape_the_frequencies() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    number = 20_000
    counts = Counter(draw_many(SamplingParams(temperature=0.5, top_k=3, top_p=0.9, seed=1), logits, number))
    # Squares 16 : 9 : 4 (: 1, cut by top-k); 16 + 9 of 29 is below 0.9, so top-p keeps the third.
    for token_id, weight in enumerate((16, 9, 4)):
        assert counts[token_id] / number == pytest.approx(weight / 29, abs=0.015)
    assert set(counts) == {0, 1, 2}


def test_a_seed_repeats_and_neighbours_do_not_matter() -> None:
    params = SamplingParams(temperature=1.0, seed=123)
    logits = [logits_of(i) for i in range(30)]

    def run(with_neighbour: bool) -> list[int]:
        sampler, neighbour = Sampler(params, [], VOCABULARY), Sampler(SamplingParams(temperature=2.0), [], VOCABULARY)
        ids = []
        for row in logits:
            if with_neighbour:
                neighbour.sample(row)
                torch.rand(3)
            ids.append(sampler.sample(row).id)
        return ids

    assert run(False) == run(True)
    other = Sampler(SamplingParams(temperature=1.0, seed=124), [], VOCABULARY)
    assert [other.sample(row).id for row in logits] != run(False)


def test_without_a_seed_two_requests_differ() -> None:
    logits = torch.zeros(VOCABULARY)
    params = SamplingParams(temperature=1.0)
    assert draw_many(params, logits, 20) != draw_many(params, logits, 20)


def test_logprobs_are_the_models_before_penalties_and_temperature() -> None:
    logits = logits_of(3)
    best = int(logits.argmax())
    params = SamplingParams(temperature=0.3, top_k=2, repetition_penalty=50.0, logprobs=4, seed=0)
    token = Sampler(params, [best], VOCABULARY).sample(logits)
    expected = logits.double() - torch.logsumexp(logits.double(), 0)
    assert token.id != best
    assert token.logprob == pytest.approx(float(expected[token.id]), abs=1e-5)
    values, ids = expected.topk(4)
    assert [i for i, _ in token.top] == ids.tolist()
    assert [value for _, value in token.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_none_zero_and_more_than_there_are() -> None:
    logits = torch.tensor([1.0, 3.0, -math.inf, 1.0])
    assert Sampler(SamplingParams(), [], 4).sample(logits) == SampledToken(1, None, [])
    chosen_only = Sampler(SamplingParams(logprobs=0), [], 4).sample(logits)
    assert chosen_only.logprob is not None and chosen_only.top == []
    # Equal ones in the order of their ids; the impossible one is left out.
    assert [i for i, _ in Sampler(SamplingParams(logprobs=50), [], 4).sample(logits).top] == [1, 0, 3]
    assert [i for i, _ in Sampler(SamplingParams(logprobs=2), [], 4).sample(logits).top] == [1, 0]


def test_ties() -> None:
    flat = torch.zeros(1000)
    assert Sampler(SamplingParams(), [], 1000).sample(flat).id == 0
    flat[[700, 40, 900]] = 1.0
    assert Sampler(SamplingParams(), [], 1000).sample(flat).id == 40
    assert Sampler(SamplingParams(temperature=1.0, top_k=2), [], 1000).candidates(flat)[0].tolist() == [40, 700, 900]
    assert Sampler(SamplingParams(temperature=1.0, top_p=1e-9), [], 1000).candidates(flat)[0].tolist() == [40]
    assert Sampler(SamplingParams(temperature=1.0, min_p=1.0), [], 1000).candidates(flat)[0].tolist() == [40, 700, 900]


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-300, 1e-5, 1e-4])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = logits_of(9)
    assert set(draw_many(SamplingParams(temperature=temperature), logits, 20)) == {int(logits.argmax())}


def test_one_possible_token() -> None:
    logits = torch.full((50,), -math.inf)
    logits[33] = -1e4
    everything = {"top_k": 10, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 3.0, "presence_penalty": 2.0}
    for options in ({}, everything):
        for temperature in (0.0, 0.5, 100):
            params = SamplingParams(temperature=temperature, logprobs=3, **options)
            token = Sampler(params, [33], 50).sample(logits)
            assert (token.id, token.logprob, token.top) == (33, 0.0, [(33, 0.0)])


def test_logits_are_left_unchanged() -> None:
    logits = logits_of(2)
    before = logits.clone()
    params = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=2, presence_penalty=1)
    sampler = Sampler(params, [1, 2], VOCABULARY)
    sampler.accept(4)
    sampler.sample(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "1 NaN and 0 \\+inf"), (math.inf, "0 NaN and 1 \\+inf"), (None, "all -inf")]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_named(value: float | None, message: str, temperature: float) -> None:
    logits = torch.full((9,), -math.inf) if value is None else torch.zeros(9)
    if value is not None:
        logits[4] = value
    with pytest.raises(RuntimeError, match=message):
        Sampler(SamplingParams(temperature=temperature), [], 9).sample(logits)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logprobs", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("a", "")),
        ("stop", "abc"),
        ("stop_token_ids", (1, -1)),
        ("stop_token_ids", [1]),
        ("ignore_eos", 1),
    ],
)
def test_bad_options_are_named_with_their_value(option: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{option: value})
    message = str(caught.value)
    assert message.startswith(f"{option} must be") and "\n" not in message
    offender = -1 if option == "stop_token_ids" and isinstance(value, tuple) else value
    assert message.endswith(f"got {offender!r}")


def test_defaults_come_from_the_generation_config() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "min_p": None}
    assert SamplingParams.from_generation_config(config, top_k=None, temperature=0.0, seed=3) == SamplingParams(
        temperature=0.0, top_k=20, top_p=0.95, seed=3
    )
    assert SamplingParams.from_generation_config({"do_sample": True}).temperature == 1.0
    assert SamplingParams.from_generation_config({"temperature": 0.6}).greedy
    assert SamplingParams.from_generation_config({}) == SamplingParams()


def test_end_ids() -> None:
    assert SamplingParams(stop_token_ids=(5,)).end_ids([1, 2]) == {1, 2, 5}
    assert SamplingParams(stop_token_ids=(5,), ignore_eos=True).end_ids([1, 2]) == {5}
