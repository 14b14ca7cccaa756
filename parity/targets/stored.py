"""Results that were kept: a folder of runs, from this machine or another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nxdi_qwen.compile.source import Progress, no_progress
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.records import Description, Prompt, Run
from nxdi_qwen.parity.run_file import PARTIAL, SUFFIX, check_run, read_run, write_run
from nxdi_qwen.parity.targets.side import Side


class StoredSide(Side):
    """Gives back what `StoredRuns` wrote; it can run nothing else.

    `prompts`: those that are there. What its continuations are, the other side is forced along.
    """

    def __init__(self, folder: Path, progress: Progress = no_progress) -> None:
        """Reads and checks all files. Raises InputError for a folder that is not as it was written."""
        files = sorted(path for path in folder.glob(f"*{SUFFIX}") if not path.name.startswith(PARTIAL))
        if not files:
            raise InputError(f"no stored results in {folder}: write them with --save {folder}")
        self._headers = {}
        for done, path in enumerate(files, start=1):
            header = check_run(path, "copy it again, or write the folder again with --save")
            self._headers[header.prompt.ids] = path, header
            progress("stored", done, len(files))
        _, first = self._headers[next(iter(self._headers))]
        for path, header in self._headers.values():
            if (header.description, header.config) != (first.description, first.config):
                raise InputError(f"{path} is of another run than the others in {folder}: keep one run in a folder")
        self.prompts = [header.prompt for _, header in self._headers.values()]
        notes = (f"stored results of {first.description.kind}", *first.description.notes)
        description = replace(first.description, kind="stored", notes=notes)
        super().__init__(description, first.config, first.config.max_position_embeddings)
        self._folder = folder

    def expect(self, prompts: Sequence[Prompt], steps: int) -> None:
        for prompt in prompts:
            forced = self.forced(prompt)
            if len(forced) != steps:
                raise InputError(f"{self._folder} has {len(forced)} decode steps of prompt {prompt.name}, not {steps}")

    def forced(self, prompt: Prompt) -> tuple[int, ...]:
        """The tokens that follow a prompt. Raises InputError for one that is not there."""
        if prompt.ids not in self._headers:
            raise InputError(
                f"{self._folder} has no run of prompt {prompt.name}: leave --prompts out, or save it again"
            )
        return self._headers[prompt.ids][1].forced

    def run(self, prompt: Prompt, forced: Sequence[int] | None, steps: int) -> Run:
        own = self.forced(prompt)
        if forced is not None and tuple(forced) != own:
            raise InputError(f"{self._folder} has another continuation of prompt {prompt.name}: save it again")
        path, header = self._headers[prompt.ids]
        return replace(read_run(path, header), prompt=prompt)


class StoredRuns:
    """Writes a folder that `StoredSide` reads, one run after the other."""

    def __init__(self, folder: Path, description: Description, config: ModelConfig) -> None:
        """Raises InputError where something stands already, or nothing can be written."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} exists: remove it, or choose another folder with --save")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write {folder} ({error.strerror}): choose another folder with --save") from error
        self._folder, self._description, self._config = folder, description, config
        self._written = 0

    def add(self, run: Run) -> None:
        self._written += 1
        write_run(self._folder, f"{self._written:04d}", run, self._description, self._config)
