"""The report: what stands first, that names from files stay text, and the page in a real browser without a network."""

from __future__ import annotations

import io
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from nxdi_qwen.parity.compare import compare_runs, comparison
from nxdi_qwen.parity.records import Description, Prompt, Run, TopLogprobs
from nxdi_qwen.parity.report import html
from nxdi_qwen.parity.report.html import render, write_page
from nxdi_qwen.parity.report.terminal import print_report
from nxdi_qwen.parity.result import Cause, Comparison, Drill, Place, PromptResult
from nxdi_qwen.scripts import logit_diff as script
from tests.command_line import call, refused
from tests.parity.small import STEPS, TOKENS, config, logits, noisy, run

EVIL = "</script><script>window.injected = 1</script><img src=x onerror='window.injected = 2'>"
MARKUP = "[red]\N{ESCAPE}[31m{{ 7 * 7 }}%{x}"
POSITIONS = TOKENS + STEPS


def named(base: Run, name: str, **fields: Any) -> Run:
    return Run(Prompt(name, base.prompt.ids), base.forced, **{"logits": base.logits, **fields})


def inside(size: float, seed: int = 0) -> dict[str, Any]:
    """Hidden states, states and experts of four layers, `size` away from the same ones."""

    def values(*shape: int) -> Tensor:
        right = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        return right + size * torch.randn(shape, generator=torch.Generator().manual_seed(2 + seed))

    states = {"recurrent": (1 + STEPS, 2, 3, 3), "conv": (1 + STEPS, 6, 3)}
    caches = {"key": (POSITIONS, 1, 4), "value": (POSITIONS, 1, 4)}
    return {
        "hidden": values(5, POSITIONS, 6),
        "states": {
            f"layers.{layer}.{role}": values(*shape)
            for layer in range(4)
            for role, shape in (caches if layer == 3 else states).items()
        },
        "experts": torch.tensor([0, 1, 2]).repeat(2, POSITIONS, 1),
        "router_margins": torch.full((2, POSITIONS), 0.1),
    }


def compared(name: str, target: Run, expected: Tensor | None = None) -> PromptResult:
    reference = named(run(expected), name, **inside(0.0))
    sixteen_bit = named(run(noisy(0.02, 2)), name, **inside(0.01, 1))
    return compare_runs(reference, target, sixteen_bit, config(moe=True), "bfloat16")


def right() -> PromptResult:
    return compared(EVIL, named(run(noisy(0.02, 1)), EVIL, **inside(0.01)))


def wrong() -> PromptResult:
    """A near tie at 2, a flip at 9, other experts at 5, NaN in a state after the first decode step and in a logit at
    10, which is taken for the best.
    """
    expected, changed = logits(), noisy(0.02, 1)
    for position, margin in ((2, 0.001), (9, 0.5)):
        first, second = expected[position].topk(2).indices
        expected[position, second] = expected[position, first] - margin
        changed[position] = expected[position]
        changed[position, second] += margin + 0.1
    changed[10, 7] = math.nan
    parts = inside(0.5)
    parts["states"]["layers.1.recurrent"][1] = math.nan
    parts["hidden"][2, 10:] = math.inf
    parts["experts"][1, 5] = torch.tensor([0, 1, 3])
    return compared(MARKUP, named(run(changed), MARKUP, **parts), expected)


def served() -> PromptResult:
    best = noisy(0.02, 3).log_softmax(dim=-1).topk(20)
    ids, logprobs = best.indices.clone(), best.values.clone()
    ids[0], logprobs[0] = -1, math.nan
    return compared("served", Run(Prompt("served", run().prompt.ids), run().forced, top=TopLogprobs(ids, logprobs)))


@pytest.fixture(scope="module")
def outcome() -> Comparison:
    sides = [
        SimpleNamespace(description=Description(kind, "0" * 64, dtype, {"torch": "2.13"}, notes))
        for kind, dtype, notes in (
            ("huggingface", "float32", ()),
            ("artifact", "bfloat16", ("hidden states: <i>of the eager model</i>",)),
            ("huggingface", "bfloat16", ()),
        )
    ]
    drill = Drill(
        Place("layer 1", 1, 2, "recurrent", "one request alone", 0.5, 0.01),
        Cause("decay", "with the reference's decay it agrees", "decay"),
        ("layer 1 ran alone",),
    )
    return comparison(*sides, (right(), wrong(), served()), drill)  # type: ignore[arg-type]


def printed(outcome: Comparison) -> str:
    file = io.StringIO()
    print_report(outcome, Console(file=file, width=110))
    return file.getvalue()


def test_the_terminal_shows_nan_first_and_then_everything(outcome: Comparison) -> None:
    text = printed(outcome)
    rows = text.splitlines()
    assert "NaN in the target's recurrent state, layer 1, decode step 1 (18 such values)" in rows[0]
    assert rows[1] == "FAILED: 1 of 3 prompts"
    assert any(row.startswith("parts in layer 1, position 2 (one request alone): recurrent 5.0e-01") for row in rows)
    assert "cause: decay (with the reference's decay it agrees; first to differ: decay)" in rows
    table = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows if row.startswith("│")]
    (flip,) = (row for row in table if row[1:3] == ["9", "decode"])
    (near,) = (row for row in table if row[1:3] == ["2", "prefill"])
    assert (flip[-1], near[-1]) == ("flip", "near tie") and near[5] == "1.0e-03"
    assert "experts: 1 differ, 1 at near ties" in text and "best token: 3 differ, 1 at near ties" in text
    assert ["the best 50: the target returns 20 log probabilities a position", "served"] in table
    assert (
        text.count("inf > 5e-01") == 3 and "overlap at least 65%" in text and "hidden states: <i>of the eager" in text
    )


def test_names_neither_style_nor_steer_the_terminal(outcome: Comparison) -> None:
    text = printed(outcome)
    assert "│ [red]" in text and "\N{ESCAPE}" not in text and "\N{REPLACEMENT CHARACTER}[31m{{ 7" in text


class Elements(HTMLParser):
    """The page's scripts and everything that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.links: list[str] = []
        self.images = 0
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside = tag == "script"
        self.images += tag == "img"
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "action", "data")]
        if self.inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[-1] += data


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_the_page_holds_everything_and_names_stay_text(outcome: Comparison) -> None:
    text = render(outcome)
    page = Elements(text)
    assert page.links == ["data:,"] and page.images == 0 and len(page.scripts) == 3
    assert "plotly.js v" in page.scripts[0][:200] and len(page.scripts[0]) > 1_000_000
    plots = {plot["key"]: plot for plot in json.loads(page.scripts[1], parse_constant=refuse)}
    assert list(plots) == [
        *("positions", "layers", "heat", "state-recurrent", "state-conv", "state-kv"),
        *("margins", "agreement", "bands", "prompts"),
    ]
    assert "<script>window" not in text and "<img" not in text and "&lt;/script&gt;&lt;script&gt;window" in text
    assert "{{ 7 * 7 }}" in text and "<i>of" not in text
    # plotly takes names on an axis for markup of its own.
    assert "&lt;/script&gt;" in plots["agreement"]["traces"][0][1]["x"][0]
    crosses = [trace for _, trace in plots["positions"]["traces"] if trace["name"] == "target: NaN or infinite"]
    assert [trace["x"] for trace in crosses] == [[10]]


def test_a_passing_page_says_so(tmp_path: Path) -> None:
    side = SimpleNamespace(description=Description("eager", "0" * 64, "float32", {}))
    equal = compare_runs(run(), run(), None, config(), "float32")
    write_page(comparison(side, side, None, [equal], None), tmp_path / "page.html")  # type: ignore[arg-type]
    text = (tmp_path / "page.html").read_text()
    assert '<span class="verdict ">passed</span>' in text and '"urgent"' not in text
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_command_writes_the_page(
    outcome: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "run_session", lambda *_: outcome)
    output = call(capsys, script.logit_diff, "--html", tmp_path / "page.html", "--json")
    assert output.status == 1 and json.loads(output.out)["passed"] is False
    assert (tmp_path / "page.html").read_text() == render(outcome)


def test_what_prevents_a_page_is_said_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "run_session", None)
    page = tmp_path / "page.html"
    for arguments, message in (
        (["--html", tmp_path], "is a folder"),
        (["--html", tmp_path / "none" / "page.html"], "make it first"),
        (["--html", page, "--reference", "none"], "a --reference other than none"),
    ):
        refused(capsys, script.logit_diff, tmp_path, arguments, message)
    monkeypatch.setitem(sys.modules, "plotly", None)
    refused(capsys, script.logit_diff, tmp_path, ["--html", page], "pip install 'nxdi-qwen[report]'")


def test_a_page_that_cannot_be_written_leaves_nothing_and_takes_nothing_along(
    outcome: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script, "run_session", lambda *_: outcome)
    monkeypatch.setattr(html, "render", lambda _: "page")
    monkeypatch.setattr(Path, "replace", full)
    output = call(capsys, script.logit_diff, "--html", tmp_path / "page.html", "--json")
    assert output.status == 2 and "No space left on device" in output.err
    assert json.loads(output.out)["passed"] is False
    assert not list(tmp_path.iterdir())


def test_plotly_is_not_imported_without_a_page() -> None:
    code = "import sys; import nxdi_qwen.parity.report.html; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def browser() -> Iterator[Any]:
    """Headless Chromium, which is no Python package: the system's, where there is one."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with driver.sync_playwright() as play:
        # Root, as in containers, has no sandbox.
        running = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.slow
def test_the_page_in_a_browser_without_a_network(outcome: Comparison, tmp_path: Path, browser: Any) -> None:
    write_page(outcome, tmp_path / "page.html")
    context = browser.new_context(offline=True, viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    requests: list[str] = []
    with pytest.raises(Exception, match="ERR_INTERNET_DISCONNECTED"):
        context.new_page().goto("http://127.0.0.1/")
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "page.html").as_uri())
    assert page.evaluate("window.injected") is None
    assert "FAILED" in page.title() and page.locator("li").first.inner_text().endswith("(18 such values)")

    def drawn(key: str, what: str) -> int:
        found: int = page.locator(f"#{key} {what}").count()
        return found

    def trace(key: str, name: str) -> Any:
        return page.evaluate(
            "([key, name]) => document.getElementById(key).data.find(trace => trace.name === name)", [key, name]
        )

    def choose(name: str, value: str) -> None:
        page.select_option(f"#{name}", value)

    # The first prompt that fails is chosen, and every plot is drawn.
    failed, passing = outcome.prompts[1], outcome.prompts[0]
    assert page.input_value("#prompt") == "1"
    assert drawn("positions", ".scatterlayer .trace") == 2 + 1 + 1 + 4  # sides, NaN, other experts, bounds
    assert drawn("positions", ".scatterlayer .trace:first-child .points path") == POSITIONS - 1
    assert drawn("layers", ".scatterlayer .trace") == 4 + 2 and drawn("layers", ".shapelayer path") == 1
    assert drawn("heat", ".heatmaplayer image") == 1
    assert drawn("state-recurrent", ".scatterlayer .trace") == 3 + 1 + 1
    assert drawn("state-conv", ".scatterlayer .trace") == 3 + 1 and drawn("state-kv", ".scatterlayer .trace") == 2 + 1
    assert drawn("agreement", ".barlayer .point path") == 2 * 3 + 3
    assert drawn("bands", ".barlayer .point path") == 8 and drawn("margins", ".scatterlayer .trace") == 3
    assert trace("margins", "near tie")["x"] == [2] and trace("margins", "flip")["x"] == [9, 10]
    assert trace("positions", "target")["y"][3] == pytest.approx(failed.positions_rel[3], rel=1e-3)
    # log and linear
    curve = page.locator("#positions .scatterlayer path.js-line").first
    before = curve.get_attribute("d")
    assert page.evaluate("positions.layout.yaxis.type") == "log"
    choose("axis", "linear")
    assert page.evaluate("positions._fullLayout.yaxis.type") == "linear" and curve.get_attribute("d") != before
    # band
    tolerances = {(band.phase, band.top_k): band.tolerance for band in failed.bands}
    assert trace("positions", "tolerance, prefill")["y"][0] == tolerances["prefill", None]
    assert drawn("prompts", ".barlayer .point path") == 2 * 2
    choose("band", "best 5")
    assert trace("positions", "tolerance, prefill")["y"][0] == tolerances["prefill", 5]
    assert drawn("prompts", ".barlayer .point path") == 2 * 3  # a server's best tokens are in this one
    # prompt
    choose("prompt", "0")
    assert trace("positions", "target")["y"][3] == pytest.approx(passing.positions_rel[3], rel=1e-3)
    assert trace("margins", "flip") is None
    choose("prompt", "2")
    assert page.locator("#heat").is_hidden() and page.locator("#heat + .empty").is_visible()
    choose("prompt", "1")
    assert drawn("heat", ".heatmaplayer image") == 1 and page.locator("#heat + .empty").is_hidden()
    assert page.evaluate("window.injected") is None and problems == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in requests)
    context.close()
