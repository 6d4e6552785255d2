"""What ``--zoom`` promises, and the format version that a trace of it states."""

from __future__ import annotations

import pytest

from tensortrace.tracer import layout
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.selection import parse_promise


def test_operations_are_of_the_first_recorded_step_unless_told_otherwise() -> None:
    assert parse_promise(zoom=["blocks.1.*"]).zoom_steps == ((0, 0),)
    assert parse_promise(zoom=["blocks.1.*"], steps="7-9").zoom_steps == ((7, 7),)
    assert parse_promise(zoom=["blocks.1.*"], steps="7-9", zoom_steps="8-9").zoom_steps == ((8, 9),)


def test_nothing_is_promised_of_operations_without_zoom() -> None:
    promise = parse_promise(steps="0-3")
    assert (promise.zoom, promise.zoom_steps) == ((), ())


@pytest.mark.parametrize("options", [{"zoom_steps": "1"}, {"zoom": [""]}, {"zoom": ["x"], "zoom_steps": "x"}])
def test_zoom_that_makes_no_sense_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="--zoom"):
        parse_promise(**options)  # type: ignore[arg-type]


def test_only_a_trace_of_operations_needs_a_reader_of_version_2() -> None:
    assert layout.version_of(parse_promise()) == 1
    assert layout.version_of(parse_promise(zoom=["blocks.1"])) == 2
    assert layout.NEWEST >= 2
