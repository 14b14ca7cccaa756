"""Sides by name, as a command line has them: KIND, or KIND:DETAIL."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.distributed import check_ranks
from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.source import DTYPES, ModelSource, Progress, no_progress
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.identity import model_sha256
from nxdi_qwen.parity.targets.artifact import ArtifactSide
from nxdi_qwen.parity.targets.eager import EagerSide
from nxdi_qwen.parity.targets.huggingface import HuggingFaceSide
from nxdi_qwen.parity.targets.server import UNKNOWN, ServerSide
from nxdi_qwen.parity.targets.side import OF_THE_CHECKPOINT, Side
from nxdi_qwen.parity.targets.stored import StoredSide

_LOADED = ("huggingface", "eager", "nxdi", "lowered")
_PLACED = ("artifact", "server", "stored")
FORMS = (
    "huggingface[:DTYPE], eager[:DTYPE], artifact:DIR, nxdi[:DTYPE], lowered[:DTYPE], server:URL or stored:DIR; "
    f"DTYPE is {' or '.join(DTYPES)}"
)


@dataclass(frozen=True)
class Kind:
    """A side as it was asked for. `place`: folder or address, for those that have one; `dtype`: None where it was left
    open.
    """

    name: str
    place: str
    dtype: str | None

    @classmethod
    def parse(cls, text: str, dtype: str | None = None) -> Kind:
        """`dtype`: one that was given apart. Raises InputError for anything but the forms above."""
        name, _, detail = text.partition(":")
        if name in _LOADED:
            if detail and (detail not in DTYPES or dtype not in (None, detail)):
                raise InputError(f"{text} is no side to compare, or of another dtype than {dtype}: give {FORMS}")
            return cls(name, "", detail or dtype)
        if name not in _PLACED or not detail:
            raise InputError(f"{text} is no side to compare: give {FORMS}")
        return cls(name, detail, dtype)


class Opener:
    """Opens sides of one checkpoint.

    memo: a folder for what identifies it. ranks: processes that run together; leading: rank 0's way to lead them.
    """

    def __init__(
        self,
        folder: Path | None,
        memo: Path,
        progress: Progress = no_progress,
        ranks: int = 1,
        leading: Callable[[Executor], Executor] = lambda executor: executor,
    ) -> None:
        self.folder = folder
        self.memo = memo
        self.progress = progress
        self._ranks = ranks
        self._leading = leading

    @functools.cached_property
    def source(self) -> ModelSource:
        """The checkpoint. Raises InputError where none was given, or it does not fit."""
        if self.folder is None:
            raise InputError("this needs the checkpoint: give its folder with --model")
        return ModelSource.from_checkpoint(self.folder)

    @functools.cached_property
    def sha256(self) -> str:
        """Of the checkpoint; reads all of it once."""
        return model_sha256(self.source, self.memo, self.progress)

    def open(self, kind: Kind, config: ModelConfig | None = None) -> Side:
        """Checks what can be checked without reading weights. `config`: for a server where there is no checkpoint."""
        dtype = kind.dtype or "float32"
        match kind.name:
            case "huggingface":
                return HuggingFaceSide(self.source, dtype)
            case "eager":
                return EagerSide.of_checkpoint(self.source, dtype, self.progress)
            case "artifact":
                return self._artifact(Path(kind.place), kind.dtype)
            case "server":
                return ServerSide(kind.place, config or self.source.config, kind.dtype)
            case "stored":
                return StoredSide(Path(kind.place), self.progress)
            case "nxdi":
                from nxdi_qwen.parity.targets.nxdi import NxdiSide

                return NxdiSide(self.source, dtype)
            case _:
                from nxdi_qwen.parity.targets.lowered import LoweredSide

                return LoweredSide(self.source, dtype, self.progress)

    def identify(self, *sides: Side) -> None:
        """Says of every side which model it is. Raises InputError where two are not the same."""
        for side in sides:
            if side.description.model_sha256 == OF_THE_CHECKPOINT:
                side.description = replace(side.description, model_sha256=self.sha256)
        first, *others = [side for side in sides if side.description.model_sha256 != UNKNOWN] or sides
        for other in others:
            if first.description.model_sha256 != other.description.model_sha256:
                kinds = f"{first.description.kind} and {other.description.kind}"
                raise InputError(f"{kinds} are of different models: compare two sides of one checkpoint")

    def _artifact(self, folder: Path, dtype: str | None) -> ArtifactSide:
        manifest = open_artifact(folder)
        check_ranks(manifest, self._ranks)
        if manifest.source["fingerprint"] != self.source.fingerprint:
            raise InputError(f"{folder} was compiled from another checkpoint than {self.folder}; compile it again")
        if dtype not in (None, manifest.dtype):
            raise InputError(f"{folder} is {manifest.dtype}, not {dtype}: leave --dtype out")
        return ArtifactSide(folder, manifest, self._leading, self.progress)
