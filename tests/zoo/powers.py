"""Diff two traces as ``trace diff`` does and list what every judged boundary would have flagged.

``python -m tests.zoo.powers LIST A B [OPTIONS of trace diff]`` writes LIST and ends as ``trace diff`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from tensortrace.cli.main import run as trace
from tensortrace.diff import engine
from tensortrace.diff.execute import Execution
from tensortrace.diff.result import Result, Where
from tensortrace.diff.verdict import where


class Claim(msgspec.Struct):
    """The smallest error with one common factor that would have been flagged at a boundary, if stated."""

    where: Where
    coherent: float | None


def claims(execution: Execution) -> list[Claim]:
    """Return the claims of an executed diff, in the order in which boundaries were judged."""
    return [
        # an error with a common factor is one of that size in L2, too
        Claim(where(node), min(filter(None, (found.power_coherent, found.power_incoherent)), default=None))
        for node, found in execution.judged
    ]


def main(listed: str, *arguments: str) -> int:
    state: Callable[..., Result] = engine.state_result

    def watch(execution: Execution, *rest: object) -> Result:
        Path(listed).write_bytes(msgspec.json.encode(claims(execution)))
        return state(execution, *rest)

    engine.state_result = watch  # type: ignore[assignment]
    return trace(["diff", *arguments])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
