"""Output survives a stream that cannot encode it."""

from __future__ import annotations

import io
import sys

import pytest

from tensortrace.cli.render.say import say


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii", "utf-8"])
def test_characters_that_the_stream_lacks_are_replaced(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    monkeypatch.setattr(sys, "stdout", stream)
    say("大 5 more")
    stream.flush()
    expected = "大 5 more\n" if encoding == "utf-8" else "? 5 more\n"
    assert raw.getvalue().decode(encoding) == expected
