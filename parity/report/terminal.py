"""The report in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nxdi_qwen.parity.report.tables import TextTable, Wrong, lines, tables
from nxdi_qwen.parity.result import Comparison

_TEXT = ("prompt", "phase", "side", "what", "prompts", "versions", "notes", "verdict")  # aligned left
_WORD = 12  # letters that are not broken


def print_report(outcome: Comparison, console: Console | None = None) -> None:
    """Prints the lines, the most urgent one first and none of them broken, then the tables."""
    console = console or Console()
    for line in lines(outcome):
        console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)
    for table in tables(outcome):
        console.print(_rich(table))


def _rich(table: TextTable) -> Table:
    # Words from files must not be taken for markup: Text takes them as they are.
    drawn = Table(title=Text(table.title, style="table.title"))
    for heading in table.headings:
        drawn.add_column(
            heading,
            justify="left" if heading in _TEXT else "right",
            overflow="fold",
            min_width=_WORD if heading == "prompt" else None,
        )
    for row in table.rows:
        drawn.add_row(*(Text(cell, style="bold red" if isinstance(cell, Wrong) else "") for cell in row))
    return drawn
