"""The graphs that NxDI traces, lowered to HLO and run on XLA's CPU backend, with NxDI's own code around them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nxdi_qwen.compile.artifact import current_libraries
from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.source import DTYPES, ModelSource, Progress, no_progress
from nxdi_qwen.parity.records import Description, Prompt, Run
from nxdi_qwen.parity.targets.eager import EagerSide
from nxdi_qwen.parity.targets.nxdi_application import HostedGraphs, LoweredApplication, check_nxdi
from nxdi_qwen.parity.targets.side import OF_THE_CHECKPOINT, Side
from nxdi_qwen.parity.targets.states import StateLog

SLOTS = 3
# Graphs run a few times, so that compiling must be fast, and 16-bit results are rounded where the graph says so.
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_allow_excess_precision=false"
NOTES = (
    "a context graph returns the logits after its last token only: every other position is a run of its own",
    "its graphs return no hidden states of single layers",
)


class LoweredSide(Side):
    """The state starts as NaN, on which nothing may rely."""

    def __init__(self, source: ModelSource, dtype: str, progress: Progress = no_progress) -> None:
        """Raises InputError where NxDI or torch_xla is missing."""
        check_nxdi("lowered", "torch_xla")
        description = Description("lowered", OF_THE_CHECKPOINT, dtype, current_libraries(), NOTES)
        super().__init__(description, source.config, source.config.max_position_embeddings)
        assert source.folder is not None
        self._source = source
        self._folder = source.folder
        self._progress = progress
        self._graphs: HostedGraphs | None = None
        self._slot = 0

    def twin(self) -> EagerSide:
        return EagerSide.of_checkpoint(self._source, self.description.dtype)

    def release(self) -> None:
        self._graphs = None

    @torch.no_grad()
    def run(self, prompt: Prompt, forced: Sequence[int] | None, steps: int) -> Run:
        steps = steps if forced is None else len(forced)
        count = len(prompt.ids)
        graphs = self._loaded(count + steps)
        slot = self._slot = (self._slot + 1) % SLOTS
        tokens: list[int] = []
        logits: list[Tensor] = []
        log = StateLog(graphs.description, slot)
        for length in range(1, count + 1):  # the last one is the whole prompt, and leaves its state
            logits.append(graphs.forward([prompt.ids[:length]], [0], [slot])[0, -1:].float())
            self._progress("positions", length, count)
        log.add([graphs.values[name] for name in graphs.state_names])
        for step in range(steps):
            tokens.append(int(logits[-1][-1].argmax()) if forced is None else forced[step])
            logits.append(graphs.forward([tokens[-1:]], [count + step], [slot])[0, -1:].float())
            log.add([graphs.values[name] for name in graphs.state_names])
        return Run(prompt, tuple(tokens), torch.cat(logits), states=log.states(count + steps))

    def _loaded(self, tokens: int) -> HostedGraphs:
        """The graphs, lowered again if their slots are too short."""
        graphs = self._graphs
        if graphs is None or graphs.description.max_length < tokens:
            self._graphs = None
            os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
            length = max(self.longest, tokens)
            graphs = self._graphs = HostedGraphs(LoweredApplication(self._folder, **self._options(length)))
        return graphs

    def _options(self, length: int) -> dict[str, Any]:
        # NxDI takes the first bucket that is longer than the prompt, and only the last one may be filled.
        top = Buckets.choose(length + 1).lengths[-1]
        return {
            "batch_size": SLOTS,
            "ctx_batch_size": 1,
            "is_continuous_batching": True,
            "torch_dtype": DTYPES[self.description.dtype],
            "seq_len": top,
            "max_context_length": top,
            "context_encoding_buckets": sorted({64, top}),
            "token_generation_buckets": [top],
        }
