"""`python -m tests.serving.soak [--rounds N] [--family NAME]`: random traffic for many rounds, of two servers a family.

Every round is 32 requests of 1 to 600 tokens at random times, a third of whose clients leave; all tokens are compared
with Hugging Face's. One server has the pool of blocks that fits its slots, the other so few that it has to preempt.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.serving.rounds import SMALL_POOL, Round, one_round
from tests.serving.server import serving
from tests.serving.stored import FAMILIES, artifact, near_ties, references

LEAVING = 1 / 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="per family and server (default 20)")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="default: all")
    options = parser.parse_args()
    table = Table(title=f"{options.rounds} rounds each, tokens compared with Hugging Face's")
    for heading in ("family", "pool", "requests", "left", "preempted", "near ties", "s", "verdict"):
        table.add_column(heading, justify="left" if heading in ("family", "pool", "verdict") else "right")
    failed = False
    for name in options.family or FAMILIES:
        for pool, extra in (("whole", ()), ("small", SMALL_POOL)):
            begin, verdict, done = time.monotonic(), "passed", []
            try:
                done = soak(name, extra, options.rounds, f"{name}, {pool} pool")
                if extra and not sum(found.preemptions for found in done):
                    raise AssertionError("nothing was preempted")
            except AssertionError as error:
                verdict, failed = f"FAILED: {error}", True
            table.add_row(
                name,
                pool,
                *(str(sum(getattr(found, kind) for found in done)) for kind in ("requests", "left", "preemptions")),
                f"{near_ties(references(name).completions):.2%}",
                f"{time.monotonic() - begin:.0f}",
                verdict,
            )
    Console().print(table)
    return int(failed)


def soak(name: str, options: tuple[str, ...], rounds: int, title: str) -> list[Round]:
    """So many rounds on one server, without and with end tokens in turn."""
    known = references(name)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, serving(artifact(name), Path(folder, "log"), options) as server:
        return [
            one_round(
                server,
                known.ended if number % 2 else known.completions,
                seed=100 + number,
                leaving=LEAVING,
                small_pool=options == SMALL_POOL,
            )
            for number in track(range(rounds), description=title, console=console)
        ]


if __name__ == "__main__":
    sys.exit(main())
