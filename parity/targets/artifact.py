"""An artifact of the target cpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from nxdi_qwen.compile.cpu import GraphExecutor, load_cpu
from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.manifest import Manifest
from nxdi_qwen.compile.source import DTYPES, Progress, no_progress
from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.parity.records import Description
from nxdi_qwen.parity.targets.eager import EagerSide
from nxdi_qwen.parity.targets.side import OF_THE_CHECKPOINT
from nxdi_qwen.parity.targets.slots import SlotSide
from nxdi_qwen.parity.targets.tap import GraphTap

_ONE_RANK = "its graphs tell no experts and run no layer alone: the eager model on its weights does"
_RANKS = "every rank keeps its own part of the state, and its layers cannot be seen: only the logits are compared"


class ArtifactSide(SlotSide):
    """Graphs with explicit states. `leading`: rank 0's way to make all ranks run what it runs."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        leading: Callable[[Executor], Executor] = lambda executor: executor,
        progress: Progress = no_progress,
    ) -> None:
        """`manifest`: from `open_artifact`."""
        notes = (_ONE_RANK if manifest.degree == 1 else _RANKS,)
        description = Description("artifact", OF_THE_CHECKPOINT, manifest.dtype, manifest.libraries, notes)
        super().__init__(description, manifest.model, manifest.max_length)
        self._folder = folder
        self._manifest = manifest
        self._leading = leading
        self._progress = progress
        self._executor: GraphExecutor | None = None

    @property
    def has_states(self) -> bool:
        return self._manifest.degree == 1

    @property
    def tap(self) -> GraphTap | None:
        if self._executor is None or self._manifest.degree != 1:
            return None
        return GraphTap(self._executor.model, self.config.num_hidden_layers)

    def make_executor(self, tokens: int) -> Executor:
        self._executor = load_cpu(self._folder, self._manifest, progress=self._progress)
        return self._leading(self._executor)

    def release(self) -> None:
        super().release()
        self._executor = None

    def twin(self) -> EagerSide | None:
        """The eager model on the artifact's own weights."""
        if self._manifest.degree != 1:
            return None
        return EagerSide(self.description, self.config, self._load_eager)

    def _load_eager(self) -> HybridCausalLM:
        with torch.device("meta"):
            model = HybridCausalLM(self.config, DTYPES[self.description.dtype])
        weights = load_file(self._folder / self._manifest.weights[0].file)
        model.load_state_dict(weights, strict=True, assign=True)
        return model.requires_grad_(False).eval()
