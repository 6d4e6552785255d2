"""The outcome of a resume check as text."""

from __future__ import annotations

from tensortrace.cli.render import text
from tensortrace.cli.render.finding import SENTENCE
from tensortrace.cli.render.page import Look, Page
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.text import Detail
from tensortrace.diff.result import Result
from tensortrace.diff.resume import ResumeResult

_STYLES = {"equivalent": "bold green", "divergent": "bold red", "incomplete": "bold yellow"}


def render(result: ResumeResult, *, look: Look, detail: Detail = "normal") -> str:
    """Return the headline, then the comparison that it speaks of; ``verbose`` shows both."""
    page = Page(look)
    headline = safe(result.headline, limit=SENTENCE)
    page.line((result.verdict.upper(), _STYLES[result.verdict]), headline.removeprefix(result.verdict))
    if detail == "quiet":
        return page.text()
    for note in result.notes:
        page.line(("note:", "bold"), f" {safe(note, limit=SENTENCE)}")
    parts = [page.text()]
    for title, part in (("before the interruption", result.before), ("after it", result.after)):
        if detail == "verbose" or part is told(result):
            parts.append(f"\n{title}: {text.render(part, look=look, detail=detail)}")
        else:
            parts.append(f"\n{title}: {text.render(part, look=look, detail='quiet')}")
    return "".join(parts)


def hints(result: ResumeResult) -> tuple[str, ...]:
    """Return the hints of the comparison that the headline speaks of."""
    return text.hints(told(result))


def told(result: ResumeResult) -> Result:
    """Return the comparison that the headline speaks of."""
    return result.after if result.before else result.before
