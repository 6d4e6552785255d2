"""The options of a recording that keeps its last steps, and the promise that they mean."""

from __future__ import annotations

import math

import msgspec

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import Kind, Promise

TRIGGERS = ("nonfinite", "loss-spike", "SIGUSR1")
"""What may end a recording that keeps its last steps; ``loss-spike:K`` sets how steep a spike is."""


def parse_flight(
    promise: Promise, *, keep_last: int, trigger: str, after: int | None, max_bytes: str | None
) -> Promise:
    """Return the promise with what ``--keep-last``, ``--trigger`` and ``--after`` say.

    Raises BadRequest where one is malformed, has no effect without another, or contradicts another.
    """
    if keep_last < 0:
        raise BadRequest("option --keep-last", found=str(keep_last), expected="a number of steps, at least 1")
    if keep_last == 0 and (trigger or after is not None):
        raise BadRequest(
            f"option {'--trigger' if trigger else '--after'}", expected="--keep-last N beside it"
        )
    if after is not None and (after < 0 or not trigger):
        raise BadRequest(
            "option --after", found=str(after), expected="steps, at least 0, and --trigger beside it"
        )
    if keep_last and max_bytes is not None:
        raise BadRequest(
            "option --max-bytes", found="--keep-last beside it", expected="one of them",
            remedy="what --keep-last N writes stays below N + 2 steps: lower N",
        )  # fmt: skip
    triggers = tuple(_parse_trigger(part.strip(), promise) for part in trigger.split(",")) if trigger else ()
    return msgspec.structs.replace(promise, keep_last=keep_last, after=after or 0, triggers=triggers)


def _parse_trigger(text: str, promise: Promise) -> str:
    name, colon, times = text.partition(":")
    if name not in TRIGGERS or (colon and name != "loss-spike"):
        raise BadRequest("option --trigger", found=repr(text), expected=f"of {', '.join(TRIGGERS)}")
    if colon and not _is_positive(times):
        raise BadRequest(
            "option --trigger", found=repr(text), expected="loss-spike:K with a number K above 0"
        )
    if name == "loss-spike" and promise.kinds and Kind.LOSS not in promise.kinds:
        raise BadRequest("option --trigger", found="loss-spike", expected="loss among --kinds")
    return text


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
