"""`python -m tests.serving.artifacts` compiles the checkpoints of `build/serving` for the CPU, anew."""

from __future__ import annotations

import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import track

from nxdi_qwen.compile.cpu import CompileOptions, compile_cpu
from nxdi_qwen.compile.source import ModelSource
from tests.serving.stored import BUCKETS, FAMILIES, MAX_LENGTH, PROCESSES, SLOTS, TEXT_FORMS, artifact, checkpoint


def main() -> None:
    names = (*FAMILIES, *TEXT_FORMS)
    with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
        done = pool.map(write, names)
        for _ in track(done, description="artifacts", total=len(names), console=Console(stderr=True)):
            pass


def write(name: str) -> None:
    torch.set_num_threads(1)
    shutil.rmtree(artifact(name), ignore_errors=True)
    buckets = BUCKETS if name in FAMILIES else BUCKETS[:1]
    options = CompileOptions(slots=SLOTS, max_length=MAX_LENGTH, buckets=buckets, dtype="float32")
    compile_cpu(ModelSource.from_checkpoint(checkpoint(name)), artifact(name), options)


if __name__ == "__main__":
    main()
