"""A target as a command opens it: described and checked at once, loaded by its first run."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nxdi_qwen.compile.slot_runner import check_prompt
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.records import Description, Prompt, Run, Target

if TYPE_CHECKING:
    from nxdi_qwen.parity.layer_run import LayerCase, LayerRun
    from nxdi_qwen.parity.plain_weights import OuterWeights, Weights

OF_THE_CHECKPOINT = "of the checkpoint"
"""Stands for the model's hash until that is known: it takes reading all weights."""


class Side(abc.ABC):
    """A `Target`.

    `room`: the tokens that a prompt and what follows it may have together. `longest`: what `expect` was told, 0 before.
    """

    def __init__(self, description: Description, config: ModelConfig, room: int) -> None:
        self.description = description
        self.config = config
        self.room = room
        self.longest = 0

    def expect(self, prompts: Sequence[Prompt], steps: int) -> None:
        """Before anything is computed: raises InputError for a prompt that cannot be run, and learns the longest."""
        for prompt in prompts:
            try:
                check_prompt(prompt.ids, self.config.vocab_size, self.room - steps)
            except InputError as error:
                raise InputError(f"prompt {prompt.name}: {error} ({steps} decode steps follow)") from None
        self.longest = max(len(prompt.ids) for prompt in prompts) + steps

    @abc.abstractmethod
    def run(self, prompt: Prompt, forced: Sequence[int] | None, steps: int) -> Run:
        """As `Target.run`."""

    def run_layer(self, index: int, case: LayerCase) -> LayerRun | None:
        """As `Target.run_layer`."""
        return None

    def layer_weights(self, index: int) -> Weights | None:
        """As `Target.layer_weights`."""
        return None

    def outer_weights(self) -> OuterWeights | None:
        """As `Target.outer_weights`."""
        return None

    def twin(self) -> Target | None:
        """Another target with this one's weights that has the hidden states and the layers which this one lacks."""
        return None

    def release(self) -> None:
        """Frees the model. A later run loads it again."""
        return
