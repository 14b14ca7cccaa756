"""Which model it is: a hash of what its folder holds, the same wherever that is copied to."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from nxdi_qwen.compile.artifact import file_sha256
from nxdi_qwen.compile.source import ModelSource, Progress, no_progress
from nxdi_qwen.modeling.weights import Checkpoint

CONFIG_FILE = "config.json"


def model_sha256(source: ModelSource, memo: Path, progress: Progress = no_progress) -> str:
    """SHA-256 over the names and the hashes of the configuration and of all files with weights.

    Reads everything once (about a second a gigabyte): what it found for these very files, with these times of change,
    it keeps in the folder `memo`. `source` is a checkpoint folder's. `progress` stage: "hash" (files).
    """
    assert source.folder is not None
    config = source.folder / CONFIG_FILE
    known = memo / f"model-{hashlib.sha256((source.fingerprint + file_sha256(config)).encode()).hexdigest()[:32]}.txt"
    if known.is_file() and len(found := known.read_text()) == hashlib.sha256().digest_size * 2:
        return found
    checkpoint = Checkpoint.open(source.folder)
    files = [config, *sorted({checkpoint[name].file for name in checkpoint})]
    digest = hashlib.sha256()
    for done, file in enumerate(files, start=1):
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
        progress("hash", done, len(files))
    partial = known.with_suffix(f".{os.getpid()}")
    partial.write_text(digest.hexdigest())
    partial.replace(known)
    return digest.hexdigest()
