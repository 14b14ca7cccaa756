"""The artifact folder: written whole or not at all, and checked before anything in it is used.

::

    manifest.json
    graphs/<name>.pt2
    weights/tp<rank>_sharded_checkpoint.safetensors
    config.json, tokenizer.json ...: the checkpoint's own, for whoever reads a model folder (transformers, vLLM)
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import torch

from nxdi_qwen.compile.manifest import (
    MANIFEST_FILE,
    Manifest,
    WeightsEntry,
    current_instruction_sets,
    current_machine,
)
from nxdi_qwen.compile.source import ModelSource
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.partition import Parallel
from nxdi_qwen.modeling.weights import Specs, rank_metadata, read_header, weight_specs
from nxdi_qwen.modeling.weights.write import rank_file

GRAPHS = "graphs"
WEIGHTS = "weights"
_PARTIAL = ".partial-"


def weights_file(rank: int) -> str:
    """Below the artifact."""
    return f"{WEIGHTS}/{rank_file(rank)}"


def copy_checkpoint_files(source: ModelSource, folder: Path) -> dict[str, str]:
    """Copies configuration and tokenizer; returns the files' names below `folder` with their hashes."""
    hashes = {}
    for path in (*source.config_files, *source.text_files):
        assert source.folder is not None
        name = str(path.relative_to(source.folder))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
        hashes[name] = file_sha256(folder / name)
    return hashes


def current_libraries() -> dict[str, str]:
    """The versions that graphs are bound to."""
    return {"nxdi-qwen": version("nxdi-qwen"), "torch": torch.__version__}


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_entry(folder: Path, rank: int) -> WeightsEntry:
    """Describes the weights that were just written for a rank."""
    path = folder / weights_file(rank)
    header = read_header(path)
    return WeightsEntry(weights_file(rank), header.file_size, header.sha256, file_sha256(path))


def check_destination(out: Path) -> None:
    """Raises InputError where an artifact cannot be put at `out`; an existing one is never overwritten."""
    out = out.resolve()  # an artifact takes the place that a link names
    if out == Path.cwd() or out.is_mount():
        what = "the current folder" if out == Path.cwd() else "a mount point"
        raise InputError(f"{out} is {what}, which cannot be exchanged: give a new folder below it with --out")
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise InputError(f"{out} exists: remove it, or choose another folder with --out")
    parent = next(place for place in out.absolute().parents if place.exists())
    if not parent.is_dir():
        raise InputError(f"{parent} is not a folder: choose another place with --out")


@contextmanager
def written_atomically(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` at the end; on any error it is removed and `out` stays as it was.

    A process that is killed leaves its folder behind. It holds no lock then: the next one to write to `out` removes it.
    """
    check_destination(out)
    out = out.resolve()
    parent = out.parent
    made = [place for place in (parent, *parent.parents) if not place.exists()]
    partial = None
    try:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(out)
            partial, lock = _locked_folder(out)
        except OSError as error:
            raise InputError(f"cannot write {out} ({error.strerror}): choose another place with --out") from error
        try:
            yield partial
            os.umask(umask := os.umask(0))  # there is no other way to read it
            partial.chmod(0o777 & ~umask)
            try:
                partial.replace(out)
            except OSError as error:
                why = f"{out} came to exist meanwhile ({error.strerror}): compile to another folder"
                raise InputError(why) from error
        except OSError as error:  # a full disk, above all
            raise InputError(f"{out} was not written ({error}): nothing of it is left") from error
        finally:
            os.close(lock)
    except BaseException:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        for place in made:
            with suppress(OSError):  # somebody else may have put something there
                place.rmdir()
        raise


def _partial_prefix(name: str) -> str:
    return f".{name}{_PARTIAL}"


def _locked_folder(out: Path) -> tuple[Path, int]:
    """A new folder beside `out`, and a file descriptor that holds the lock which tells others that we live."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_partial_prefix(out.name), dir=out.absolute().parent))
        lock = _lock(folder)
        if lock is not None:
            if folder.exists():
                return folder, lock
            os.close(lock)
        # Between its making and our lock, another process took it for abandoned: make another.


def _remove_abandoned(out: Path) -> None:
    """Removes what killed processes left of `out`; folders of living ones are left alone."""
    for folder in out.absolute().parent.iterdir():
        if not folder.name.startswith(_partial_prefix(out.name)):
            continue
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder until it is closed or the process ends; None where another does."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def open_artifact(folder: Path, verify: bool = False) -> Manifest:
    """Reads the manifest and checks every file against it.

    Graphs and the checkpoint's files by their hashes, weights by size, header and names; with `verify`, weights by
    their hash too. Raises InputError with the reason for anything stale, foreign, truncated, edited or half-written.
    """
    name = folder.resolve().name
    if name.startswith(".") and _PARTIAL in name:
        raise InputError(f"{folder} is no complete artifact: its compile was cut short; compile it again")
    manifest = Manifest.read(folder)
    for library, made_with in manifest.libraries.items():
        here = current_libraries().get(library)
        if here != made_with:
            raise InputError(f"{folder} was compiled with {library} {made_with}, here is {here}; compile it again")
    if manifest.optimized and manifest.machine != current_machine():
        raise InputError(
            f"{folder} was compiled for {manifest.machine}, this machine is {current_machine()}; compile it again here"
        )
    if manifest.optimized and (lacking := sorted({*manifest.instruction_sets} - {*current_instruction_sets()})):
        raise InputError(
            f"{folder} was compiled on a processor with {', '.join(lacking)}, which this one lacks; compile it again "
            "here"
        )
    hashed = {entry.file: entry.sha256 for entry in manifest.graphs.values()} | manifest.checkpoint_files
    for name, sha256 in hashed.items():
        if file_sha256(_present(folder, name)) != sha256:
            raise InputError(f"{folder / name} was edited or damaged (its hash differs); compile the artifact again")
    parallel = Parallel(manifest.degree, 0, manifest.expert_degree)
    specs = weight_specs(manifest.model, getattr(torch, manifest.dtype), parallel)  # the same for every rank
    for rank, entry in enumerate(manifest.weights):
        _check_weights(_present(folder, entry.file), entry, dataclasses.replace(parallel, rank=rank), specs)
        if verify and file_sha256(folder / entry.file) != entry.sha256:
            raise InputError(f"{folder / entry.file} was edited or damaged (its hash differs); compile it again")
    known = {MANIFEST_FILE, *hashed, *(entry.file for entry in manifest.weights)}
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    if strangers := sorted(present - known):
        raise InputError(f"{folder} holds files that its manifest does not name: {strangers[0]}; remove them")
    return manifest


def _check_weights(path: Path, entry: WeightsEntry, parallel: Parallel, specs: Specs) -> None:
    size = path.stat().st_size
    if size != entry.bytes:
        raise InputError(
            f"{path} is truncated, or of another model or degree: {size} bytes, not {entry.bytes}; "
            "compile the artifact again"
        )
    header, expected = read_header(path), rank_metadata(parallel)
    if header.metadata != expected:
        found, needed = (", ".join(map(" ".join, place.items())) for place in (header.metadata, expected))
        raise InputError(f"{path} holds the weights of {found or 'no rank'}, not of {needed}; compile it again")
    tensors = {name: (info.shape, info.dtype) for name, info in header.tensors.items()}
    if header.sha256 != entry.header_sha256 or tensors != specs:
        raise InputError(f"{path} holds the weights of another model; compile the artifact again")


def _present(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise InputError(f"{path} is missing: the artifact is incomplete; compile it again")
    return path
