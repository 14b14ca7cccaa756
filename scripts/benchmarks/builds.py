"""The artifacts that are measured, compiled as a user would."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.errors import InputError


@dataclass(frozen=True)
class Build:
    """What an artifact is compiled for."""

    dtype: str
    slots: int
    buckets: tuple[int, ...]
    max_length: int

    def options(self) -> list[str]:
        buckets = ",".join(map(str, self.buckets))
        sizes = ("--batch-size", self.slots, "--buckets", buckets, "--max-length", self.max_length)
        return ["--dtype", self.dtype, *map(str, sizes)]


def build_artifact(model: Path, source: ModelSource, out: Path, build: Build) -> bool:
    """Compiles an optimised artifact with the command a user would use; False: one that is there and fits is kept."""
    if out.exists():
        try:
            manifest = open_artifact(out)
        except InputError:
            manifest = None
        made = (manifest.dtype, manifest.slots, manifest.buckets, manifest.max_length) if manifest else None
        if manifest and manifest.source["fingerprint"] == source.fingerprint and made == astuple(build):
            return False
        shutil.rmtree(out)
    command = [sys.executable, "-m", "nxdi_qwen.scripts.neuron_compile", "--target", "cpu", "--optimize"]
    done = subprocess.run(
        [*command, "--model", str(model), "--out", str(out), *build.options()],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InputError(f"neuron-compile failed: {done.stderr.strip().splitlines()[-1]}")
    return True
