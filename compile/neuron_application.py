"""A compiled NxDI application on a Neuron host, and requests in its slots as the CPU target's `SlotRunner` has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nxdi_qwen.compile.neuron_artifact import NeuronArtifact
from nxdi_qwen.compile.neuron_requests import Application, Output, Requests
from nxdi_qwen.modeling.errors import InputError


def load_application(artifact: NeuronArtifact) -> Any:
    """The NxDI application, loaded to the device and warmed up by NxDI."""
    from nxdi_qwen.modeling.nxdi.config import HybridInferenceConfig  # imports NxDI, as the next
    from nxdi_qwen.modeling.nxdi.causal_lm import NeuronHybridForCausalLM  # isort: skip

    folder = str(artifact.folder)
    application = NeuronHybridForCausalLM(folder, HybridInferenceConfig.load(folder))
    application.load(folder)
    return application


class NeuronSlots:
    """Prefills and decodes by slot; the graphs have to return logits."""

    def __init__(self, application: Application, slots: int) -> None:
        self._requests = Requests(application)
        self._slots = slots

    @property
    def lengths(self) -> list[int]:
        """The tokens in each slot; 0 in one that was not used yet."""
        return [self._requests.lengths.get(slot, 0) for slot in range(self._slots)]

    def prefill(self, slot: int, ids: Sequence[int]) -> Tensor:
        """Starts a request in `slot`, whatever it held. Returns logits [V] float32 after the last token."""
        return _logits(self._requests.prefill(slot, ids))[0]

    def prefill_blocks(self, slot: int, ids: Sequence[int]) -> Iterator[Tensor]:
        """Raises InputError: the graphs return the last token's logits alone."""
        raise InputError("the logits of a prompt's tokens are not to be had from a graph for Neuron: ask for the last")

    def decode(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """One step for the slots named, each with its next token: logits [V] float32 by slot."""
        return dict(zip(tokens, _logits(self._requests.decode(tokens)), strict=True))


def _logits(output: Output) -> Tensor:
    assert output.logits is not None
    return output.logits.to(torch.float32)
