"""The records of the zoo: programs as they are run, mistakes with what must be found, and legal pairs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Run:
    """One training: ``program`` is a file of ``programs``, without a launcher where ``ranks`` is 1.

    ``layout`` names a layout file of ``programs/layouts`` that a diff needs for this run, "" where none is.
    Equal runs are recorded once.
    """

    program: str
    ranks: int
    arguments: tuple[str, ...] = ()
    layout: str = ""
    record: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Two trainings that are diffed, ``a`` the reference, with further options of ``trace diff``."""

    a: Run
    b: Run
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class At:
    """A boundary as derived by hand; ``name`` and ``slot`` are globs where several are first at once."""

    step: int | str
    kind: str
    name: str
    slot: str


@dataclass(frozen=True)
class Planted:
    """A pair whose ``b`` has a mistake, the first boundary where it acts, and the code of its cause."""

    pair: Pair
    first: At
    code: str


@dataclass(frozen=True)
class Draw:
    """What is drawn for one run of the zoo: the same seed draws the same sizes, seeds and layouts."""

    seed: int

    def of(self, what: str) -> random.Random:
        """Return a generator for one purpose; equal purposes get equal numbers, so that runs are shared."""
        return random.Random(f"{self.seed} {what}")  # noqa: S311 - it draws sizes, not secrets

    def run(self, program: str, ranks: int, sizes: Mapping[str, Sequence[int]], *options: str) -> Run:
        """Return a program's run with a seed and sizes that are drawn, alike in all of its runs."""
        drawing = self.of(program)
        drawn = ["--seed", str(drawing.randrange(1000))]
        for name, values in sizes.items():
            drawn += [f"--{name}", str(drawing.choice(values))]
        return Run(program, ranks, (*drawn, *options))


@dataclass(frozen=True)
class Bug:
    """A planted mistake. ``story`` says what happened to people, with where it was reported."""

    name: str
    story: str
    make: Callable[[Draw], Planted]


@dataclass(frozen=True)
class Legal:
    """Two programs that compute the same. ``story`` says what differs between them."""

    name: str
    story: str
    make: Callable[[Draw], Pair]
