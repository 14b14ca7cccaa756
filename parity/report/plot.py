"""One plot: plotly's traces, each with the prompt and the band that it is drawn for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

RED = "#cf222e"
CATEGORY = "category"

Number = float | None
Json = dict[str, Any]


@dataclass
class Plot:
    """`traces` and `shapes` are pairs of a condition and plotly's own JSON: {} is always shown, {"prompt": 0} for the
    first prompt, {"prompt": 0, "band": "all"} for one band of it. `scaled`: the y axis is logarithmic on demand.
    `x_type`, `y_type`: `CATEGORY` where words must not be taken for numbers, "-" lets plotly choose.
    """

    key: str
    title: str
    note: str
    x: str
    y: str
    scaled: bool = True
    x_type: str = "-"
    y_type: str = "-"
    traces: list[tuple[Json, Json]] = field(default_factory=list)
    shapes: list[tuple[Json, Json]] = field(default_factory=list)

    def line(
        self, when: Json, name: str, x: Sequence[Any], y: Sequence[Number], colour: str, dash: str = "solid"
    ) -> None:
        """A line with a point for every value; gaps for None, and for NaN and infinities, which have no place on an
        axis, crosses at the height of the largest finite value.
        """
        style = {"width": 1.5, "color": colour, "dash": dash}
        marker = {"size": 4, "color": colour}
        self.scatter(when, name, x, finite(y), mode="lines+markers", marker=marker, line=style)
        broken = [place for place, value in zip(x, y, strict=True) if value is not None and not math.isfinite(value)]
        if broken:
            height = max((value for value in finite(y) if value is not None), default=1.0) or 1.0
            self.points(when, f"{name}: NaN or infinite", broken, [height] * len(broken), RED, "x")

    def points(
        self, when: Json, name: str, x: Sequence[Any], y: Sequence[Number], colour: str, symbol: str, **look: Any
    ) -> None:
        marker = {"size": 10, "color": colour, "symbol": symbol}
        self.scatter(when, name, x, finite(y), mode="markers", marker=marker, **look)

    def scatter(self, when: Json, name: str, x: Sequence[Any], y: Sequence[Number], **look: Any) -> None:
        import plotly.graph_objects as go

        trace = go.Scatter(name=name, x=list(x), y=list(y), hoverlabel={"namelength": -1}, **look)
        self.traces.append((when, trace.to_plotly_json()))

    def bars(self, when: Json, name: str, x: Sequence[str], y: Sequence[Number], **look: Any) -> None:
        import plotly.graph_objects as go

        trace = go.Bar(name=name, x=list(x), y=finite(y), hoverlabel={"namelength": -1}, **look)
        self.traces.append((when, trace.to_plotly_json()))


def finite(values: Iterable[Number]) -> list[Number]:
    """For JSON, which knows neither NaN nor infinity: None for them, and four digits for the rest."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.4g}") for value in values]
