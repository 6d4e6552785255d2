"""The outcome of a live run on recorded values as text."""

from __future__ import annotations

from tensortrace.cli.render import words
from tensortrace.cli.render.finding import SENTENCE, SHORT
from tensortrace.cli.render.numbers import counted, number
from tensortrace.cli.render.page import Look, Page
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.text import ROWS, Detail
from tensortrace.diff.result import Side
from tensortrace.replay.forced import Faulty, Forced

_STYLES = {"agrees": "bold green", "mismatch": "bold red", "incomplete": "bold yellow"}


def render(result: Forced, *, look: Look | None = None, detail: Detail = "normal") -> str:
    """Return the result as text; ``quiet`` is the headline alone, ``verbose`` leaves nothing out."""
    page = Page(look or Look())
    headline = safe(result.headline, limit=SENTENCE)
    page.line((result.verdict.upper(), _STYLES[result.verdict]), headline.removeprefix(result.verdict))
    if detail == "quiet":
        return page.text()
    limit = None if detail == "verbose" else ROWS
    if result.faulty:
        _table(page, result, limit)
    _coverage(page, result, limit)
    return page.text()


def _table(page: Page, result: Forced, limit: int | None) -> None:
    page.blank()
    shown = result.faulty[:limit]
    header = ["place", "forward", "backward", "wrong in", "steps", "first boundary"]
    page.table(header, [_row(place) for place in shown], right="forward,backward")
    page.more(len(result.faulty) - len(shown))
    page.blank()
    for place in shown:
        text = place.causes[0].text if place.causes else f"unexplained; {place.first.text}"
        code = f" [{place.causes[0].code}]" if place.causes else ""
        page.line((f"{_name(place)}:", "bold"), f" {safe(text, limit=SENTENCE)}{code}")
    page.blank()


def _row(place: Faulty) -> tuple[str, ...]:
    steps = ", ".join(str(step) for step in place.steps[:3]) + (", …" if len(place.steps) > 3 else "")
    return (
        _name(place), _error(place, "forward"), _error(place, "backward"),
        ", ".join(place.wrong_in) or place.part, steps,
        words.key(place.first.where),
    )  # fmt: skip


def _name(place: Faulty) -> str:
    name = safe(place.name, limit=SHORT)
    return f"{name} (between modules)" if place.part == "between" else name


def _error(place: Faulty, way: str) -> str:
    found = place.forward if way == "forward" else place.backward
    if found is None:
        return "differs" if way in place.wrong_in else "-"
    return number(found)


def _coverage(page: Page, result: Forced, limit: int | None) -> None:
    kinds = ", ".join(f"{count:,} {safe(kind, limit=20)}" for kind, count in result.forced.items())
    page.line(("forced:", "bold"), f" {kinds or 'nothing'}")
    for group in result.not_forced[:limit]:
        example = safe(group.examples[0], limit=SHORT)
        reason = safe(group.reason, limit=SENTENCE)
        page.line(("not forced:", "bold"), f" {group.count:,} {group.kind}: {reason} (e.g. {example})")
    page.more(len(result.not_forced) - len(result.not_forced[:limit]))
    page.line(("compared:", "bold"), f" {result.compared:,}, {result.bitwise_equal:,} bitwise equal")
    if result.follow:
        page.line(("follow:", "bold"), f" {result.follow:,} more differences come from these")
    for missing in result.missing[:limit]:
        reason = safe(missing.reason, limit=SENTENCE)
        page.line(("missing:", "bold yellow"), f" {missing.count:,} {missing.kind}: {reason}")
    for note in result.notes:
        page.line(("note:", "bold"), f" {safe(note, limit=SENTENCE)}")
    page.line(("recorded:", "bold"), f" {_side(result.recorded)}")
    page.line(("live:", "bold"), f" {_side(result.live)}")


def _side(side: Side) -> str:
    return f"{safe(side.path, limit=SHORT)}: {counted(side.ranks, 'rank')}, {counted(side.steps, 'step')}"
