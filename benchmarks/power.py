"""Check that the power which a diff states is true: plant errors of 1.1 times its size and see them found.

    python benchmarks/power.py A B [--boundaries 30] [--factor 0.01] [--seed 0]

A and B are two traces of correct runs. At boundaries drawn at random an error is planted in B, one after the
other: one common factor and noise, each of 1.1 times what the judgement of that boundary says it would have
flagged, and a common factor of ``--factor`` where that is more than this. Each must diverge at that boundary.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tensortrace.diff.engine import compare
from tensortrace.diff.result import Judged, Result
from tests.zoo.inject import Place, inject, inject_noise

MARGIN = 1.1
RAW = ("activation", "activation_grad", "clipped_grad", "optimizer_state", "param")
"""Kinds that are compared as recorded: of others it is a sum, or their ratio to others, that is judged."""


class Planted(NamedTuple):
    """What was planted where, and what came of it."""

    what: str
    size: float
    found: bool


def candidates(result: Result, *, raw: tuple[str, ...] = RAW) -> list[Judged]:
    """Return the boundaries that state a power, relative to their own norm."""
    return [
        b
        for b in result.boundaries
        if b.where.kind in raw and b.where.name != "(clip)" and b.judgement.power_incoherent
        and not b.judgement.cancelled and b.where.slot != "step"
    ]  # fmt: skip


def plant(a: Path, b: Path, boundary: Judged, factor: float) -> Iterator[Planted]:
    """Plant the errors that the boundary's judgement says it would find."""
    judgement, place = boundary.judgement, Place.of(boundary.where)
    power = MARGIN * (judgement.power_coherent or math.inf)
    if power < 0.5:
        yield Planted("its power, coherent", power, _finds(a, b, boundary, inject, place, power))
        if power < factor:
            yield Planted(f"{factor:g}, coherent", factor, _finds(a, b, boundary, inject, place, factor))
    size = MARGIN * (judgement.power_incoherent or 0.0)
    if size < 0.5:
        yield Planted("its power, incoherent", size, _finds(a, b, boundary, inject_noise, place, size))


def _finds(
    a: Path, b: Path, boundary: Judged, change: Callable[[Path, Path, Place, float], int], place: Place,
    size: float,
) -> bool:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        change(b, Path(folder) / "b", place, size)
        result = compare(a, Path(folder) / "b")
    return any(found.where == boundary.where for found in (*result.origins, *result.receivers))


def main() -> int:
    """Plant errors in the traces that are given; return 0 if all were found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--boundaries", type=int, default=30)
    parser.add_argument("--factor", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = compare(options.a, options.b)
    every = candidates(result)
    for name in ("power_coherent", "power_incoherent"):
        known = [p for b in every if (p := getattr(b.judgement, name))]
        median, worst = np.quantile(known, [0.5, 1.0])
        print(f"{name}: median {median:.2g}, worst {worst:.2g} of {len(known)} boundaries")
    drawn = random.Random(options.seed).sample(every, min(options.boundaries, len(every)))  # noqa: S311
    told: dict[str, list[bool]] = {}
    for boundary in drawn:
        for planted in plant(options.a, options.b, boundary, options.factor):
            told.setdefault(planted.what, []).append(planted.found)
            if not planted.found:
                print(f"missed {planted.what} {planted.size:.3g} at {boundary.where}")
    for what, found in told.items():
        print(f"{what}: {sum(found)} of {len(found)} found")
    return 0 if all(all(found) for found in told.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
