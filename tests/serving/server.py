"""A server of vLLM's as a process of its own, and the metrics that it tells."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
START_SECONDS, STOP_SECONDS = 120, 30
# vLLM's own settings for a small machine without a network.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def program(name: str) -> str:
    """A console script of the running environment."""
    return str(Path(sys.executable).with_name(name))


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        return int(taken.getsockname()[1])


class Server:
    """`nxdi-qwen-serve MODEL OPTIONS`, or another command in its place, on a port of its own.

    log: the file with everything that it says.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        options: Sequence[object] = (),
        *,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        self.log = log
        started = [*(command or [program("nxdi-qwen-serve")]), str(model), *map(str, options)]
        inherited = {name: value for name, value in os.environ.items() if name != "VLLM_PLUGINS"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*started, "--host", HOST, "--port", str(self.port)],
                env=inherited | ENVIRONMENT | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what is left of it can be found, and nothing else
            )

    def wait(self, seconds: float = START_SECONDS) -> Server:
        """Waits until it answers. Raises RuntimeError with its last lines if it does not."""
        if not waited(lambda: self.process.poll() is not None or self._answers(), seconds):
            raise RuntimeError(f"no answer within {seconds} s:\n{self.last_lines()}")
        if self.process.poll() is not None:
            raise RuntimeError(f"the server left with status {self.process.returncode}:\n{self.last_lines()}")
        return self

    def failed(self, seconds: float = START_SECONDS) -> str:
        """Waits until it has left, which it must with a status above 0 and before it answers. Returns what it said."""
        assert waited(lambda: self.process.poll() is not None or self._answers(), seconds), self.last_lines()
        assert self.process.poll() is not None, "the server has started"
        assert self.process.returncode > 0, self.last_lines()
        return self.log.read_text(errors="replace")

    def last_lines(self, count: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def client(self, **options: Any) -> Any:
        """An `openai.OpenAI`."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120, **options)

    def asynchronous_client(self) -> Any:
        """An `openai.AsyncOpenAI`."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def metrics(self) -> Metrics:
        return Metrics(self.get("/metrics"))

    def settled(self, seconds: float = 20) -> Metrics:
        """The metrics once nothing runs, waits or holds a block. AssertionError if that does not come."""
        found = self.metrics()
        if not waited(lambda: found.update(self.get("/metrics")).idle, seconds):
            raise AssertionError(f"after {seconds} s: {found.occupied}")
        return found

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Sends `how` and waits; then ends every process that is left of it."""
        if self.process.poll() is None:
            self.process.send_signal(how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        self.end_group()

    def end_group(self) -> None:
        """Kills what is left of the server's own process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_SECONDS)

    def group(self) -> list[int]:
        """Processes of the server's group that still run."""
        running = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                    if int(group) == self.process.pid and state != "Z":
                        running.append(int(entry.name))
        return running

    def _answers(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True


class Metrics:
    """A server's metrics at one time; vLLM's own by name without the prefix `vllm:`."""

    def __init__(self, text: str) -> None:
        self.update(text)

    def update(self, text: str) -> Metrics:
        from prometheus_client.parser import text_string_to_metric_families

        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return self

    def __getitem__(self, name: str) -> float:
        return self.total(name)

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of vLLM's metric `name` that have these labels; KeyError without any."""
        found = self._sum(f"vllm:{name}", labels)
        if found is None:
            raise KeyError(f"{name} {labels}")
        return found

    def _sum(self, name: str, labels: Mapping[str, str]) -> float | None:
        found = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        return sum(found) if found else None

    def accepted(self, path: str) -> int:
        """Requests to a path that were answered, also where the client left."""
        return int(self._sum("http_requests_total", {"handler": path, "status": "2xx"}) or 0)

    def refused(self, path: str) -> int:
        """Requests to a path that got a 4xx, by vLLM or before it."""
        by_vllm = self._sum("http_requests_total", {"handler": path, "status": "4xx"}) or 0
        return int(by_vllm + (self._sum("nxdi_qwen:requests_refused_total", {"handler": path}) or 0))

    def given_up(self, path: str) -> int:
        """Requests to a path whose clients left."""
        return int(self._sum("nxdi_qwen:requests_given_up_total", {"handler": path}) or 0)

    @property
    def occupied(self) -> dict[str, float]:
        return {name: self[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}

    @property
    def idle(self) -> bool:
        return not any(self.occupied.values())

    @property
    def finished(self) -> dict[str, int]:
        """Requests by the reason for which they ended."""
        reasons = ("stop", "length", "abort", "error", "repetition")
        return {reason: int(self.total("request_success_total", finished_reason=reason)) for reason in reasons}


def waited(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` came true within this time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def serving(model: Path, log: Path, options: Sequence[object] = (), **more: Any) -> Iterator[Server]:
    """A server that answers, stopped in the end."""
    server = Server(model, log, options, **more)
    try:
        yield server.wait()
    finally:
        server.stop()
