"""A result as JUnit's XML: what GitLab, Jenkins, Buildkite and others show as tests."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from tensortrace.cli.formats.summary import Check, Summary
from tensortrace.cli.render.finding import SENTENCE
from tensortrace.cli.render.safe import REPLACEMENT, safe

_FORBIDDEN = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold, not even escaped: most control characters, surrogates, U+FFFE and U+FFFF."""

_ELEMENTS = {"failed": "failure", "error": "error", "skipped": "skipped"}


def junit(summary: Summary) -> str:
    """Return one test suite with a test case for each check; the first that fails holds the whole text."""
    suites = Element("testsuites")
    counts = {
        "tests": len(summary.checks),
        "failures": _count(summary, "failed"),
        "errors": _count(summary, "error"),
        "skipped": _count(summary, "skipped"),
    }
    suite = SubElement(suites, "testsuite", {"name": summary.tool})
    for name, count in counts.items():
        suite.set(name, str(count))
    for check in summary.checks:
        _case(suite, summary, check)
    if summary.holds:  # else what failed holds it
        SubElement(suite, "system-out").text = _allowed(summary.text)
    indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(suites, encoding="unicode") + "\n"


def _count(summary: Summary, state: str) -> int:
    return sum(check.state == state for check in summary.checks)


def _case(suite: Element, summary: Summary, check: Check) -> None:
    place = _allowed(f"{summary.tool} {safe(summary.subject)}")
    case = SubElement(suite, "testcase", classname=place, name=_allowed(safe(check.name)))
    if check.state in _ELEMENTS:
        told = SubElement(case, _ELEMENTS[check.state], message=_allowed(safe(check.message, limit=SENTENCE)))
        if check.state != "skipped":
            told.set("type", summary.verdict)
        told.text = _allowed(check.details) or None


def _allowed(text: str) -> str:
    return _FORBIDDEN.sub(REPLACEMENT, text)
