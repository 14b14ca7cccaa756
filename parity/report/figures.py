"""The plots of a comparison. The page's script draws those of the chosen prompt and band."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from nxdi_qwen.parity.report.plot import CATEGORY, RED, Json, Number, Plot
from nxdi_qwen.parity.report.tables import agreement, band_name, band_names, phases, printable
from nxdi_qwen.parity.result import DECODE, Comparison, PromptResult

TARGET, SIXTEEN_BIT, AMBER, GREY = "#1f6feb", "#8250df", "#d4700a", "#8c959f"
_PHASE_COLOURS = {False: RED, True: TARGET}
_LONGEST_LABEL = 40


def plots(outcome: Comparison) -> list[Plot]:
    """All plots; one that has nothing to show for a prompt has no trace for it."""
    found = [
        _positions(outcome),
        _layers(outcome),
        _heat(outcome),
        _states(outcome, "recurrent", "decode step, 0 after the prompt", ("recurrent",)),
        _states(outcome, "conv", "decode step, 0 after the prompt", ("conv",)),
        _states(outcome, "KV", "position", ("key", "value")),
        _margins(outcome),
        _agreement(outcome),
        _bands_of_prompt(outcome),
        _band_over_prompts(outcome),
    ]
    return [plot for plot in found if plot.traces]


def labels(outcome: Comparison) -> list[str]:
    """Of the prompts: different ones, and short enough for an axis."""
    names = [f"{number}: {printable(result.prompt)}" for number, result in enumerate(outcome.prompts, 1)]
    return [name if len(name) <= _LONGEST_LABEL else f"{name[: _LONGEST_LABEL - 1]}…" for name in names]


def _positions(outcome: Comparison) -> Plot:
    note = (
        "Largest error of a position over the phase's largest reference logit. The dashed lines are the chosen band's "
        "tolerances, the diamonds its worst positions."
    )
    plot = Plot("positions", "Error over positions", note, "position", "max_rel")
    for number, result in enumerate(outcome.prompts):
        when = {"prompt": number}
        x = range(len(result.positions_rel))
        plot.line(when, "target", x, result.positions_rel, TARGET)
        if result.sixteen_bit_rel is not None:
            plot.line(when, "16-bit reference", x, result.sixteen_bit_rel, SIXTEEN_BIT, dash="dot")
        unjudged = [place for place in x if not result.judged[place]]
        if unjudged:
            heights = [result.positions_rel[place] for place in unjudged]
            plot.points(when, "not judged: other experts", unjudged, heights, AMBER, "circle-open")
        for band in result.bands:
            chosen = when | {"band": band_name(band.top_k)}
            span = [index for phase, part in phases(result) if phase == band.phase for index in x[part]]
            ends, colour = [span[0] - 0.5, span[-1] + 0.5], GREY if band.passed else RED
            limit = {"mode": "lines", "line": {"dash": "dash", "color": colour}}
            plot.scatter(chosen, f"tolerance, {band.phase}", ends, [band.tolerance] * 2, **limit)
            plot.points(chosen, f"worst, {band.phase}", [band.worst], [band.max_rel], colour, "diamond-open")
        _mark_decode(plot, number, result)
    return plot


def _layers(outcome: Comparison) -> Plot:
    note = "Of the hidden states after every layer, over their root mean square; the worst position and all together."
    plot = Plot("layers", "Error per layer", note, "layer", "relative root mean square", x_type=CATEGORY)
    sides: tuple[tuple[str, str, Callable[[PromptResult], list[list[float]] | None]], ...] = (
        ("target", TARGET, lambda result: result.hidden_rel),
        ("16-bit reference", SIXTEEN_BIT, lambda result: result.hidden_rel_sixteen_bit),
    )
    for number, result in enumerate(outcome.prompts):
        for side, colour, of in sides:
            hidden = of(result)
            if hidden is not None:
                x = _layer_names(hidden)
                together = [math.hypot(*row) / math.sqrt(len(row)) for row in hidden]
                plot.line({"prompt": number}, f"{side}, worst position", x, _worst(hidden), colour)
                plot.line({"prompt": number}, f"{side}, all", x, together, colour, dash="dot")
    place = outcome.drill.place if outcome.drill is not None else None
    if place is not None and place.layer is not None:
        line = {"color": RED, "dash": "dash"}
        label = {"text": "parts here", "textposition": "end", "textangle": 0, "font": {"color": RED}}
        number = place.layer + 1  # of the category: the embedding is 0
        ends = {"x0": number, "x1": number, "y0": 0, "y1": 1, "yref": "paper"}
        plot.shapes.append(({}, {"type": "line", "line": line, "label": label, **ends}))
    return plot


def _heat(outcome: Comparison) -> Plot:
    import plotly.graph_objects as go

    note = "Of the target's hidden states; colours are powers of ten, white is no difference, red is NaN or infinite."
    plot = Plot("heat", "Error by layer and position", note, "position", "layer", scaled=False, y_type=CATEGORY)
    for number, result in enumerate(outcome.prompts):
        if result.hidden_rel is None:
            continue
        rows = _layer_names(result.hidden_rel)
        powers = [
            [math.log10(value) if value > 0 and math.isfinite(value) else None for value in row]
            for row in result.hidden_rel
        ]
        powers = [[None if value is None else round(value, 2) for value in row] for row in powers]
        look: Json = {"colorscale": "Viridis", "colorbar": {"title": {"text": "log10"}}}
        heat = go.Heatmap(z=powers, y=rows, hovertemplate="position %{x}, layer %{y}: 10^%{z}<extra></extra>", **look)
        plot.traces.append(({"prompt": number}, heat.to_plotly_json()))
        broken = [
            (position, rows[layer])
            for layer, row in enumerate(result.hidden_rel)
            for position, value in enumerate(row)
            if not math.isfinite(value)
        ]
        if broken:
            x, y = zip(*broken, strict=True)
            marker = {"color": RED, "symbol": "x", "size": 7}
            plot.scatter({"prompt": number}, "NaN or infinite", x, y, mode="markers", marker=marker, showlegend=False)
        _mark_decode(plot, number, result)
    return plot


def _states(outcome: Comparison, title: str, x: str, roles: Sequence[str]) -> Plot:
    from plotly.colors import sequential

    note = "Over the root mean square of the state, a line for every layer; dark ones are the first layers."
    key = f"state-{title.lower()}"
    plot = Plot(key, f"State error: {title}", note, x, "relative root mean square")
    for number, result in enumerate(outcome.prompts):
        own = _of_roles(result.states_rel, roles)
        last = max((layer for layer, _ in own), default=0)
        for (layer, role), values in own.items():
            colour = sequential.Viridis[9 * layer // max(last, 1)]
            name = f"layer {layer} {role}" if len(roles) > 1 else f"layer {layer}"
            plot.line({"prompt": number}, name, range(len(values)), values, colour)
        other = list(_of_roles(result.states_rel_sixteen_bit, roles).values())
        if own and other:
            worst = _worst(list(zip(*other, strict=True)))
            name = "16-bit reference, worst layer"
            plot.line({"prompt": number}, name, range(len(worst)), worst, GREY, dash="dot")
        if own and roles == ("key", "value"):
            _mark_decode(plot, number, result)
    return plot


def _margins(outcome: Comparison) -> Plot:
    note = (
        "The reference's best less its second best logit. Where the target's best token is another one, it is a near "
        "tie if the margin is below the step of the target's dtype."
    )
    plot = Plot("margins", "Margins", note, "position", "top-1 minus top-2")
    for number, result in enumerate(outcome.prompts):
        when = {"prompt": number}
        plot.line(when, "margin", range(len(result.margins)), result.margins, GREY)
        for near, name, colour, symbol in ((True, "near tie", AMBER, "diamond"), (False, "flip", RED, "x")):
            flips = [flip for flip in result.token_flips if flip.near_tie == near]
            if flips:
                words = [
                    f"reference {flip.reference_token}, target {flip.target_token}, step {flip.step:.1e}"
                    for flip in flips
                ]
                x, y = [flip.position for flip in flips], [flip.margin for flip in flips]
                plot.points(when, name, x, y, colour, symbol, text=words)
        _mark_decode(plot, number, result)
    return plot


def _agreement(outcome: Comparison) -> Plot:
    note = "The share of positions whose best token is the reference's."
    plot = Plot("agreement", "Top-1 agreement", note, "prompt", "share", scaled=False, x_type=CATEGORY)
    shares: dict[str, tuple[list[str], list[Number]]] = {}
    for label, result in zip(labels(outcome), outcome.prompts, strict=True):
        values = {phase: agreement(result.top1[part]) for phase, part in phases(result)}
        if result.sixteen_bit_flips is not None:
            values["16-bit reference, both phases"] = 1 - result.sixteen_bit_flips / len(result.top1)
        for name, value in values.items():
            x, y = shares.setdefault(name, ([], []))
            x.append(escape(label))
            y.append(value)
    for name, (x, y) in shares.items():
        plot.bars({}, name, x, y)
    return plot


def _bands_of_prompt(outcome: Comparison) -> Plot:
    note = "Largest error over the reference's best logits, of the chosen prompt; red is above the tolerance."
    plot = Plot("bands", "Logit bands", note, "band", "max_rel", x_type=CATEGORY)
    for number, result in enumerate(outcome.prompts):
        for phase, _ in phases(result):
            bands = [band for band in result.bands if band.phase == phase]
            names = [band_name(band.top_k) for band in bands]
            values = [(band.max_rel, band.tolerance, band.passed) for band in bands]
            _bars_with_tolerance(plot, {"prompt": number}, phase, names, values)
    return plot


def _band_over_prompts(outcome: Comparison) -> Plot:
    note = "Largest error over the reference's best logits, all prompts; red is above the tolerance."
    plot = Plot("prompts", "The chosen band of every prompt", note, "prompt", "max_rel", x_type=CATEGORY)
    names = [escape(label) for label in labels(outcome)]
    for chosen in band_names(outcome):
        for phase in dict.fromkeys(phase for result in outcome.prompts for phase, _ in phases(result)):
            pairs = [
                (name, (band.max_rel, band.tolerance, band.passed))
                for name, result in zip(names, outcome.prompts, strict=True)
                for band in result.bands
                if band.phase == phase and band_name(band.top_k) == chosen
            ]
            x, values = [name for name, _ in pairs], [value for _, value in pairs]
            _bars_with_tolerance(plot, {"band": chosen}, phase, x, values)
    return plot


def _bars_with_tolerance(
    plot: Plot, when: Json, phase: str, x: Sequence[str], values: Sequence[tuple[float, float, bool]]
) -> None:
    """`values`: error, tolerance and whether it passed."""
    if not x:
        return
    colours = [_PHASE_COLOURS[passed] for _, _, passed in values]
    marker = {"color": colours, "pattern": {"shape": "/" if phase == DECODE else ""}}
    words = [f"tolerance {tolerance:.1e}" for _, tolerance, _ in values]
    broken = [place for place, (error, _, _) in zip(x, values, strict=True) if not math.isfinite(error)]
    plot.bars(when, phase, x, [error for error, _, _ in values], marker=marker, text=words, textposition="none")
    limits = {"color": "black", "symbol": "line-ew-open", "size": 16}
    tolerances = [tolerance for _, tolerance, _ in values]
    plot.scatter(when, f"tolerance, {phase}", x, tolerances, mode="markers", marker=limits)
    if broken:
        height = max((error for error, _, _ in values if math.isfinite(error)), default=1.0) or 1.0
        plot.points(when, f"{phase}: NaN or infinite", broken, [height] * len(broken), RED, "x")


def _mark_decode(plot: Plot, number: int, result: PromptResult) -> None:
    """A shade behind the decode steps."""
    if result.steps:
        ends = {"x0": result.tokens - 0.5, "x1": result.tokens + result.steps - 0.5}
        label = {"text": "decode", "textposition": "top left", "font": {"color": GREY}}
        place = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "line": {"width": 0}}
        plot.shapes.append(({"prompt": number}, {**place, **ends, "fillcolor": "#eef1f4", "label": label}))


def _of_roles(states: dict[str, list[float]] | None, roles: Sequence[str]) -> dict[tuple[int, str], list[float]]:
    """By layer and role, of names like "layers.3.conv"."""
    named = {tuple(name.split(".")[1:]): values for name, values in (states or {}).items()}
    return {(int(layer), role): values for (layer, role), values in named.items() if role in roles}


def _layer_names(hidden: Sequence[object]) -> list[str]:
    return ["embedding", *map(str, range(len(hidden) - 1))]


def _worst(rows: Iterable[Sequence[float]]) -> list[float]:
    """The largest of every row, NaN counted as infinite."""
    return [max(math.inf if math.isnan(value) else value for value in row) for row in rows]
