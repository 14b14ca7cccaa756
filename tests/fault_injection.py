"""Breaks copies of the package on purpose and shows that the tests notice: `python -m tests.fault_injection`.

For every fault of `tests.faults`: the logits' largest difference from Hugging Face over the largest logit, in the
fault's situation, is within the tolerance for an unbroken copy and a hundred times beyond it for the broken one; and of
the tests that are named, all pass on the unbroken copy and at least one fails, by an assertion, on the broken one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers.utils import logging

from tests.fault_situations import Situation, image
from tests.faults import FAULTS, Fault
from tests.hf_fixtures import hf_model, prompt_ids, save_checkpoint

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-5
VISIBLE = 100 * TOLERANCE
SLOTS, MAX_LENGTH = 5, 200
FOLDERS = ("modeling", "compile", "scripts")
# Run in a process whose path begins with a copy of the package: pytest, once it is sure which package it tests.
PYTEST = """
import sys, pytest, nxdi_qwen.modeling
assert nxdi_qwen.modeling.__file__.startswith(sys.argv[1]), nxdi_qwen.modeling.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


def copy_package(place: Path, fault: Fault | None = None) -> Path:
    """A copy of the package, with the edits of `fault`, in the new folder `place`, which belongs on the path."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, place / "nxdi_qwen" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (place / "nxdi_qwen" / "__init__.py").touch()  # a regular package goes before an installed namespace
    for edit in fault.edits if fault else ():
        path = place / "nxdi_qwen" / edit.file
        source = path.read_text()
        if source.count(edit.old) != 1:
            raise ValueError(f"{fault.name}: {edit.file} holds {source.count(edit.old)} times {edit.old!r}, not once")
        path.write_text(source.replace(edit.old, edit.new))
    return place


@contextlib.contextmanager
def imported_from(place: Path) -> Iterator[None]:
    """Within it `import nxdi_qwen...` gives the copy in `place`; the modules that were there before come back."""

    def ours() -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "nxdi_qwen"}

    before = ours()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(place))
    try:
        assert importlib.import_module("nxdi_qwen.modeling").__file__.startswith(str(place))
        yield
    finally:
        sys.path.remove(str(place))
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)
        # The copy's top is a regular package and the installed one a namespace without a file: inspect, which
        # registering an operation asks where it stands, trips over its memory of the other.
        inspect._filesbymodname.pop("nxdi_qwen", None)


@functools.cache
def checkpoint_of(fixture: str) -> tempfile.TemporaryDirectory[str]:
    """The folder of a fixture's checkpoint, kept until the process ends."""
    folder = tempfile.TemporaryDirectory()
    save_checkpoint(hf_model(fixture), Path(folder.name))
    return folder


def image_positions() -> Tensor:
    """[3, MAX_LENGTH] time, height, width: 20 tokens of text, an image of 6 x 6, text behind its largest position."""
    patch, rest = torch.arange(36), torch.arange(MAX_LENGTH - 56) + 26
    patches = torch.stack([patch * 0, patch // 6, patch % 6]) + 20
    return torch.cat([torch.arange(20).expand(3, -1), patches, rest.expand(3, -1)], dim=1)


@functools.cache
@torch.no_grad()
def reference(fixture: str, prompt: int, with_image: bool) -> tuple[Tensor, Tensor]:
    """Token ids [MAX_LENGTH] of a prompt, and Hugging Face's logits [MAX_LENGTH, V] of one pass over them."""
    model = hf_model(fixture)
    ids = prompt_ids(model, MAX_LENGTH, prompt)
    positions = image_positions()[:, None] if with_image else None
    return ids, model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0]


class Measurement:
    """The `Session` of `tests.fault_situations` with the package that is imported; `rel` is the largest difference."""

    def __init__(self, fixture: str, with_image: bool = False) -> None:
        from nxdi_qwen.modeling.config_loader import load_config
        from nxdi_qwen.modeling.model import Batch, HybridCausalLM, text_positions
        from nxdi_qwen.modeling.state import describe_state
        from nxdi_qwen.modeling.weights import Checkpoint, plan_weights, stream_weights

        folder = Path(checkpoint_of(fixture).name)
        loaded, checkpoint = load_config(folder), Checkpoint.open(folder)
        plan = plan_weights(loaded.config, checkpoint, loaded.quantization)
        self.model = HybridCausalLM(plan.config, torch.float32).requires_grad_(False)
        self.model.load_state_dict(dict(stream_weights(plan, checkpoint, torch.float32)), strict=True)
        self.state = describe_state(plan.config, SLOTS, MAX_LENGTH, torch.float32).allocate()
        self.batch_class, self.text_positions = Batch, text_positions
        self.fixture, self.with_image = fixture, with_image
        self.prompts, self.lengths = list(range(SLOTS)), [0] * SLOTS
        self.rel = 0.0

    def begin(self, slot: int, prompt: int) -> None:
        self.prompts[slot], self.lengths[slot] = prompt, 0

    def prefill(self, counts: dict[int, int], bucket: int | None = None, rows: int | None = None) -> None:
        idle = [next(iter(counts))] * ((rows or len(counts)) - len(counts))
        batch = self._batch([*counts, *idle], counts, bucket or max(counts.values()))
        out = self.model.prefill(batch, self.state)
        every = self.model.head(out.hidden)
        for row, (slot, count) in enumerate(counts.items()):
            self._compare(slot, count, every[row, :count])
            self._compare(slot, 1, out.logits[row][None])
        self.state = out.state

    def decode(self, *slots: int, steps: int) -> None:
        for _ in range(steps):
            batch = self._batch(list(range(SLOTS)), dict.fromkeys(slots, 1), 1)._replace(slots=None)
            logits, self.state = self.model.decode(batch, self.state)
            for slot in slots:
                self._compare(slot, 1, logits[slot][None])

    def _batch(self, slots: list[int], counts: dict[int, int], width: int) -> Any:
        """One row for each of `slots`, the first of a slot with its next tokens; moves the lengths on."""
        ids = torch.full((len(slots), width), 7)
        valid = torch.zeros(len(slots), width, dtype=torch.bool)
        start = torch.tensor([self.lengths[slot] for slot in slots])
        for slot, count in counts.items():
            row, begin = slots.index(slot), self.lengths[slot]
            ids[row, :count] = reference(self.fixture, self.prompts[slot], self.with_image)[0][begin : begin + count]
            valid[row, :count] = True
            self.lengths[slot] += count
        positions = self.text_positions(start, valid)
        if self.with_image:
            positions = image_positions()[:, positions[0]]
        return self.batch_class(ids, valid, positions, start, torch.tensor(slots))

    def _compare(self, slot: int, count: int, logits: Tensor) -> None:
        """`logits` [count, V] belong to the last `count` tokens of `slot`."""
        end = self.lengths[slot]
        expected = reference(self.fixture, self.prompts[slot], self.with_image)[1][end - count : end]
        rel = ((logits - expected).abs().max() / expected.abs().max()).item()
        self.rel = max(self.rel, math.inf if math.isnan(rel) else rel)


@functools.cache
def measure(place: Path, fixture: str, situation: Situation) -> float:
    """Largest difference over largest logit of the copy in `place`."""
    with imported_from(place):
        session = Measurement(fixture, with_image=situation is image)
        situation(session)
        return session.rel


def run_tests(place: Path, node_ids: list[str]) -> dict[str, str | None]:
    """Runs tests on the copy in `place`: for each test None, or the message with which it failed.

    If pytest itself fails (a test that does not exist or cannot be imported), what it says stands under "pytest".
    """
    report = place / "report.xml"
    environment = os.environ | {"PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", *node_ids]
    command = [sys.executable, "-c", PYTEST, str(place), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # all passed, some failed
        return {"pytest": done.stdout + done.stderr}
    results: dict[str, str | None] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child.get("message") for child in case if child.tag in ("failure", "error")]
        results[f"{case.get('classname')}::{case.get('name')}"] = bad[0] if bad else None
    return results


@dataclass(frozen=True)
class Finding:
    """What a fault did: the largest differences of both copies, and what became of its tests (see `run_tests`)."""

    fault: Fault
    rel_unbroken: float
    rel_broken: float
    tests: dict[str, str | None]

    @property
    def noticed_by(self) -> list[str]:
        """The tests that failed by an assertion; one that cannot run has noticed nothing."""
        return [test for test, message in self.tests.items() if message and message.startswith(("Assertion", "assert"))]

    @property
    def good(self) -> bool:
        return self.rel_unbroken <= TOLERANCE and self.rel_broken >= VISIBLE and bool(self.noticed_by)

    def as_dict(self) -> dict[str, Any]:
        return {
            "fault": self.fault.name,
            "broken": self.fault.broken,
            "fixture": self.fault.fixture,
            "situation": self.fault.situation.__doc__,
            "rel_unbroken": self.rel_unbroken,
            "rel_broken": self.rel_broken,
            "tests": self.tests,
            "noticed_by": self.noticed_by,
            "good": self.good,
        }


def inject_all(faults: list[Fault], progress: Progress) -> list[Finding]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        unbroken = copy_package(Path(folder, "unbroken"))
        task = progress.add_task("the unbroken copy's tests", total=len(faults) + 1)
        every_test = sorted({test for fault in faults for test in fault.tests})
        failed = {test: message for test, message in run_tests(unbroken, every_test).items() if message is not None}
        if failed:
            raise RuntimeError(f"without any fault these fail: {failed}")
        progress.advance(task)
        places = [copy_package(Path(folder, str(number)), fault) for number, fault in enumerate(faults)]
        results = pool.map(run_tests, places, [list(fault.tests) for fault in faults])
        findings = []
        for fault, place, result in zip(faults, places, results, strict=True):
            progress.update(task, description=fault.name)
            rel = [measure(copy, fault.fixture, fault.situation) for copy in (unbroken, place)]
            findings.append(Finding(fault, *rel, result))
            progress.advance(task)
    return findings


def table_of(findings: list[Finding]) -> Table:
    table = Table(title=f"Faults: tolerance {TOLERANCE:.0e}, a fault must move the logits by {VISIBLE:.0e}")
    for heading in (
        "fault",
        "what is broken",
        "fixture, situation",
        "rel unbroken",
        "rel broken",
        "tests that noticed",
    ):
        table.add_column(heading)
    for finding in findings:
        table.add_row(
            finding.fault.name,
            finding.fault.broken,
            f"{finding.fault.fixture}: {finding.fault.situation.__doc__}",
            f"{finding.rel_unbroken:.1e}",
            f"{finding.rel_broken:.1e}",
            f"{len(finding.noticed_by)} of {len(finding.tests)}",
            style=None if finding.good else "bold red",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--only", action="append", metavar="NAME", choices=[fault.name for fault in FAULTS])
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if not options.only or fault.name in options.only]
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            findings = inject_all(faults, progress)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        Console().print(table_of(findings))
    missed = [finding.fault.name for finding in findings if not finding.good]
    if missed:
        print(f"not shown as required: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
