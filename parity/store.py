"""Runs of the references, kept on disk by what they were computed from.

The library `diskcache` was considered: it takes and gives values as whole byte strings, which doubles the memory of
runs of half a gigabyte, and names its files by chance, so that no message could say which one is damaged. Here a file
is one run, in the form that stored results have as well, and looking is all it takes to see what is there.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.records import Description, Prompt, Run
from nxdi_qwen.parity.run_file import PARTIAL, Header, check_run, find_run, read_run, write_run

GIGABYTE = 1 << 30
DEFAULT_LIMIT = 20 * GIGABYTE
_OWN = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{16}\.safetensors")
_ABANDONED = 3600  # seconds after which a half-written file is that of a process that was killed


def default_folder() -> Path:
    """Where this machine's user keeps caches."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("nxdi-qwen")) / "parity"


def run_key(description: Description, prompt: Prompt, forced: Sequence[int] | None, steps: int) -> str:
    """Equal for runs that must have equal results: the same model, arithmetic, libraries and tokens."""
    content = {
        "model": description.model_sha256,
        "kind": description.kind,
        "dtype": description.dtype,
        "versions": description.versions,
        "prompt": prompt.ids,
        "continuation": steps if forced is None else list(forced),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


class Store:
    """A folder of runs of at most `limit` bytes. What was not used for longest goes first, never what this process
    has used itself: that goes at `trim`.
    """

    def __init__(self, folder: Path, limit: int = DEFAULT_LIMIT) -> None:
        """Raises InputError where nothing can be written to `folder`."""
        self.folder = folder
        self.limit = limit
        self._checked: dict[Path, Header] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise InputError(f"cannot write the cache {folder} ({error}): choose another with --cache") from error

    def header(self, key: str) -> Header | None:
        """What a kept run says about itself; None where there is none. Raises InputError for a damaged file."""
        path = find_run(self.folder, key)
        if path is None:
            return None
        if path not in self._checked:
            self._checked[path] = check_run(path, "remove it, or choose another cache with --cache")
        path.touch()
        return self._checked[path]

    def get(self, key: str, prompt: Prompt) -> Run | None:
        """A kept run, as that of `prompt`, which may have another name now; None where there is none."""
        header, path = self.header(key), find_run(self.folder, key)
        return None if header is None or path is None else replace(read_run(path, header), prompt=prompt)

    def put(self, key: str, run: Run, description: Description, config: ModelConfig) -> None:
        """Keeps a run, and makes room for it."""
        try:
            path = write_run(self.folder, key, run, description, config)
        except OSError as error:
            raise InputError(f"cannot write the cache {self.folder} ({error}): choose another with --cache") from error
        self._checked[path] = Header(run.prompt, run.forced, description, config)
        self._evict(keep=set(self._checked))

    def trim(self) -> None:
        """Makes the limit hold, whatever was used."""
        self._evict(keep=set())

    def _evict(self, keep: set[Path]) -> None:
        files = []
        for path in self.folder.iterdir():  # nothing else is touched, whatever folder this is
            with suppress(FileNotFoundError):  # another process makes room as well
                if path.name.startswith(PARTIAL) and time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()
                elif _OWN.fullmatch(path.name):
                    files.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit:
                return
            if path not in keep:
                path.unlink(missing_ok=True)
                total -= size
