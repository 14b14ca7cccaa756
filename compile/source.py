"""Where a model comes from: a checkpoint folder, or a preset with random weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from nxdi_qwen.compile.text import TOKENIZER_FILE, TextCodec
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.config_loader import CONFIG_FILE, GENERATION_FILE, load_config
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.generation_defaults import GenerationDefaults
from nxdi_qwen.modeling.model import HybridCausalLM
from nxdi_qwen.modeling.parallel import parameter_cuts, with_cuts
from nxdi_qwen.modeling.partition import SINGLE, Parallel
from nxdi_qwen.modeling.presets import preset
from nxdi_qwen.modeling.weights import (
    Block,
    Checkpoint,
    checkpoint_blocks,
    collect,
    plan_weights,
    random_blocks,
    weight_specs,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RANDOM_SEED = 0

Progress = Callable[[str, int, int], None]
"""``progress(stage, done, total)``: called as long work goes on; the unit is the stage's own."""


def no_progress(stage: str, done: int, total: int) -> None:
    """For callers that show nothing."""


@dataclass(frozen=True)
class ModelSource:
    """A model that is checked but not yet read.

    `blocks(dtype)` streams the rows of its parameters in the order of `modeling.weights.weight_specs`. `fingerprint`
    tells checkpoints apart without reading them: a hash over all tensors' names, shapes, dtypes and places, and over
    the files' sizes and times of change. `notes` are lines worth showing; `text_files` are the tokenizer's and
    `config_files` the configuration's, below `folder`.
    """

    name: str
    config: ModelConfig
    generation: GenerationDefaults
    fingerprint: str
    notes: tuple[str, ...]
    folder: Path | None
    text_files: tuple[Path, ...]
    config_files: tuple[Path, ...]
    blocks: Callable[[torch.dtype], Iterator[Block]]

    @classmethod
    def from_checkpoint(cls, folder: Path) -> ModelSource:
        """Checks configuration and headers of a checkpoint folder. Raises InputError for anything that does not fit."""
        loaded = load_config(folder)
        checkpoint = Checkpoint.open(folder)
        plan = plan_weights(loaded.config, checkpoint, loaded.quantization)
        return cls(
            name=folder.resolve().name,
            config=plan.config,
            generation=loaded.generation,
            fingerprint=_fingerprint(checkpoint),
            notes=(*loaded.notes, *plan.notes),
            folder=folder,
            text_files=tuple(TextCodec.files(folder)),
            config_files=tuple(filter(Path.is_file, (folder / CONFIG_FILE, folder / GENERATION_FILE))),
            blocks=lambda dtype: checkpoint_blocks(plan, checkpoint, dtype),
        )

    def notes_on_text(self) -> list[str]:
        """What prevents text with this checkpoint; token ids need no tokenizer. Reads the tokenizer."""
        if self.folder is None or not (self.folder / TOKENIZER_FILE).is_file():
            return []
        try:
            TextCodec.from_folder(self.folder)
        except InputError as error:
            return [f"token ids will work and text will not: {error}"]
        return []

    @classmethod
    def from_preset(cls, name: str) -> ModelSource:
        """A public shape with random weights, always the same ones. Raises InputError for an unknown name."""
        config = preset(name)
        return cls(
            name=name,
            config=config,
            generation=GenerationDefaults(),
            fingerprint=f"random-{RANDOM_SEED}",
            notes=("random weights: the shapes are those of the public model, the text is noise",),
            folder=None,
            text_files=(),
            config_files=(),
            blocks=lambda dtype: random_blocks(config, dtype, RANDOM_SEED),
        )

    def load(self, dtype: torch.dtype, parallel: Parallel = SINGLE, progress: Progress = no_progress) -> HybridCausalLM:
        """One rank's eager model with its weights, in `dtype`; beside it, a few rows of a parameter are in memory."""
        with torch.device("meta"):
            model = HybridCausalLM(self.config, dtype, parallel)
        specs = weight_specs(self.config, dtype, parallel)
        for done, (name, tensor) in enumerate(collect(self.blocks(dtype), self.config, dtype, parallel), start=1):
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            if attribute in module._buffers:
                module._buffers[attribute] = tensor
            else:
                placeholder = module._parameters[attribute]
                assert placeholder is not None
                parameter = torch.nn.Parameter(tensor, requires_grad=False)
                module._parameters[attribute] = with_cuts(parameter, parameter_cuts(placeholder))
            progress("weights", done, len(specs))
        return model.eval()


def _fingerprint(checkpoint: Checkpoint) -> str:
    digest = hashlib.sha256()
    files = set()
    for name in sorted(checkpoint):
        info = checkpoint[name]
        files.add(info.file)
        digest.update(f"{name} {info.shape} {info.dtype} {info.file.name} {info.offset}\n".encode())
    for file in sorted(files):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
