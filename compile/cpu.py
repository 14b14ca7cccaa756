"""The CPU target: exported programs, or the same compiled with AOTInductor, run with weights from the artifact."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from nxdi_qwen.compile.artifact import (
    GRAPHS,
    WEIGHTS,
    copy_checkpoint_files,
    current_libraries,
    file_sha256,
    weights_entry,
    weights_file,
    written_atomically,
)
from nxdi_qwen.compile.buckets import Buckets
from nxdi_qwen.compile.cpu_linears import read_weights_in_place, weights_are_repacked
from nxdi_qwen.compile.cpu_weights import load_weights
from nxdi_qwen.compile.executor import Executor
from nxdi_qwen.compile.graph_check import check_graph
from nxdi_qwen.compile.graph_model import GraphModel
from nxdi_qwen.compile.graphs import HEAD_ROWS, capture, graph_specs, graph_state, quiet_export
from nxdi_qwen.compile.manifest import (
    GraphEntry,
    Manifest,
    current_instruction_sets,
    current_machine,
    describe_tensors,
)
from nxdi_qwen.compile.source import DTYPES, ModelSource, Progress, no_progress
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.model import Batch, State
from nxdi_qwen.modeling.partition import Parallel, check_degree
from nxdi_qwen.modeling.state import describe_state
from nxdi_qwen.modeling.weights import write_ranks

TARGET = "cpu"
DEFAULT_MAX_LENGTH = 2048
MAX_SLOTS = 1 << 16  # more than any memory holds, and few enough for sizes to be numbers
_CPP_COMPILERS = ("g++", "clang++")
# A concatenation is written out instead of being computed again, with a branch for each element, by all that read it:
# the convolution over a segment behind its state takes a third of the time.
_INDUCTOR = {"max_pointwise_cat_inputs": 1}


@dataclass(frozen=True)
class CompileOptions:
    """What a user chooses; `None` takes the model's own dtype, or lengths that suit it.

    Raises InputError for a choice that does not fit the model, from `resolve`.
    """

    slots: int = 4
    max_length: int | None = None
    buckets: tuple[int, ...] | None = None
    dtype: str | None = None
    degree: int = 1
    expert_degree: int = 1
    optimize: bool = False

    def resolve(self, source: ModelSource) -> tuple[int, Buckets, str]:
        """(maximum length, buckets, dtype name), all checked."""
        check_degree(source.config, self.degree, self.expert_degree)
        if not 1 <= self.slots <= MAX_SLOTS:
            raise InputError(f"batch size {self.slots} is not possible: give 1 to {MAX_SLOTS}")
        if self.optimize and not any(map(shutil.which, _CPP_COMPILERS)):
            raise InputError("--optimize needs a C++ compiler, and none is installed: install g++, or leave it out")
        longest = source.config.max_position_embeddings
        max_length = min(DEFAULT_MAX_LENGTH, longest) if self.max_length is None else self.max_length
        if not 1 <= max_length <= longest:
            raise InputError(f"maximum length {max_length} is out of range: {source.name} takes 1 to {longest} tokens")
        # A float16 checkpoint runs in float32: no exponent range is lost, and no Neuron path uses float16.
        own = source.config.dtype if source.config.dtype in DTYPES else "float32"
        dtype = own if self.dtype is None else self.dtype
        if dtype not in DTYPES:
            raise InputError(f"dtype {dtype} is not supported: use one of {', '.join(DTYPES)}")
        return max_length, Buckets.choose(max_length, self.buckets), dtype


def compile_cpu(source: ModelSource, out: Path, options: CompileOptions, progress: Progress = no_progress) -> Manifest:
    """Captures, checks and writes everything into the new folder `out`, atomically.

    `progress` stages: "graphs" (graphs done), "weights" (bytes written). Raises InputError before anything is computed
    where source, options or destination do not fit, and GraphError where a graph breaks a rule.
    """
    max_length, buckets, dtype_name = options.resolve(source)
    dtype = DTYPES[dtype_name]
    parallel = Parallel(options.degree, 0, options.expert_degree)  # graphs and shapes are the same for every rank
    description = describe_state(source.config, options.slots, max_length, dtype, parallel)
    with written_atomically(out) as folder:
        (folder / GRAPHS).mkdir()
        (folder / WEIGHTS).mkdir()
        specs = graph_specs(source.config, buckets, options.slots, max_length)
        graphs = {}
        with _compiler_files(folder) if options.optimize else contextlib.nullcontext():
            for done, spec in enumerate(specs):
                progress("graphs", done, len(specs))
                program = capture(spec, source.config, dtype, description, parallel)
                size = check_graph(program, spec, graph_state(spec, source.config, description))
                file = f"{GRAPHS}/{spec.name}.pt2"
                _save(program, folder / file, options.optimize)
                graphs[spec.name] = GraphEntry(file, file_sha256(folder / file), **size)
        progress("graphs", len(specs), len(specs))
        write_ranks(
            [folder / weights_file(rank) for rank in range(options.degree)],
            source.config,
            dtype,
            source.blocks(dtype),
            options.expert_degree,
            progress=lambda done, total: progress("weights", done, total),
        )
        manifest = Manifest(
            target=TARGET,
            optimized=options.optimize,
            model=source.config,
            generation=source.generation,
            source={"name": source.name, "fingerprint": source.fingerprint},
            dtype=dtype_name,
            degree=options.degree,
            expert_degree=options.expert_degree,
            slots=options.slots,
            max_length=max_length,
            buckets=buckets.lengths,
            state=describe_tensors(description),
            graphs=graphs,
            weights=tuple(weights_entry(folder, rank) for rank in range(options.degree)),
            checkpoint_files=copy_checkpoint_files(source, folder),
            libraries=current_libraries(),
            machine=current_machine(),
            instruction_sets=current_instruction_sets(),
        )
        manifest.write(folder)
    return manifest


def load_cpu(folder: Path, manifest: Manifest, rank: int = 0, progress: Progress = no_progress) -> GraphExecutor:
    """One rank's executor of an artifact whose files `open_artifact` has checked.

    `progress` stage: "graphs" (graphs loaded).
    """
    if manifest.target != TARGET:
        raise InputError(f"{folder} was compiled for {manifest.target}; this runs artifacts of target {TARGET}")
    weights = load_weights(folder / manifest.weights[rank].file)
    calls = {}
    for done, (name, entry) in enumerate(manifest.graphs.items()):
        progress("graphs", done, len(manifest.graphs))
        calls[name] = _load(folder / entry.file, manifest.optimized)
    progress("graphs", len(manifest.graphs), len(manifest.graphs))
    return GraphExecutor(manifest, rank, calls, weights)


class GraphExecutor(Executor):
    """Runs the graphs of an artifact with one rank's weights, which all graphs share."""

    def __init__(
        self, manifest: Manifest, rank: int, calls: dict[str, Callable[..., Any]], weights: dict[str, Tensor]
    ) -> None:
        dtype = DTYPES[manifest.dtype]
        parallel = Parallel(manifest.degree, rank, manifest.expert_degree)
        description = describe_state(manifest.model, manifest.slots, manifest.max_length, dtype, parallel)
        super().__init__(manifest.model, description, Buckets(manifest.buckets))
        self.model = GraphModel(manifest.model, calls, weights)

    def context(self, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        return self.model.context(batch, state)

    def decode(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        return self.model.decode(batch, state)

    def head(self, hidden: Tensor) -> Tensor:
        logits = []
        for block in hidden.split(HEAD_ROWS):
            padding = block.new_zeros(HEAD_ROWS - block.shape[0], block.shape[1])
            logits.append(self.model.head(torch.cat([block, padding]))[: block.shape[0]])
        return torch.cat(logits)


def _compiler_files(folder: Path) -> AbstractContextManager[None]:
    """What the compiler writes on the way stands in `folder` and is removed; else the user's temporary folder would
    keep it. Only its precompiled headers, some 300 MB that serve every later compile, stay in torch's own cache.
    """
    from torch._inductor.utils import fresh_cache  # takes a second to import

    return fresh_cache(dir=str(folder))


def aot_compile(program: ExportedProgram, path: Path) -> None:
    """Compiles an exported program for this machine, into a package that `torch._inductor.aoti_load_package` runs."""
    if weights_are_repacked():
        read_weights_in_place(program)
    with quiet_export():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=_INDUCTOR)


def _save(program: ExportedProgram, path: Path, optimize: bool) -> None:
    if optimize:
        aot_compile(program, path)
        return
    # The example inputs are fake tensors, which only an unsafe pickle could bring back.
    program._example_inputs = None
    # torch's own writer ends the process where the disk is full.
    content = io.BytesIO()
    torch.export.save(program, content)
    path.write_bytes(content.getvalue())


def _load(path: Path, optimized: bool) -> Callable[..., Any]:
    if optimized:
        return torch._inductor.aoti_load_package(str(path))
    return torch.export.load(path).module()
