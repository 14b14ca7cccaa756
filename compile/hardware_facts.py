"""Facts about the machine and what is installed on it. Nothing here must be there: what cannot be known is null, with
the reason.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Fact = dict[str, Any]
"""``{"value": ...}``, or ``{"value": None, "reason": "..."}``."""

DISTRIBUTIONS = (
    "nxdi-qwen",
    "torch",
    "torch-xla",
    "torch-neuronx",
    "neuronx-cc",
    "libneuronxla",
    "neuronx-distributed",
    "neuronx-distributed-inference",
    "transformers",
    "safetensors",
)
_NEURON_TOOLS = "/opt/aws/neuron/bin"  # on PATH only in login shells
_SECONDS = 20
# neuron-ls names processes of other users, and the instance.
_PRIVATE = ("command", "instance_id", "instance-id")


class Unknown(Exception):
    """A fact that cannot be known here, with the reason."""


def fact(read: Callable[[], Any]) -> Fact:
    """What `read` returns, or why it does not."""
    try:
        return {"value": read()}
    except PackageNotFoundError as error:
        return {"value": None, "reason": f"{error.name} is not installed"}
    except (Unknown, OSError, ValueError, subprocess.SubprocessError) as error:
        return {"value": None, "reason": str(error) or type(error).__name__}


def versions() -> dict[str, Fact]:
    """Of Python, the libraries, the driver and the runtime."""
    result = {"python": fact(platform.python_version)}
    result |= {name: fact(partial(version, name)) for name in DISTRIBUTIONS}
    return result | {
        "neuron driver": fact(lambda: _output("modinfo", "-F", "version", "neuron").strip()),
        "neuron packages": fact(_packages),  # the runtime library among them
    }


def machine() -> dict[str, Fact]:
    """Of the host and its Neuron devices."""
    return {
        "instance_type": fact(lambda: _text("/sys/devices/virtual/dmi/id/product_name")),
        "os": fact(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
        "kernel": fact(platform.release),
        "cpus": fact(os.cpu_count),
        "host_memory_bytes": fact(lambda: _kilobytes("/proc/meminfo", "MemTotal")),
        "neuron_devices": fact(lambda: len(device_files())),
        "neuron_ls": fact(lambda: _without_private(json.loads(_output("neuron-ls", "-j")))),
    }


def device_files() -> list[Path]:
    """The driver's files of the Neuron devices of this machine."""
    return sorted(Path("/dev").glob("neuron[0-9]*"))


def available_host_bytes() -> Fact:
    """Host memory that can be taken without swapping."""
    return fact(lambda: _kilobytes("/proc/meminfo", "MemAvailable"))


def host_rss_bytes() -> Fact:
    """Host memory that this process holds."""
    return fact(lambda: _kilobytes("/proc/self/status", "VmRSS"))


def peak_rss_bytes() -> int:
    """The most host memory that this process held at once, mapped files included. (getrusage goes on from what the
    parent process had.) Raises OSError or Unknown where the system does not say.
    """
    return _kilobytes("/proc/self/status", "VmHWM")


def device_memory(devices: Path = Path("/sys/devices/virtual/neuron_device")) -> Fact:
    """Per physical core in use, what the driver counts: bytes now and at the peak."""
    return fact(lambda: _device_memory(devices))


def _device_memory(devices: Path) -> list[dict[str, Any]]:
    counters = sorted(devices.glob("neuron*/neuron_core*/stats/memory_usage/device_mem"))
    if not counters:
        raise Unknown(f"{devices} has no memory_usage/device_mem (no driver, or one that keeps it elsewhere)")
    cores = []
    for counter in counters:
        # In these files, `total` is what is in use now; `present` is the size of the last change.
        used, peak = int(_text(counter / "total")), int(_text(counter / "peak"))
        if used:
            cores.append({"core": "/".join(counter.parts[-5:-3]), "bytes": used, "peak_bytes": peak})
    return cores


def _packages() -> dict[str, str]:
    if shutil.which("dpkg-query"):
        listed = _output("dpkg-query", "-W", "-f", "${Package} ${Version}\n", "aws-neuronx-*")
    else:
        listed = _output("rpm", "-qa", "--queryformat", "%{NAME} %{VERSION}\n", "aws-neuronx-*")
    return dict(line.split(maxsplit=1) for line in listed.splitlines() if len(line.split()) == 2)


def _output(name: str, *arguments: str) -> str:
    """What a program prints. Raises Unknown where it is missing or fails, SubprocessError where it takes too long."""
    program = shutil.which(name) or shutil.which(name, path=_NEURON_TOOLS)
    if program is None:
        raise Unknown(f"{name} is not installed")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())
        raise Unknown(f"{name} failed with status {done.returncode}: {message}")
    return done.stdout


def _text(path: str | Path) -> str:
    return Path(path).read_text().strip()


def _kilobytes(path: str, name: str) -> int:
    for line in _text(path).splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise Unknown(f"{path} has no {name}")


def _without_private(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_private(item) for key, item in value.items() if key not in _PRIVATE}
    if isinstance(value, list):
        return [_without_private(item) for item in value]
    return value
