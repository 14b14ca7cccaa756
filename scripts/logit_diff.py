"""Compares a port's logits, states and layers with a reference, teacher-forced: every position of the prompts, then
decode steps. Where they part, it names the layer, the position and the likely reason.
"""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nxdi_qwen.compile.artifact import open_artifact
from nxdi_qwen.compile.cpu import load_cpu
from nxdi_qwen.compile.distributed import check_ranks, follow, leading, library_output_on_stderr, process_group
from nxdi_qwen.compile.source import DTYPES
from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.prompts import SETS, TEXT_SET
from nxdi_qwen.parity.report.html import check_page, write_page
from nxdi_qwen.parity.report.terminal import print_report
from nxdi_qwen.parity.session import NONE, Asked, run_session
from nxdi_qwen.parity.store import DEFAULT_LIMIT, GIGABYTE
from nxdi_qwen.parity.targets.choose import FORMS
from nxdi_qwen.scripts import command

ABOVE_TOLERANCE = 1


def build_parser() -> command.Parser:
    parser = command.Parser(prog="logit-diff", description=__doc__)
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint folder, read by Hugging Face too")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--target", default="eager", metavar="SIDE", help=f"what is compared (default eager): {FORMS}")
    target.add_argument("--artifacts", type=Path, metavar="DIR", help="the same as --target artifact:DIR")
    parser.add_argument(
        "--reference", default="huggingface", metavar="SIDE", help="with what (default huggingface), in the same forms"
    )
    parser.add_argument(
        "--sixteen-bit",
        metavar="SIDE",
        help="16-bit reference of the three-way verdict; default: huggingface:bfloat16 for a bfloat16 target; none",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the target")
    sets = ", ".join((*SETS, TEXT_SET))
    parser.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help=f'lines {{"text": ...}} or {{"ids": [...]}}, or names of built-in sets: {sets} (default: all that fit)',
    )
    parser.add_argument("--tolerance", type=float, help="largest max_rel that passes two-way; default by dtype")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="for references (default: the user's cache folder)")
    parser.add_argument(
        "--cache-size",
        type=float,
        default=DEFAULT_LIMIT / GIGABYTE,
        metavar="GIB",
        help="the least recently used references go above this (default 20)",
    )
    parser.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help=f"keep the target's results in a new folder, for stored:DIR; with --reference {NONE} that is all",
    )
    parser.add_argument("--json", action="store_true", help="print everything, per position, as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write a page with plots, which needs no network"
    )
    return parser


def logit_diff(arguments: list[str] | None) -> int:
    options = build_parser().parse_args(arguments)
    if options.html is not None:
        if options.reference == NONE:
            raise InputError(f"--html shows a comparison: give a --reference other than {NONE}")
        check_page(options.html)
    with process_group() as (rank, ranks):
        if ranks > 1 and options.artifacts is None:
            raise InputError(f"{ranks} processes compare an artifact only: give --artifacts, or start one process")
        if rank:
            manifest = open_artifact(options.artifacts)
            check_ranks(manifest, ranks)
            follow(load_cpu(options.artifacts, manifest, rank))
            return 0
        with library_output_on_stderr(), command.progress_bars() as progress, ExitStack() as stack:
            outcome = run_session(
                _asked(options), progress, ranks, lambda executor: stack.enter_context(leading(executor, ranks))
            )
    if outcome is None:
        print(f"saved in {options.save}: compare it with --target stored:{options.save}")
        return 0
    if options.json:
        print(json.dumps({"model": str(options.model), **outcome.to_dict()}))
    else:
        print_report(outcome)
    if options.html is not None:  # last: what cannot be written must not take the verdict along
        write_page(outcome, options.html)
    return 0 if outcome.passed else ABOVE_TOLERANCE


def _asked(options: Any) -> Asked:
    if not 0 <= options.cache_size < math.inf:
        raise InputError(f"cache size {options.cache_size} is not possible: give a number from 0")
    return Asked(
        model=options.model,
        target=options.target if options.artifacts is None else f"artifact:{options.artifacts}",
        reference=options.reference,
        sixteen_bit=options.sixteen_bit,
        dtype=options.dtype,
        prompts=options.prompts,
        tolerance=options.tolerance,
        cache=options.cache,
        cache_limit=int(options.cache_size * GIGABYTE),
        save=options.save,
    )


def main() -> int:
    return command.run(logit_diff)


if __name__ == "__main__":
    raise SystemExit(main())
