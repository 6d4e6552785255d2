"""The report in a real browser: what it draws, where a click or a key leads, and what it refuses to run.

The planted case: a data-parallel run whose rank 1 has one output column of one module 1 % too large in step
1. The module's name, and so its parameters', is made to break out of HTML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tensortrace.cli import main
from tensortrace.cli.report.html import draw
from tensortrace.cli.report.ladder import Ladder, LadderRow
from tensortrace.cli.report.page import of_comparison
from tensortrace.diff.engine import compare
from tensortrace.diff.examined import Examined
from tensortrace.tracer.types import Kind, Meta
from tests import browser
from tests.browser import Browser, Page
from tests.simulated import HIDDEN, At, Program
from tests.synthetic import write_trace

pytestmark = pytest.mark.skipif(browser.installed() is None, reason="needs Chromium")

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&amp;{{7*7}}"

STEPS = ["init", 0, 1, 2]
PLANTED, COLUMN = 1, 5


class Planted(Program):
    """Rank 1 computes a column of a module's output wrongly in one step, or not at all."""

    wrong = True

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        here = (at.step, at.rank, at.kind, at.name, at.slot) == (PLANTED, 1, Kind.ACTIVATION, "hidden", "out")
        if not (here and self.wrong):
            return value
        changed = value.copy()
        changed[..., COLUMN] *= np.float32(1.01)
        return changed

    def run(self) -> list[list[Any]]:
        """Run, then rename the module: only the trace has the name."""
        for records in super().run():
            for fields, _ in records:
                fields["name"] = fields["name"].replace("hidden", HOSTILE)
                meta: Meta | None = fields.get("meta")
                if meta is not None and meta.members:
                    members = tuple(name.replace("hidden", HOSTILE) for name in meta.members)
                    fields["meta"] = replace(meta, members=members)
        return self.records


class Correct(Planted):
    """The reference."""

    wrong = False


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("report")
    return Correct(ranks=1).write(folder / "a"), Planted(ranks=2, order=1).write(folder / "b")


@pytest.fixture(scope="module")
def report(traces: tuple[Path, Path]) -> Path:
    target = traces[0].parent / "report.html"
    assert main.run(["report", *map(str, traces), "-o", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def window(chromium: Browser) -> Page:
    return chromium.page()


@pytest.fixture
def page(window: Page, report: Path) -> Page:
    """The report, freshly opened in a wide window."""
    return shown(window, report)


def shown(window: Page, file: Path, *, width: int = 1400) -> Page:
    window.size(width, 900)
    window.prefer("light")
    window.open("about:blank")
    for heard in (window.requests, window.complaints, window.dialogs):
        heard.clear()
    window.open(file.as_uri())
    window.settle()
    return window


def embedded(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.eval("document.getElementById('data').textContent"))
    return found


def rung(page: Page, kind: str, name: str, slot: str) -> int:
    rows = embedded(page)["ladder"]["rows"]
    return [(row["kind"], row["name"], row["slot"]) for row in rows].index((kind, name, slot))


def middle_of(page: Page, x: int, y: int) -> tuple[float, float]:
    """Return where in the window a cell's middle is; the map is scrolled into view."""
    box = page.eval("""(() => {
        const heat = document.getElementById('heat');
        heat.scrollIntoView({block: 'center', behavior: 'instant'});
        const {left, top} = heat.getBoundingClientRect(), d = heat.dataset;
        return [left + +d.left, top + +d.top, +d.width, +d.height];
    })()""")
    return box[0] + (x + 0.5) * box[2], box[1] + (y + 0.5) * box[3]


def color_of(page: Page, x: int, y: int) -> tuple[int, int, int]:
    """Return the colour in a cell's middle, left of any mark that is drawn through it."""
    red, green, blue = page.eval(f"""(() => {{
        const heat = document.getElementById('heat'), d = heat.dataset;
        const at = [+d.left + ({x} + 0.7) * d.width, +d.top + ({y} + 0.7) * d.height];
        return [...heat.getContext('2d').getImageData(...at.map(Math.round), 1, 1).data].slice(0, 3);
    }})()""")
    return red, green, blue


def detail(page: Page) -> str:
    return str(page.eval("document.getElementById('detail').innerText"))


def test_it_opens_without_a_complaint_or_a_request(page: Page, report: Path) -> None:
    assert page.complaints == []
    assert page.requests == [report.as_uri()]
    assert page.eval("performance.getEntriesByType('resource').length") == 0
    assert report.stat().st_size < 1 << 20


def test_a_hostile_name_is_shown_as_text(page: Page) -> None:
    assert page.eval("document.title").startswith("divergent: ")
    assert HOSTILE in page.eval("document.querySelector('h1').innerText")
    assert HOSTILE in detail(page)
    assert f"{HOSTILE}.weight" in page.eval("document.body.textContent")
    assert page.eval("document.querySelectorAll('img, iframe, object').length") == 0
    assert page.eval("document.scripts.length") == 2
    assert page.dialogs == []


def test_the_policy_runs_nothing_but_its_own_script_and_loads_nothing(page: Page) -> None:
    page.eval("""(() => {
        const script = document.createElement('script');
        script.textContent = 'window.intruder = 1';
        document.body.append(script);
        document.body.insertAdjacentHTML('beforeend', '<img src=x onerror="window.intruder = 2">');
        document.body.insertAdjacentHTML('beforeend', '<p id=styled style="color: rgb(1, 2, 3)">');
    })()""")
    refused = "fetch('https://example.org/').then(() => 'loaded', () => 'refused')"
    assert page.eval(refused) == "refused"
    assert page.eval("window.intruder") is None
    assert page.eval("getComputedStyle(document.getElementById('styled')).color") != "rgb(1, 2, 3)"
    assert not any(address.startswith("http") for address in page.requests)


def test_the_heat_map_shows_the_origin_where_it_is(page: Page) -> None:
    ladder = embedded(page)["ladder"]
    x, y = rung(page, "activation", HOSTILE, "out"), STEPS.index(PLANTED)
    assert ladder["steps"] == STEPS
    assert ladder["first"] == [x, y]
    before = ladder["rows"][x - 1]
    assert (before["name"], before["slot"]) == (HOSTILE, "in.0")  # what it was computed from
    red, _, blue = color_of(page, x, y)
    assert red > blue + 40  # beyond what is allowed: from yellow to brown
    for other in ((x - 1, y), (x, y - 1)):
        red, _, blue = color_of(page, *other)
        assert blue >= red, other  # equal, or within what is allowed: from grey to blue
    assert "origin" in detail(page)
    assert f"step {PLANTED}, microbatch 0" in detail(page)


def test_what_follows_from_the_origin_diverges_downstream_alone(page: Page) -> None:
    ladder = embedded(page)["ladder"]
    states = embedded(page)["states"]
    x, y = ladder["first"]
    diverging = {
        (step, row) for row, rung_ in enumerate(ladder["rows"]) for step, state, *_ in rung_["cells"]
        if states[state] in ("origin", "receiver")
    }  # fmt: skip
    assert min(diverging)[0] == y
    assert min(row for step, row in diverging if step == y) == x
    assert (y, rung(page, "activation", "head", "out")) in diverging


def test_a_click_on_a_cell_leads_to_its_detail_and_an_address(page: Page) -> None:
    x, y = rung(page, "activation", "head", "out"), STEPS.index(2)
    page.click(*middle_of(page, x, y))
    assert "activation head out" in detail(page)
    assert "step 2, microbatch 0" in detail(page)
    assert page.eval("location.hash") == f"#cell-{x}-2"


def test_the_origin_leads_to_the_map_of_its_tensor(page: Page) -> None:
    x, y = rung(page, "activation", HOSTILE, "out"), STEPS.index(PLANTED)
    page.click(*middle_of(page, x, y))
    page.eval("document.querySelector('#detail [href^=\"#tensor\"]').click()")
    page.until("location.hash === '#tensor-0'")
    tensor = embedded(page)["tensors"][0]
    assert tensor["cell"] == f"#cell-{x}-{PLANTED}"
    rows, columns = tensor["grid"]
    assert columns == HIDDEN
    hurt = {number % columns for number, level in enumerate(tensor["blocks"]) if (level or -999) > -100}
    assert hurt == {COLUMN}  # errors of 1e-5 of the tensor or more are in the planted column alone
    assert {part["label"] for part in tensor["parts"]} == {"rank 0", "rank 1"}
    assert tensor["parts"][-1]["rows"][1] == tensor["rows"] >= rows
    assert page.eval("document.querySelector('#tensor-0 canvas.error').width") > 100


def test_keys_move_through_the_map_and_back_to_the_origin(page: Page) -> None:
    x, y = embedded(page)["ladder"]["first"]
    name = "document.getElementById('detail').dataset.cell"
    page.eval("document.getElementById('heat').focus({preventScroll: true})")
    page.press("ArrowRight")
    assert page.eval(name) == f"cell-{x + 1}-{PLANTED}"
    page.press("ArrowDown")
    assert page.eval(name) == f"cell-{x + 1}-{PLANTED + 1}"
    page.press("Home")
    assert page.eval(name) == f"cell-0-{PLANTED + 1}"
    page.press("n")
    assert page.eval(name) == f"cell-{x}-{STEPS[y]}"
    page.press("Enter")
    page.until("location.hash === '#tensor-0'")


def test_a_boundary_is_found_by_words_of_its_name(page: Page) -> None:
    page.press("/")
    assert page.eval("document.activeElement.id") == "search"
    page.call("Input.insertText", {"text": "param head.bias"})
    page.settle()
    assert page.eval("[...document.querySelectorAll('#found a')].map(a => a.firstChild.data)") == [
        "param head.bias model"
    ]
    page.eval("document.querySelector('#found a').click()")
    page.until("document.getElementById('detail').innerText.includes('param head.bias model')")


def test_keys_choose_among_what_is_found_and_tell_of_themselves(page: Page) -> None:
    page.press("/")
    page.call("Input.insertText", {"text": "head.bias"})
    page.press("ArrowDown")
    chosen = page.eval("document.activeElement.hash")
    page.press("Enter")
    page.until(f"location.hash === {json.dumps(chosen)}")
    assert page.eval("document.activeElement.id") == "heat"
    page.press("?")
    assert page.eval("document.getElementById('help').open") is True
    page.press("?")
    assert page.eval("document.getElementById('help').open") is False


def test_a_chart_and_a_cell_tell_their_numbers_where_they_are_pointed_at(page: Page) -> None:
    tip = "document.getElementById('tip')"
    x, y = middle_of(page, rung(page, "activation", "head", "out"), STEPS.index(2))
    page.call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
    page.settle()
    assert page.eval(f"{tip}.innerText").startswith("activation head out")
    page.eval("document.querySelector('#growth svg[data-chart]').focus()")
    page.press("ArrowRight")
    place = embedded(page)["charts"][0]["places"][0]
    assert place["name"] in page.eval(f"{tip}.innerText")
    assert place["values"][1] in page.eval(f"{tip}.innerText")
    page.press("Enter")
    page.until(f"location.hash === {json.dumps(place['cell'])}")


def test_the_command_of_a_cell_shows_its_values(page: Page, traces: tuple[Path, Path]) -> None:
    page.eval(f"location.hash = '#cell-{rung(page, 'activation', 'head', 'out')}-2'")
    page.until("document.querySelector('#detail code').textContent.includes('--step 2')")
    told = page.eval("document.querySelector('#detail code').textContent")
    assert told == f"trace show {traces[1]} --step 2 --kind activation --name head --values"


NAMES = ("a" * 4000, "</script><script>window.intruder=3</script>", "__proto__")


def test_names_and_numbers_of_every_kind_are_only_shown(window: Page, tmp_path: Path) -> None:
    """A name of 4,000 letters, one that would end the script; NaN and infinities in both runs."""
    values = np.array([np.nan, np.inf, -np.inf, 0.0, 1e-45, 3e38], np.float32)
    for run, tensor in (("a", values), ("b", values[::-1].copy())):
        write_trace(tmp_path / run, [[
            ({"step": step, "microbatch": None, "kind": Kind.PARAM, "name": name, "slot": "model"}, tensor)
            for step in (-1, 0, 1) for name in NAMES
        ]])  # fmt: skip
    target = tmp_path / "r.html"
    assert main.run(["report", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(target)]) == 0
    page = shown(window, target, width=400)
    assert page.complaints == []
    assert page.eval("window.intruder") is None
    assert page.eval("document.documentElement.scrollWidth") <= 400
    assert "origin" in detail(page)
    page.eval("document.getElementById('heat').focus({preventScroll: true})")
    for key in ("ArrowRight", "End", "n", "Enter"):
        page.press(key)
    assert page.complaints == []


def test_an_address_of_a_cell_opens_it(window: Page, report: Path) -> None:
    page = shown(window, report)
    x = rung(page, "activation", "embed", "out")
    window.open("about:blank")
    window.open(f"{report.as_uri()}#cell-{x}-0")
    window.settle()
    assert "activation embed out" in detail(window)
    assert "step 0" in detail(window)


def test_it_is_dark_where_the_system_is_and_turns_at_a_key(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    x, y = embedded(page)["ladder"]["first"]
    light, cell = page.eval(background), color_of(page, x + 3, y)
    page.prefer("dark")
    page.settle()
    dark = page.eval(background)
    assert sum(map(int, dark[4:-1].split(","))) < 120 < 600 < sum(map(int, light[4:-1].split(",")))
    assert color_of(page, x + 3, y) != cell
    page.press("d")
    assert page.eval(background) == light
    assert color_of(page, x + 3, y) == cell


def test_a_narrow_window_scrolls_no_way_but_down(window: Page, report: Path) -> None:
    page = shown(window, report, width=400)
    assert page.eval("document.documentElement.scrollWidth") <= 400
    assert page.eval("document.getElementById('scroll').clientWidth") <= 400


def test_print_is_light_and_leaves_nothing_folded(page: Page) -> None:
    page.prefer("dark", "print")
    page.eval("dispatchEvent(new Event('beforeprint'))")
    assert page.eval("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.eval("document.querySelectorAll('details:not([open])').length") == 0
    page.eval("dispatchEvent(new Event('afterprint'))")
    assert page.eval("document.querySelectorAll('details:not([open])').length") > 0
    assert len(page.call("Page.printToPDF")["data"]) > 10_000


def test_it_can_be_read_without_scripts(window: Page, report: Path) -> None:
    window.call("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        window.open(report.as_uri())
        root = window.call("DOM.getDocument", {"depth": -1})["root"]["nodeId"]
        text = window.call("DOM.getOuterHTML", {"nodeId": root})["outerHTML"]
    finally:
        window.call("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "The heat map is drawn by this file's own script" in text
    assert text.count('class="chart"') >= 4


def test_one_trace_has_a_report_of_its_own(window: Page, traces: tuple[Path, Path]) -> None:
    target = traces[0].parent / "one.html"
    assert main.run(["report", str(traces[1]), "-o", str(target)]) == 0
    page = shown(window, target)
    assert page.complaints == []
    assert embedded(page)["ladder"]["values"] is True
    assert page.eval("document.querySelectorAll('#weights tbody tr').length") == 2
    assert "Not compared" not in page.eval("document.body.innerText")


def test_two_thousand_rungs_of_twenty_steps_stay_usable(window: Page, traces: tuple[Path, Path]) -> None:
    pages: list[str] = []

    def look(found: Examined) -> None:
        cells = tuple((step, 1, 0.5, 1e-7, 2e-7) for step in range(20))
        rows = tuple(LadderRow(0, "activation", f"layers.{n}.mlp", "out", 0, cells) for n in range(2000))
        ladder = Ladder(steps=tuple(range(20)), rows=rows, first=(1999, 19), rows_left_out=98_000)
        pages.append(draw(of_comparison(found, (), "r.html")._replace(ladder=ladder)))

    compare(*traces, look=look)
    target = traces[0].parent / "many.html"
    target.write_text(pages[0], encoding="utf-8")
    page = shown(window, target)
    assert page.complaints == []
    page.eval("document.getElementById('heat').focus({preventScroll: true})")
    page.press("ArrowLeft")
    assert "layers.1998.mlp" in detail(page)
    spent = page.eval("""(() => {
        const begun = performance.now();
        for (let n = 0; n < 20; n++) heat.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}));
        return performance.now() - begun;
    })()""")
    assert "layers.1978.mlp" in detail(page)
    assert spent < 4000  # 200 ms a key on a busy machine
    assert "98,000" not in page.eval("document.body.innerText")
    assert "Of 100,000 rungs the 2,000 worst are here" in page.eval("document.body.innerText")
