"""A run on disk: one safetensors file, which carries the hash of its bytes in its name."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nxdi_qwen.compile.artifact import file_sha256
from nxdi_qwen.modeling.config import ModelConfig
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.records import Description, Prompt, Run, TopLogprobs

SUFFIX = ".safetensors"
PARTIAL = ".partial-"
_FORMAT = "nxdi-qwen run 1"
_DIGEST = 16  # hexadecimal digits in the name: against accidents, not against malice
_STATES = "states."


class Header(NamedTuple):
    """What a file says about its run, read without the tensors."""

    prompt: Prompt
    forced: tuple[int, ...]
    description: Description
    config: ModelConfig


def write_run(folder: Path, name: str, run: Run, description: Description, config: ModelConfig) -> Path:
    """Writes `folder`/`name`.HASH.safetensors, whole or not at all, and removes what stood there under this name."""
    tensors = {
        "logits": run.logits,
        "hidden": run.hidden,
        "experts": run.experts,
        "router_margins": run.router_margins,
        **{_STATES + key: value for key, value in (run.states or {}).items()},
    }
    if run.top is not None:
        tensors |= {"top.ids": run.top.ids, "top.logprobs": run.top.logprobs}
    metadata = {
        "format": _FORMAT,
        "run": json.dumps({"prompt": asdict(run.prompt), "forced": run.forced}),
        "description": json.dumps(asdict(description)),
        "config": json.dumps(config.to_dict()),
    }
    before = find_run(folder, name)
    descriptor, partial = tempfile.mkstemp(prefix=PARTIAL, dir=folder)
    os.close(descriptor)
    try:
        save_file({key: value.contiguous() for key, value in tensors.items() if value is not None}, partial, metadata)
        path = folder / f"{name}.{file_sha256(Path(partial))[:_DIGEST]}{SUFFIX}"
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    if before not in (None, path):
        before.unlink(missing_ok=True)
    return path


def find_run(folder: Path, name: str) -> Path | None:
    """The file that `write_run` made, if it is there."""
    return next(folder.glob(f"{name}.{'?' * _DIGEST}{SUFFIX}"), None)


def check_run(path: Path, mend: str) -> Header:
    """Reads all bytes. Raises InputError, which ends in `mend`, for a file that is not as it was written."""
    try:
        intact = file_sha256(path)[:_DIGEST] == path.suffixes[-2].removeprefix(".")
    except (OSError, IndexError) as error:
        raise InputError(f"{path} is not a readable run ({error}): {mend}") from error
    if not intact:
        raise InputError(f"{path} is truncated, edited or renamed (its hash differs): {mend}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise InputError(f"{path} holds no run of this version: {mend}")
        run, description = json.loads(metadata["run"]), json.loads(metadata["description"])
        return Header(
            Prompt(run["prompt"]["name"], tuple(run["prompt"]["ids"])),
            tuple(run["forced"]),
            Description(**{**description, "notes": tuple(description["notes"])}),
            ModelConfig.from_dict(json.loads(metadata["config"])),
        )
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} holds no run of this version: {mend}") from error


def read_run(path: Path, header: Header) -> Run:
    """The run of a file that `check_run` has checked."""
    with safe_open(path, "pt") as file:
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    states = {name.removeprefix(_STATES): value for name, value in tensors.items() if name.startswith(_STATES)}
    own: dict[str, Any] = {name: tensors.get(name) for name in ("logits", "hidden", "experts", "router_margins")}
    top = TopLogprobs(tensors["top.ids"], tensors["top.logprobs"]) if "top.ids" in tensors else None
    return Run(header.prompt, header.forced, top=top, states=states or None, **own)
