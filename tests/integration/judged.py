"""Diff two simulated programs and read the outcome."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensortrace.diff.engine import CompareOptions, compare
from tensortrace.diff.result import Finding, Result
from tensortrace.tracer.types import Kind
from tests.simulated import At, Program

Place = tuple[object, ...]


@dataclass(frozen=True)
class Judge:
    """Writes programs into one folder and compares them; a path stands for a trace that is there already."""

    folder: Path
    numbers: Any

    def __call__(self, a: Program | Path, b: Program | Path, **options: Any) -> Result:
        """Return the outcome of ``a`` against ``b`` under the given CompareOptions."""
        left, right = (x if isinstance(x, Path) else self.write(x) for x in (a, b))
        return compare(left, right, options=CompareOptions(**options))

    def write(self, program: Program, **fields: Any) -> Path:
        """Write a program's trace; return its path."""
        return program.write(self.folder / f"trace{next(self.numbers)}", **fields)


def judge_in(folder: Path) -> Judge:
    """Return a judge that writes into a folder."""
    return Judge(folder, itertools.count())


def first(result: Result) -> Finding:
    """Return the first divergent boundary of a run that must be divergent."""
    assert result.verdict == "divergent", result.headline
    assert result.first_divergent is not None
    return result.first_divergent


def place(result: Result) -> Place:
    """Return (step, microbatch, kind, name, slot) of the first divergent boundary."""
    at = first(result).where
    return at.step, at.microbatch, at.kind, at.name, at.slot


def origins(result: Result) -> set[tuple[str, str]]:
    """Return (kind, name) of every origin, whatever its step."""
    return {(o.where.kind, o.where.name) for o in result.origins}


def origin_steps(result: Result) -> set[object]:
    """Return the steps in which something went wrong by itself."""
    return {o.where.step for o in result.origins}


def codes(result: Result) -> list[str]:
    """Return the codes of the causes, the best first."""
    return [cause.code for cause in result.causes]


def assert_equivalent(result: Result) -> None:
    """Assert that nothing diverges and that everything was compared."""
    assert result.verdict == "equivalent", result.headline
    assert result.coverage.complete
    assert result.coverage.missing == ()
    assert result.origins == ()
    assert result.receivers == ()


Edit = Callable[[np.ndarray], np.ndarray]


def tampering(kind: Kind, name: str, slot: str, edit: Edit, **only: int) -> type[Program]:
    """Return a program that edits one value; ``only`` restricts ``step``, ``rank``, ``microbatch``."""

    class Tampered(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            wanted = (at.kind, at.name, at.slot) == (kind, name, slot)
            if wanted and all(getattr(at, field) == number for field, number in only.items()):
                return np.asarray(edit(np.array(value))).astype(value.dtype)
            return value

    return Tampered


def lacking(*kinds: Kind, name: str | None = None, slot: str | None = None, **only: int) -> type[Program]:
    """Return a program that does not record some boundaries."""

    class Lacking(Program):
        def keeps(self, at: At) -> bool:
            hit = at.kind in kinds and name in (None, at.name) and slot in (None, at.slot)
            return not (hit and all(getattr(at, field) == number for field, number in only.items()))

    return Lacking


def greatest_is_off(value: np.ndarray, by: float = 1e-4) -> np.ndarray:
    """Make the greatest element wrong by a relative amount."""
    flat = value.reshape(-1)
    flat[np.argmax(np.abs(flat))] *= 1 + by
    return value
