"""Running an artifact of degree N: one process a rank, as torchrun starts them. Rank 0 decides, the others follow.

Rank 0 holds the queue, the sampler and everything that is printed. Before each graph it sends the others the inputs,
and all run the same graph; every rank keeps its own part of the state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, distributed

from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.manifest import Manifest
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.model import Batch, State


@contextmanager
def process_group() -> Iterator[tuple[int, int]]:
    """(rank, number of ranks): from torchrun, joined over gloo, or (0, 1) in a process that stands alone."""
    if not distributed.is_torchelastic_launched():
        yield 0, 1
        return
    with library_output_on_stderr():
        distributed.init_process_group("gloo")
    try:
        yield distributed.get_rank(), distributed.get_world_size()
    finally:
        distributed.destroy_process_group()


@contextmanager
def library_output_on_stderr() -> Iterator[None]:
    """Keeps standard output for a command's result: the gloo of torch 2.9 and NxD's log write there as well."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def check_ranks(manifest: Manifest, ranks: int) -> None:
    """Raises InputError where an artifact has another degree than there are processes."""
    if manifest.degree != ranks:
        raise InputError(
            f"the artifact has degree {manifest.degree} and needs as many processes, not {ranks}: "
            f"start it with torchrun --nproc-per-node {manifest.degree} -m nxdi_qwen.scripts.generate ..."
        )


class _Leader(Executor):
    """Rank 0's executor: tells the others what to run, then runs it."""

    def __init__(self, own: Executor) -> None:
        super().__init__(own.config, own.description, own.buckets)
        self._own = own

    def context(self, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        _send(("context", batch))
        return self._own.context(batch, state)

    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        _send(("decode", batch))
        return self._own.decode(batch, state)

    def head(self, hidden: Tensor) -> Tensor:
        _send(("head", hidden))
        return self._own.head(hidden)


@contextmanager
def leading(executor: Executor, ranks: int) -> Iterator[Executor]:
    """On rank 0: the executor to use. The other ranks, in `follow`, return when this ends, also by an exception."""
    if ranks == 1:
        yield executor
        return
    try:
        yield _Leader(executor)
    finally:
        _send(None)


def follow(executor: Executor) -> None:
    """On the other ranks: runs what rank 0 runs, until that ends. The state lives here from call to call."""
    state = executor.description.allocate()
    while (message := _receive()) is not None:
        kind, inputs = message
        if kind == "context":
            _, _, state = executor.context(inputs, state)
        elif kind == "decode":
            _, state = executor.decode(inputs, state)
        else:
            executor.head(inputs)


def _send(message: Any) -> None:
    distributed.broadcast_object_list([message], src=0)


def _receive() -> Any:
    received: list[Any] = [None]
    distributed.broadcast_object_list(received, src=0)
    return received[0]
