"""A test for pytest that replays a packed case and asserts its verdict."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tensortrace.replay.case import Case

_TEMPLATE = '''\
"""Replays a packed case: {headline}"""

from pathlib import Path

from tensortrace.replay import replay_case

CASE = Path(__file__).parent / {case!r}


def test_{name}() -> None:
    replayed = replay_case(CASE)
    assert replayed.found.verdict == {verdict!r}, replayed.found.headline
    first = replayed.found.first
    assert {place} == {first!r}, replayed.found.headline
    assert replayed.found.causes[:1] == {causes!r}, replayed.found.headline'''

_PLACE = "(first and (first.step, first.microbatch, first.kind, first.name, first.slot, first.call))"


def pytest_file(case: Case, archive: Path, test: Path) -> str:
    """Return the source of a test at ``test`` that needs tensortrace and the archive, and nothing else.

    The last line has no newline yet.
    """
    first = case.expected.first
    where = first and (first.step, first.microbatch, first.kind, first.name, first.slot, first.call)
    headline = re.sub(
        r"[^ !#-\[\]-~]", "?", case.expected.headline
    )  # no quote, backslash or control character
    return _TEMPLATE.format(
        headline=headline, case=os.path.relpath(archive.absolute(), test.absolute().parent),
        name=re.sub(r"\W", "_", archive.stem, flags=re.ASCII), verdict=case.expected.verdict, place=_PLACE,
        first=where, causes=case.expected.causes[:1],
    )  # fmt: skip
