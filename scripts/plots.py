"""PNG files for `--plot`: checked before anything is computed, written at the end."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from nxdi_qwen.modeling.errors import InputError
from nxdi_qwen.scripts.command import check_file


def check_plot(path: Path) -> None:
    """Raises InputError where a plot cannot be drawn: another kind of file, no such folder, no matplotlib."""
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot writes a PNG: give a name that ends in .png, not {path}")
    check_file(path, "--plot")
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'nxdi-qwen[plot]'") from None


def new_figure(size: tuple[float, float], columns: int = 1) -> tuple[Any, Any]:
    """A matplotlib figure and its axes, without a display; `size` in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, columns)


def write_plot(figure: Any, path: Path) -> None:
    """Raises InputError where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    try:
        FigureCanvasAgg(figure).print_png(path)
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror}): choose another place with --plot") from error
