"""The errors that users see: what, found, expected, remedy."""

from __future__ import annotations


class TraceError(Exception):
    """Base of every error that reaches a user; the CLI prints it as one line and exits with 2.

    ``what`` names file and offset, or FQN, step, microbatch and rank; ``remedy`` says what to do.
    """

    def __init__(self, what: str, *, found: str = "", expected: str = "", remedy: str = "") -> None:
        self.what = what
        self.found = found
        self.expected = expected
        self.remedy = remedy
        parts = [what]
        if found:
            parts.append(f"found {found}")
        if expected:
            parts.append(f"expected {expected}")
        text = ": ".join(parts[:1]) + ("".join(f", {part}" for part in parts[1:]))
        super().__init__(f"{text}; {remedy}" if remedy else text)


class DamagedTrace(TraceError):
    """A file of a trace is truncated, altered or foreign; names the file and the offset."""


class NotKept(TraceError):
    """The elements of a tensor of which no more than digest, statistics and a sketch were recorded."""


class UnsupportedFormat(TraceError):
    """A trace of a format version that this reader does not read."""


class BadRequest(TraceError):
    """An option, path or command that cannot be honoured."""
