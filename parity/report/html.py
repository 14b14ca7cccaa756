"""The report as one page that needs nothing else: plots, tables and plotly's own script are inside."""

from __future__ import annotations

import importlib
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.parity.report.figures import labels, plots
from nxdi_qwen.parity.report.tables import FAILED, Wrong, band_names, lines, tables, title
from nxdi_qwen.parity.result import Comparison

TEMPLATE = "page.html"


def check_page(path: Path) -> None:
    """Before anything is computed: the place, and plotly. Raises InputError."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the name of a file for the page")
    if not path.absolute().parent.is_dir():
        raise InputError(f"no folder {path.parent} for the page: make it first")
    try:
        importlib.import_module("plotly")
    except ImportError:
        raise InputError("the page's plots need plotly: pip install 'nxdi-qwen[report]'") from None


def write_page(outcome: Comparison, path: Path) -> None:
    """Writes the page, whole or not at all. Raises InputError where `path` cannot be written."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(render(outcome), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}): choose another place for the page") from error
    finally:
        part.unlink(missing_ok=True)


def render(outcome: Comparison) -> str:
    """The page. All that comes from the comparison is escaped."""
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    # A NaN would make the page's data no JSON: an error here, instead of an empty page there.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    shown = plots(outcome)
    return environment.get_template(TEMPLATE).render(
        title=title(outcome),
        passed=outcome.passed,
        lines=lines(outcome),
        urgent=sum(len(result.non_finite) for result in outcome.prompts),
        tables=tables(outcome),
        failed=FAILED,
        wrong=lambda cell: isinstance(cell, Wrong),
        prompts=labels(outcome),
        worst=next((number for number, result in enumerate(outcome.prompts) if not result.passed), 0),
        bands=band_names(outcome),
        plots=shown,
        data=[vars(plot) for plot in shown],
        plotlyjs=Markup(get_plotlyjs()),
    )
