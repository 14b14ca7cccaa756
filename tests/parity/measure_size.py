"""Time and memory of a comparison at the shape of a real model: `python -m tests.parity.measure_size`.

Writes a checkpoint of random weights in bfloat16, and runs `logit-diff` on eight of the built-in prompts in processes
of their own: with an empty cache, and again with the references that are kept then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from nxdi_qwen.modeling.presets import preset
from nxdi_qwen.parity.prompts import built_in_prompts
from tests.true_sizes.shared_model import random_reference

NAMES = (
    *("1 random", "4 random", "64 random", "65 random", "129 random"),
    *("100 repeated", "100 alternating", "640 long"),
)


def write_inputs(name: str, folder: Path) -> tuple[Path, Path]:
    """The checkpoint of a preset's shape, and the prompts."""
    config = preset(name)
    random_reference(config, torch.bfloat16, torch.device("cpu")).save_pretrained(folder / "model")
    prompts = {prompt.name: prompt.ids for prompt in built_in_prompts(config, 1024, None)}
    lines = [json.dumps({"ids": prompts[name]}) for name in NAMES]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder / "model", folder / "prompts.jsonl"


def measured(arguments: list[str]) -> tuple[float, float, int]:
    """Seconds, largest resident GiB and exit status of a comparison."""
    command = [sys.executable, "-m", "nxdi_qwen.scripts.logit_diff", *arguments]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    return time.perf_counter() - begin, usage.ru_maxrss / 2**20, os.waitstatus_to_exitcode(status)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="qwen3.5-0.8b")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    table = Table("references", "seconds", "GiB resident", "status", title=f"{options.preset}, {options.dtype}")
    statuses = []
    with tempfile.TemporaryDirectory() as place:
        model, prompts = write_inputs(options.preset, Path(place))
        arguments = ["--model", str(model), "--prompts", str(prompts), "--dtype", options.dtype]
        for name in ("computed", "kept"):
            seconds, gib, status = measured([*arguments, "--cache", str(Path(place, "cache"))])
            table.add_row(name, f"{seconds:.0f}", f"{gib:.1f}", str(status))
            statuses.append(status)
    Console().print(table)
    return max(statuses)


if __name__ == "__main__":
    raise SystemExit(main())
