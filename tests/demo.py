"""The main job on one screen: tiny checkpoints of all three families, compiled, generated from, compared.

The checkpoints are written by Hugging Face's own classes with random weights: the text is noise, the numbers are not.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from nxdi_qwen.scripts.generate import generate
from nxdi_qwen.scripts.logit_diff import logit_diff
from nxdi_qwen.scripts.neuron_compile import compile_model
from tests.hf_fixtures import hf_model, save_checkpoint

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
PROMPT = "Hello, Trainium"


def run_json(command: object, arguments: list[str]) -> tuple[dict, int]:
    """What a command line prints with --json, and its exit status."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = command([*arguments, "--json"])  # type: ignore[operator]
    return json.loads(output.getvalue()), status


def main() -> int:
    table = Table(title="Against transformers, float32: largest difference over largest logit")
    for heading in ("family", "compiled in", "generated ids", "prefill", "decode", "argmax", "verdict"):
        table.add_column(heading, no_wrap=heading != "generated ids")
    failed = False
    with tempfile.TemporaryDirectory() as place:
        for family in FAMILIES:
            model, artifact = Path(place, family), Path(place, f"{family}-artifact")
            save_checkpoint(hf_model(family), model, tokenizer=True)
            begin = time.perf_counter()
            destination = ["--target", "cpu", "--out", str(artifact)]
            run_json(compile_model, ["--model", str(model), *destination, "--buckets", "64", "--max-length", "192"])
            seconds = time.perf_counter() - begin
            text, _ = run_json(
                generate,
                ["--artifacts", str(artifact), "--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "8"],
            )
            report, status = run_json(
                logit_diff, ["--model", str(model), "--artifacts", str(artifact), "--cache", str(Path(place, "cache"))]
            )
            bands = [band for row in report["prompts"] for band in row["bands"]]
            worst = {
                phase: max(band["max_rel"] for band in bands if band["phase"] == phase)
                for phase in ("prefill", "decode")
            }
            matches = [match for row in report["prompts"] for match in row["top1"]]
            failed |= status != 0
            table.add_row(
                family,
                f"{seconds:.0f} s",
                " ".join(map(str, text["completions"][0]["token_ids"])),
                f"{worst['prefill']:.1e}",
                f"{worst['decode']:.1e}",
                f"{sum(matches) / len(matches):.1%}",
                "FAILED" if status else "passed",
            )
    Console().print(table)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
