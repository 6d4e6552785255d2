"""Draws a page as one HTML file that loads nothing, runs only its own script, and shows any text as text."""

from __future__ import annotations

import base64
import hashlib
import math
from functools import cache
from importlib import metadata, resources

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tensortrace.cli.render import words
from tensortrace.cli.render.finding import POLICIES, SENTENCE
from tensortrace.cli.render.numbers import counted, number, ranks, times
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.text import power_words
from tensortrace.cli.report.chart import Chart
from tensortrace.cli.report.ladder import NAME, STATES, short
from tensortrace.cli.report.page import Page
from tensortrace.cli.report.tensors import Tensor, index
from tensortrace.diff.error_map import SIZES
from tensortrace.diff.result import Cause, Where

NOT_FINITE = 9999
"""Stands in a map for a block of which one run alone has finite numbers."""

PARTS_PER_DECADE = 20


def draw(page: Page) -> str:
    """Return the file's text."""
    style, script = _asset("report.css"), _script()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    template = _environment().from_string(_asset("report.html.jinja"))
    links = Links(page)
    return template.render(
        page=page,
        links=links,
        version=metadata.version("tensortrace"),
        policy=policy,
        style=_markup(style),
        script=_markup(script),
        embedded=_embedded(page, links),
    )


def _markup(text: str) -> Markup:
    """Return text that is not escaped: our own, or JSON without the characters that HTML gives a meaning."""
    return Markup(text)  # noqa: S704


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    """Return one of our own files: neither holds what would end a script or style element."""
    return resources.files("tensortrace.cli.report").joinpath("assets", name).read_text(encoding="utf-8")


SCRIPTS = ("colours", "ladder", "cells", "find", "maps", "charts", "page")
"""Parts of the script, in the order in which they run: each sees what those before it define."""


@cache
def _script() -> str:
    """Return the parts as one script; in a block, so that no name of theirs becomes the window's."""
    parts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return f'"use strict";\n{{\n{parts}}}\n'


@cache
def _environment() -> Environment:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "text": _text, "num": number, "times": times, "key": words.key, "moment": words.moment,
        "boundary": words.boundary,
        "counted": counted, "short": short, "ranks": ranks, "index": index, "claim": _claim, "link": _link,
        "residuals": _residuals, "power": power_words, "role": _role,
    }  # fmt: skip
    environment.globals |= {
        "size_labels": _size_labels(), "ulp_labels": _ulp_labels(), "policies": POLICIES,
    }  # fmt: skip
    return environment


def _text(text: str, limit: int = SENTENCE) -> str:
    return safe(text, limit=limit)


def _claim(text: str) -> str:
    """Return a sentence as a headline: on one line, the first letter large."""
    shown = safe(text, limit=SENTENCE)
    first = shown.partition(" ")[0].rstrip(",:;")
    return shown[:1].upper() + shown[1:] if first.isalpha() else shown  # a name stays as it is


def _role(role: str) -> str:
    return "downstream" if role == "receiver" else role


class Links:
    """The addresses of the boundaries of a page."""

    def __init__(self, page: Page) -> None:
        self._init = page.init
        self._rows: dict[tuple[object, ...], int] = {}
        for row, rung in enumerate(
            page.ladder.rows
        ):  # a name in training comes before the same in evaluation
            self._rows.setdefault((rung.microbatch, rung.kind, rung.name, rung.slot, rung.call), row)

    def to(self, where: Where) -> str:
        """Return the address of a boundary's cell within the page; of the ladder where it has none."""
        name, slot = safe(where.name, limit=NAME), safe(where.slot, limit=NAME)
        row = self._rows.get((where.microbatch, where.kind, name, slot, where.call))
        step = self._init if where.step == "init" else where.step
        return "#ladder" if row is None else f"#cell-{row}-{step}"


def _link(where: Where, links: Links) -> str:
    return links.to(where)


def _residuals(cause: Cause) -> tuple[float, float, float]:
    """Return where the residuals before and after, and the floor, lie on a log scale 400 wide."""
    values = (cause.residual_before, cause.residual_after, cause.floor)
    logs = [math.log10(min(max(value, _LEAST), 1e3)) if value == value else 0.0 for value in values]
    low, high = min(logs) - 1, max(*logs, 0.0) + 0.5
    before, after, floor = (round(400 * (log - low) / (high - low), 1) for log in logs)
    return before, after, floor


_LEAST = 1e-14
"""Residual that is drawn in place of smaller ones."""


def _size_labels() -> list[str]:
    return [f"1e{decade}" for decade in SIZES]


def _ulp_labels() -> list[str]:
    return ["<1", *(f"2^{n}" for n in range(25))]


def _embedded(page: Page, links: Links) -> Markup:
    """Return what the script reads, as JSON that no character of ends its element."""
    document = {
        "states": STATES,
        "ladder": page.ladder,
        "tensors": [_map(tensor, links) for tensor in page.tensors],
        "charts": [_chart(chart, links) for chart in (*page.growth, *page.history.charts)],
        "recordings": page.recordings,
    }
    text = msgspec.json.encode(document).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return _markup(text)


def _map(tensor: Tensor, links: Links) -> dict[str, object]:
    found = tensor.map
    cell = links.to(tensor.told.where)
    if found is None:
        return {"cell": cell}
    return {
        "cell": cell, "rows": found.rows, "columns": found.columns, "grid": found.grid,
        "blocks": [_level(value) for value in found.blocks], "parts": found.parts,
    }  # fmt: skip


def _chart(chart: Chart, links: Links) -> dict[str, object]:
    """Return what can be pointed at in a chart: names, values of each line, addresses of boundaries."""
    return {
        "labels": [line.label for line in chart.lines],
        "places": [
            {"at": place.at, "name": place.name, "values": place.values}
            | ({"cell": links.to(place.where)} if place.where else {})
            for place in chart.places
        ],
    }


def _level(value: float) -> int | None:
    """Return a block's error as twentieths of a decade; None where the runs are equal."""
    if not math.isfinite(value):
        return NOT_FINITE
    return round(PARTS_PER_DECADE * math.log10(value)) if value > 0 else None
