"""Which model it is: a hash of what its folder holds, the same wherever that is copied to."""

from __future__ import annotations

import hashlib
import os
import re
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
    checkpoint = Checkpoint.open(source.folder)
    files = [config, *sorted({checkpoint[name].file for name in checkpoint})]
    # Not the times of change alone, which copies and unpacked archives may share with other contents.
    these = hashlib.sha256()
    for file in files:
        status = file.stat()
        when = f"{status.st_mtime_ns} {status.st_ctime_ns}"
        these.update(f"{file.resolve()} {status.st_ino} {status.st_size} {when}\n".encode())
    known = memo / f"model-{these.hexdigest()[:32]}.txt"
    if known.is_file() and re.fullmatch(rb"[0-9a-f]{64}", found := known.read_bytes()):
        return found.decode()
    digest = hashlib.sha256()
    for done, file in enumerate(files, start=1):
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
        progress("hash", done, len(files))
    partial = known.with_suffix(f".{os.getpid()}")
    partial.write_text(digest.hexdigest())
    partial.replace(known)
    return digest.hexdigest()
