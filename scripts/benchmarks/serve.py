"""Tokens a second over HTTP: vLLM with an artifact against vLLM with its own CPU model of the same checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from nxdi_qwen.compile.source import ModelSource, Progress
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.scripts.benchmarks import worker
from nxdi_qwen.scripts.benchmarks.builds import Build, build_artifact
from nxdi_qwen.serving.plugin import PLUGINS_VARIABLE

SLOTS, MAX_LENGTH = 8, 512
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 16, 128, 32
PEERS = {"ours": "vLLM with an artifact", "vllm": "vLLM's own CPU model"}
_HOST = "127.0.0.1"
_START_SECONDS = 600
_BUILD = Build("bfloat16", SLOTS, (PROMPT_TOKENS,), MAX_LENGTH)
# Both keep `SLOTS` requests at once, in bfloat16, and start every prompt anew; prompts and answers are token ids.
_SAME = ("--max-num-seqs", str(SLOTS), "--max-model-len", str(MAX_LENGTH), "--dtype", "bfloat16")
_OPTIONS = (*_SAME, "--no-enable-prefix-caching", "--skip-tokenizer-init", "--served-model-name", "model")


@dataclass(frozen=True)
class Round:
    """`seconds` from the first request sent to the last answer, and of each request."""

    peer: str
    seconds: float
    request_seconds: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return REQUESTS * NEW_TOKENS / self.seconds


@dataclass(frozen=True)
class Serve:
    """`rounds` of all requests at once, the peers in turn; `versions` of vLLM and torch in the servers' environment."""

    model: str
    versions: dict[str, str]
    rounds: tuple[Round, ...]

    def throughput(self, peer: str) -> tuple[float, ...]:
        """New tokens a second, by round."""
        return tuple(one.tokens_per_second for one in self.rounds if one.peer == peer)

    def ratio(self) -> float:
        """How many times the tokens of vLLM's own model: the median over rounds of the two figures of one round."""
        return median(ours / theirs for ours, theirs in zip(*map(self.throughput, ("ours", "vllm")), strict=True))


def measure_serve(model: Path, work: Path, rounds: int, vllm_python: Path, progress: Progress) -> Serve:
    """Compiles the artifact below `work` if it is not there, starts both servers in the environment of `vllm_python`,
    and sends both the same requests, in turn, `rounds` times after one round that does not count. Raises InputError
    where a server does not start.
    """
    source = ModelSource.from_checkpoint(model)
    work.mkdir(parents=True, exist_ok=True)
    progress("builds", 0, 1)
    build_artifact(model, source, work / "served", _BUILD)
    progress("builds", 1, 1)
    commands = {
        "ours": ("nxdi_qwen.scripts.serve", str(work / "served")),
        "vllm": ("vllm.entrypoints.openai.api_server", "--model", str(model)),
    }
    prompts = worker.random_ids(REQUESTS, PROMPT_TOKENS, source.config.vocab_size)
    measured = []
    with ExitStack() as stack:
        ports = {}
        for done, (peer, command) in enumerate(commands.items()):
            progress("servers", done, len(commands))
            ports[peer] = stack.enter_context(_server(vllm_python, command, work / f"{peer}.log"))
        progress("servers", len(commands), len(commands))
        for count in range(rounds + 1):
            for number, (peer, port) in enumerate(ports.items()):
                progress("rounds", count * len(ports) + number, (rounds + 1) * len(ports))
                begin = time.perf_counter()
                own = asyncio.run(_ask_all(port, prompts))
                if count:
                    measured.append(Round(peer, time.perf_counter() - begin, own))
        progress("rounds", (rounds + 1) * len(ports), (rounds + 1) * len(ports))
    return Serve(source.name, _versions(vllm_python), tuple(measured))


async def _ask_all(port: int, prompts: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Seconds of each request, all sent at once."""
    import httpx

    async with httpx.AsyncClient(base_url=f"http://{_HOST}:{port}", timeout=None) as client:

        async def ask(prompt: Sequence[int]) -> float:
            begin = time.perf_counter()
            body = {"model": "model", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            given = answer.json()["usage"]["completion_tokens"]
            if given != NEW_TOKENS:
                raise InputError(f"a server gave {given} tokens and not {NEW_TOKENS}: its log is in the work folder")
            return time.perf_counter() - begin

        return tuple(await asyncio.gather(*map(ask, prompts)))


@contextmanager
def _server(python: Path, command: Sequence[str], log: Path) -> Iterator[int]:
    """The port of a server that answers; it is stopped at the end, with the processes that it started."""
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = free.getsockname()[1]
    settings = {"OMP_NUM_THREADS": str(worker.THREADS), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    inherited = {name: value for name, value in os.environ.items() if name != PLUGINS_VARIABLE}
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(python), "-m", *command, *_OPTIONS, "--host", _HOST, "--port", str(port)],
            env=inherited | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process, command[0], port, log)
            yield port
        finally:
            _stop(process)


def _wait(process: subprocess.Popen[Any], name: str, port: int, log: Path) -> None:
    import httpx

    begin = time.monotonic()
    while time.monotonic() - begin < _START_SECONDS and process.poll() is None:
        try:
            if httpx.get(f"http://{_HOST}:{port}/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise InputError(f"{name} did not start: see {log}")


def _stop(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _versions(python: Path) -> dict[str, str]:
    text = "import json, torch, vllm; print(json.dumps({'vllm': vllm.__version__, 'torch': torch.__version__}))"
    answer = subprocess.run([str(python), "-c", text], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])
