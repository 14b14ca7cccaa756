"""A comparison as lines and tables of text, which the terminal and the page show alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nxdi_qwen.parity.result import DECODE, PREFILL, Band, Comparison, PromptResult, RoutingFlip, TokenFlip

PASSED, FAILED = "passed", "FAILED"
_MOST_FLIPS = 20  # rows of one table
_MOST_POSITIONS = 6  # in one cell


class Wrong(str):
    """A cell that stands out."""


@dataclass(frozen=True)
class TextTable:
    """`rows` have a cell for each of the `headings`."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def title(outcome: Comparison) -> str:
    target, reference = outcome.target, outcome.reference
    return f"{target.kind} ({target.dtype}) against {reference.kind} ({reference.dtype})"


def lines(outcome: Comparison) -> list[str]:
    """What stands first: NaN and infinities, then the verdict, its reasons, the place and the cause."""
    return [printable(line) for line in outcome.lines]


def tables(outcome: Comparison) -> list[TextTable]:
    """Those that have something to say, the verdict's first."""
    found = (
        _verdicts(outcome),
        _bands(outcome),
        _three_way(outcome),
        _token_flips(outcome),
        _routing_flips(outcome),
        _not_compared(outcome),
        _sides(outcome),
    )
    return [table for table in found if table.rows]


def printable(text: str) -> str:
    """Names come from files: what could steer a terminal is replaced."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def phases(result: PromptResult) -> Iterator[tuple[str, slice]]:
    """The phases of a prompt and their positions."""
    yield PREFILL, slice(result.tokens)
    if result.steps:
        yield DECODE, slice(result.tokens, None)


def agreement(matches: Sequence[bool | None]) -> float | None:
    """The share of equal best tokens among those compared."""
    known = [match for match in matches if match is not None]
    return sum(known) / len(known) if known else None


def band_name(top_k: int | None) -> str:
    return "all" if top_k is None else f"best {top_k}"


def band_names(outcome: Comparison) -> list[str]:
    """All that were judged, the narrowest first."""
    found = {band.top_k for result in outcome.prompts for band in result.bands}
    return [band_name(top_k) for top_k in sorted(found, key=lambda top_k: (top_k is None, top_k))]


def _verdicts(outcome: Comparison) -> TextTable:
    rows = []
    for result in outcome.prompts:
        for phase, positions in phases(result):
            errors = [value for value in result.positions_rel[positions] if value is not None]
            share = agreement(result.top1[positions])
            cells = (
                printable(result.prompt),
                phase,
                str(len(errors)),
                f"{max(errors):.2e}" if errors else "-",
                "-" if share is None else f"{share:.1%}",
                _verdict(result.passed),
            )
            rows.append(cells)
    return TextTable(title(outcome), ("prompt", "phase", "tokens", "max_rel", "top-1", "verdict"), rows)


def _bands(outcome: Comparison) -> TextTable:
    names = band_names(outcome)
    rows = []
    for result in outcome.prompts:
        for phase, _ in phases(result):
            cells = {band_name(band.top_k): _against(band) for band in result.bands if band.phase == phase}
            if cells:
                rows.append((printable(result.prompt), phase, *(cells.get(name, "-") for name in names)))
    return TextTable("max_rel over the reference's best logits", ("prompt", "phase", *names), rows)


def _three_way(outcome: Comparison) -> TextTable:
    verdicts = [(result, verdict) for result in outcome.prompts for verdict in result.three_way]
    rows = [
        (
            printable(result.prompt),
            verdict.phase,
            _bounded(f"{verdict.std_ratio:.2f}", verdict.std_ratio <= verdict.std_ratio_bound),
            _bounded(f"{verdict.overlap:.0%}", verdict.overlap >= verdict.overlap_bound),
            _bounded(f"{verdict.worst_ratio:.2f}", verdict.worst_ratio <= verdict.worst_ratio_bound),
            _verdict(verdict.passed),
        )
        for result, verdict in verdicts
    ]
    heading = "errors over those of the 16-bit reference"
    for _, verdict in verdicts[:1]:  # the bounds are the same for all
        heading += f": deviation at most {verdict.std_ratio_bound:g}, overlap at least {verdict.overlap_bound:.0%}, "
        heading += f"worst position at most {verdict.worst_ratio_bound:g}"
    return TextTable(heading, ("prompt", "phase", "deviation", "overlap", "worst position", "verdict"), rows)


def _token_flips(outcome: Comparison) -> TextTable:
    flips = [(result, flip) for result in outcome.prompts for flip in result.token_flips]
    flips.sort(key=lambda pair: pair[1].near_tie)
    rows = [
        (
            printable(result.prompt),
            str(flip.position),
            flip.phase,
            str(flip.reference_token),
            str(flip.target_token),
            f"{flip.margin:.1e}",
            f"{flip.step:.1e}",
            _kind(flip),
        )
        for result, flip in flips[:_MOST_FLIPS]
    ]
    near = sum(flip.near_tie for _, flip in flips)
    of_reference = [result.sixteen_bit_flips for result in outcome.prompts if result.sixteen_bit_flips is not None]
    beside = f"; {sum(of_reference)} in the 16-bit reference" if of_reference else ""
    heading = f"best token: {len(flips)} differ, {near} at near ties{beside}{_shown(len(flips))}"
    return TextTable(heading, ("prompt", "position", "phase", "reference", "target", "margin", "step", "what"), rows)


def _routing_flips(outcome: Comparison) -> TextTable:
    groups: dict[tuple[bool, int, int], list[RoutingFlip]] = defaultdict(list)
    for number, result in enumerate(outcome.prompts):
        for flip in result.routing_flips:
            groups[flip.near_tie, number, flip.layer].append(flip)
    rows = [
        (
            printable(outcome.prompts[number].prompt),
            str(layer),
            str(len(group)),
            _positions([flip.position for flip in group]),
            "-" if (margin := _largest_margin(group)) is None else f"{margin:.1e}",
            f"{max(flip.rounding for flip in group):.1e}",
            _kind(group[0]),
        )
        for (_, number, layer), group in sorted(groups.items())[:_MOST_FLIPS]
    ]
    total = sum(len(group) for group in groups.values())
    near = sum(len(group) for (near_tie, _, _), group in groups.items() if near_tie)
    heading = f"experts: {total} differ, {near} at near ties{_shown(len(groups))}"
    return TextTable(heading, ("prompt", "layer", "tokens", "positions", "largest margin", "rounding", "what"), rows)


def _not_compared(outcome: Comparison) -> TextTable:
    where: dict[str, list[str]] = defaultdict(list)
    for result in outcome.prompts:
        for what in result.not_compared:
            where[what].append(printable(result.prompt))
    rows = [(what, "all" if len(names) == len(outcome.prompts) else ", ".join(names)) for what, names in where.items()]
    return TextTable("not compared", ("what", "prompts"), rows)


def _sides(outcome: Comparison) -> TextTable:
    sides = (("target", outcome.target), ("reference", outcome.reference), ("16-bit reference", outcome.sixteen_bit))
    rows = [
        (
            name,
            f"{side.kind} ({side.dtype})",
            side.model_sha256[:12],
            ", ".join(f"{library} {version}" for library, version in side.versions.items()),
            printable("; ".join(side.notes)),
        )
        for name, side in sides
        if side is not None
    ]
    return TextTable("who ran", ("side", "what", "model", "versions", "notes"), rows)


def _verdict(passed: bool) -> str:
    return PASSED if passed else Wrong(FAILED)


def _bounded(text: str, within: bool) -> str:
    return text if within else Wrong(text)


def _against(band: Band) -> str:
    error = f"{band.max_rel:.1e}"
    return error if band.passed else Wrong(f"{error} > {band.tolerance:.0e}")


def _kind(flip: TokenFlip | RoutingFlip) -> str:
    return "near tie" if flip.near_tie else Wrong("flip")


def _largest_margin(flips: Sequence[RoutingFlip]) -> float | None:
    return max((flip.margin for flip in flips if flip.margin is not None), default=None)


def _positions(positions: Sequence[int]) -> str:
    shown = ", ".join(map(str, positions[:_MOST_POSITIONS]))
    return shown + (", ..." if len(positions) > _MOST_POSITIONS else "")


def _shown(rows: int) -> str:
    return f" (the first {_MOST_FLIPS} of {rows} rows)" if rows > _MOST_FLIPS else ""
