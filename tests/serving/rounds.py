"""One round of random traffic on a server, everything about it checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.serving.server import Metrics, Server
from tests.serving.stored import Greedy
from tests.serving.traffic import Outcome, fill_all_slots, replay

# So few blocks that requests are preempted: one of the greatest length needs 19 of them, the shortest 4, vLLM itself 1.
SMALL_POOL = ("--num-gpu-blocks-override", "40")


@dataclass(frozen=True)
class Round:
    """How many requests were sent, how many clients left, and how often vLLM preempted."""

    requests: int
    left: int
    preemptions: int


def one_round(
    server: Server, completions: Sequence[Greedy], *, seed: int, leaving: float, small_pool: bool = False
) -> Round:
    """Sends all completions at random times, the share `leaving` of the clients going away.

    Asserts that every token is Hugging Face's; that then nothing runs, waits or holds a block; that every request is
    accounted for; and that all slots can be used again, at once unless the server has `SMALL_POOL`.
    """
    before = server.settled()
    outcomes = replay(server, completions, seed=seed, leaving=leaving)
    for outcome in outcomes:
        outcome.check()
    after = server.settled()
    left = sum(outcome.gone for outcome in outcomes)
    accounted_for(before, after, outcomes)
    fill_all_slots(server, completions, at_once=not small_pool)
    preemptions = server.settled()["num_preemptions_total"] - before["num_preemptions_total"]
    return Round(len(outcomes), left, int(preemptions))


def accounted_for(before: Metrics, after: Metrics, outcomes: Sequence[Outcome]) -> None:
    """Asserts that the metrics tell of every request, of how each one ended, and of every preemption."""
    path = "/v1/completions"
    left = sum(outcome.gone for outcome in outcomes)
    answered = after.accepted(path) - before.accepted(path)
    # A client may have left before it sent anything.
    assert len(outcomes) - left <= answered <= len(outcomes), f"{answered} answered of {len(outcomes)}, {left} left"
    assert after.refused(path) == before.refused(path)
    finished = {reason: count - before.finished[reason] for reason, count in after.finished.items()}
    for reason in ("stop", "length"):
        seen = sum(outcome.finish_reason == reason for outcome in outcomes)
        # The last token may have been made just before its client left.
        assert seen <= finished[reason] <= seen + left, f"{finished} requests finished, clients saw {seen} {reason}"
    assert finished["error"] == finished["repetition"] == 0
    given_up = after.given_up(path) - before.given_up(path)
    assert given_up <= left and finished["stop"] + finished["length"] + given_up >= answered
    if not left:
        of_requests = after["request_num_preemptions_sum"] - before["request_num_preemptions_sum"]
        assert of_requests == after["num_preemptions_total"] - before["num_preemptions_total"]
