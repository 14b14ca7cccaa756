"""What a Neuron artifact says about itself, read without NxDI: the folder that NxDI wrote for `neuron-compile`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxdi_qwen.compile.artifact import file_sha256, weights_file
from nxdi_qwen.compile.manifest import HLO_REPORT, MANIFEST_FILE, NEURON_CONFIG
from nxdi_qwen.compile.source import DTYPES
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.partition import Parallel
from nxdi_qwen.modeling.state import StateDescription, describe_state

COMPILED_MODEL = "model.pt"
# Options that neuron-compile never sets and whose calls need more than ids, positions and slots.
_OTHER_CALLS = ("is_block_kv_layout", "async_mode", "speculation_length")


@dataclass(frozen=True)
class NeuronArtifact:
    """`context_buckets` (prompt lengths), `decode_buckets` (cache lengths) and `continuation_buckets` (pieces of longer
    prompts; empty: none) are ascending; `samples`: graphs return tokens, and logits only if `returns_logits`.
    `weights` are the files of the ranks of this host.
    """

    folder: Path
    config_sha256: str  # of neuron_config.json
    model: ModelConfig
    dtype: str
    degree: int
    logical_cores: int
    slots: int
    max_length: int
    context_buckets: tuple[int, ...]
    decode_buckets: tuple[int, ...]
    continuation_buckets: tuple[int, ...]
    samples: bool
    returns_logits: bool
    weights: tuple[Path, ...]

    @property
    def state(self) -> StateDescription:
        """Of one rank; all are alike."""
        return describe_state(self.model, self.slots, self.max_length, DTYPES[self.dtype], Parallel(self.degree))

    def buckets_of_prompt(self, tokens: int) -> list[int]:
        """Of the pieces that the application cuts a prompt into: as long as the largest bucket, and the rest."""
        largest = self.context_buckets[-1]
        lengths = [min(largest, tokens - begin) for begin in range(0, tokens, largest)]
        rest = [chosen_bucket(length, self.continuation_buckets) for length in lengths[1:]]
        return [chosen_bucket(lengths[0], self.context_buckets), *rest]

    def check_length(self, tokens: int, more: int) -> None:
        """Raises InputError unless a prompt of `tokens` tokens and `more` behind it fit."""
        if tokens + more > self.max_length:
            raise InputError(
                f"a prompt of {tokens} tokens and {more} new ones do not fit the artifact's maximum length "
                f"{self.max_length}: take fewer, or compile with a larger --max-length"
            )
        if tokens > self.context_buckets[-1] and not self.continuation_buckets:
            raise InputError(
                f"a prompt of {tokens} tokens is above the largest bucket {self.context_buckets[-1]}, and the artifact "
                "has no graph for pieces: take a shorter one, or compile with a larger bucket"
            )

    def check_model(self, model: ModelConfig) -> None:
        """Raises InputError where the artifact was compiled for another model."""
        for field in dataclasses.fields(ModelConfig):
            ours, theirs = getattr(self.model, field.name), getattr(model, field.name)
            if ours != theirs:
                raise InputError(
                    f"{self.folder} was compiled for another model than --model: {field.name} is {ours} there and "
                    f"{theirs} here; give the checkpoint that it was compiled from"
                )


def chosen_bucket(length: int, buckets: tuple[int, ...]) -> int:
    """The bucket that NxDI takes for `length` tokens: the first that is longer, the last one also if it is as long."""
    return next((bucket for bucket in buckets if length < bucket), buckets[-1])


def open_neuron_artifact(folder: Path) -> NeuronArtifact:
    """Raises InputError, with the reason, for anything but a whole artifact of the target neuron."""
    if not folder.is_dir():
        raise InputError(f"no artifact at {folder}: compile one with neuron-compile --target neuron --out {folder}")
    path = folder / NEURON_CONFIG
    if not path.is_file():
        found = "it has no " + NEURON_CONFIG
        if (folder / MANIFEST_FILE).is_file():
            found = "it is one of the target cpu, which nxdi-qwen-generate and logit-diff run"
        elif (folder / HLO_REPORT).is_file():
            found = "it holds lowered graphs of the target hlo, which are not run"
        raise InputError(f"{folder} is no artifact of the target neuron: {found}")
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        raise InputError(f"{path} is damaged: it is not JSON; compile the artifact again") from None
    if not isinstance(content, dict) or "hybrid_model" not in content:
        raise InputError(f"{path} describes no model of this project: compile one with neuron-compile --target neuron")
    try:
        artifact = _from_content(folder, content)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} lacks what this version reads ({error}): compile the artifact again") from error
    for file in (folder / COMPILED_MODEL, *artifact.weights):
        if not file.is_file():
            raise InputError(f"{folder} is no whole artifact, {file.relative_to(folder)} is missing: compile it again")
    return artifact


def _from_content(folder: Path, content: dict[str, Any]) -> NeuronArtifact:
    options = content["neuron_config"]
    for name in _OTHER_CALLS:
        if options[name]:
            raise InputError(f"{folder} was compiled with {name}={options[name]}, which is not measured: leave it out")
    sampling = options["on_device_sampling_config"]
    if sampling is not None and (sampling["do_sample"] or sampling["dynamic"]):
        raise InputError(f"{folder} draws its tokens at random: compile it with greedy sampling to compare them")
    first = options["start_rank_id"]
    return NeuronArtifact(
        folder=folder,
        config_sha256=file_sha256(folder / NEURON_CONFIG),
        model=ModelConfig.from_dict(content["hybrid_model"]),
        dtype=options["torch_dtype"],
        degree=options["tp_degree"],
        logical_cores=options["logical_nc_config"],
        slots=options["kv_cache_batch_size"],
        max_length=options["max_length"],
        context_buckets=tuple(options["context_encoding_buckets"] or [options["max_context_length"]]),
        decode_buckets=tuple(options["token_generation_buckets"] or [options["max_length"]]),
        continuation_buckets=tuple(options["continuation_buckets"] or ()),
        samples=sampling is not None,
        returns_logits=sampling is None or options["output_logits"],
        weights=tuple(folder / weights_file(rank) for rank in range(first, first + options["local_ranks_size"])),
    )
