"""Where an earlier diff found the runs to part: the steps that are worth recording in full."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import INIT_STEP, Kind, LevelRule

MOST_BYTES = 256 << 20
_SCHEMA = "tensortrace.diff/"
_STATE = (Kind.OPTIMIZER_STATE, Kind.PARAM, Kind.BUFFER)


class _Finding(Struct):
    step: int | str


class _Report(Struct):
    schema: str
    first_divergent: _Finding | None
    step_offset: int = 0


def full_at(path: Path) -> tuple[LevelRule, ...]:
    """Return the rules that keep in full the step at which a diff's report says that two runs part.

    The state that the step before left is kept too. Where the runs' steps are numbered differently those of
    both numberings are. Raises BadRequest naming the file for what is no report, or one of no divergence.
    """
    report = _read(path)
    if report.first_divergent is None:
        raise BadRequest(
            f"option --full-at: {path}", found="first_divergent null", expected="the report of a divergence",
            remedy="nothing needs to be recorded in full",
        )  # fmt: skip
    step = report.first_divergent.step
    number = INIT_STEP if step == "init" else step
    if not isinstance(number, int) or not INIT_STEP <= number < 1 << 48 or abs(report.step_offset) >= 1 << 48:
        raise BadRequest(f"option --full-at: {path}", found=f"first_divergent.step {step!r:.40}")
    other = number - report.step_offset if number >= 0 else number
    rules = []
    for at in sorted({number, max(other, INIT_STEP)}):
        first = at if at > 0 else INIT_STEP
        rules.append(LevelRule("full", (), ((first, max(at, 0)),)))
        if at > 0:
            rules.append(LevelRule("full", _STATE, ((at - 1 or INIT_STEP, at - 1),)))
    return tuple(rules)


def _read(path: Path) -> _Report:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadRequest(f"option --full-at: {path}", found=error.strerror or "no file") from error
    expected = "what `trace diff a/ b/ --json FILE` wrote"
    try:
        report = msgspec.json.decode(text, type=_Report)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"option --full-at: {path}", found=f"{error}"[:200], expected=expected) from error
    if not report.schema.startswith(_SCHEMA):
        raise BadRequest(
            f"option --full-at: {path}", found=f"schema {report.schema[:60]!r}", expected=expected
        )
    return report
