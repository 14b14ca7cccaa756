"""Sides that run in slots: the eager model and artifacts, through the runner that serves requests."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.slot_runner import SlotRunner
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.parity.records import Description, Prompt, Run
from nxdi_qwen.parity.targets.side import Side
from nxdi_qwen.parity.targets.states import StateLog
from nxdi_qwen.parity.targets.tap import Tap, joined


class SlotSide(Side):
    """Runs an executor, every prompt in the next slot: beside it stand what earlier ones left, and its own slot is
    not clean either.
    """

    def __init__(self, description: Description, config: ModelConfig, room: int) -> None:
        super().__init__(description, config, room)
        self._runner: SlotRunner | None = None
        self._slot = 0

    @abc.abstractmethod
    def make_executor(self, tokens: int) -> Executor:
        """Loads an executor whose slots hold at least `tokens` tokens."""

    @property
    def tap(self) -> Tap | None:
        """The hooks on the model that `make_executor` loaded; None where its layers cannot be seen."""
        return None

    @property
    def has_states(self) -> bool:
        """Whether the runner's state is the whole one."""
        return True

    def release(self) -> None:
        self._runner = None

    def run(self, prompt: Prompt, forced: Sequence[int] | None, steps: int) -> Run:
        steps = steps if forced is None else len(forced)
        total = len(prompt.ids) + steps
        runner = self._runner
        if runner is None or runner.executor.description.max_length < total:
            self._runner = None  # frees the old state first
            runner = self._runner = SlotRunner(self.make_executor(max(self.longest, total)))
        slot = self._slot = (self._slot + 1) % runner.executor.description.slots
        tap = self.tap
        log = StateLog(runner.executor.description, slot)
        tokens: list[int] = []
        with tap.open() if tap else nullcontext():
            logits = [runner.prefill_all_logits(slot, prompt.ids)]
            pieces = [count for _, count in runner.executor.buckets.cut(len(prompt.ids))]
            caught = [tap.take(0, pieces)] if tap else []
            log.add(runner.state)
            for step in range(steps):
                tokens.append(int(logits[-1][-1].argmax()) if forced is None else forced[step])
                logits.append(runner.decode({slot: tokens[-1]})[slot][None])
                caught += [tap.take(slot, [1])] if tap else []
                log.add(runner.state)
        seen = joined(caught) if caught else None
        return Run(
            prompt,
            tuple(tokens),
            torch.cat(logits),
            hidden=seen.hidden if seen else None,
            states=log.states(total) if self.has_states else None,
            experts=seen.experts if seen else None,
            router_margins=seen.margins if seen else None,
        )
