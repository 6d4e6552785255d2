"""How much is kept of a tensor: everything, its sketch and statistics, or statistics alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from tensortrace.tracer.codec_dtypes import dtype_of
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.manifest_checks import LEVEL
from tensortrace.tracer.selection import parse_kinds, parse_steps
from tensortrace.tracer.sketch import MOST, SIZE
from tensortrace.tracer.types import Boundary, Kind, LevelRule, Promise

SMALL = 256
"""A tensor of at most so many elements is kept in full at every level."""

ALWAYS = frozenset({Kind.INPUT, Kind.LOSS, Kind.SCHEDULE, Kind.RNG})
"""Kinds that are kept in full at every level: they tell which samples, which weights, which formula."""


class Level(NamedTuple):
    """What is kept beside digest and statistics; ``size`` is a sketch's."""

    keeps: Literal["full", "sketch", "stats"]
    size: tuple[int, int] = SIZE

    def __str__(self) -> str:
        """Return the level as it is written."""
        plain = self.keeps != "sketch" or self.size == SIZE
        return self.keeps if plain else f"{self.keeps}:{self.size[0]}x{self.size[1]}"


FULL = Level("full")


class Levels:
    """Answers what a promise keeps of a boundary; the same for writer and reader."""

    def __init__(self, promise: Promise) -> None:
        """Raise ValueError for levels that no version knows."""
        self._rules = [(rule, read_level(rule.level)) for rule in promise.levels]
        self._plain = read_level(promise.level)
        self._known: dict[tuple[Kind, int], Level] = {}

    @staticmethod
    def sketches(promise: Promise) -> bool:
        """Tell whether a promise has sketches of anything."""
        texts = (promise.level, *(rule.level for rule in promise.levels))
        return any(read_level(text).keeps == "sketch" for text in texts)

    def of(self, boundary: Boundary) -> Level:
        """Return the level of a boundary: of what is small, whole numbers or complex always ``full``."""
        key = boundary.kind, boundary.step
        level = self._known.get(key)
        if level is None:
            if len(self._known) > 1 << 12:
                self._known.clear()
            level = self._known[key] = self._stated(*key)
        if level.keeps == "full" or math.prod(boundary.local_shape) <= SMALL:
            return FULL
        return level if dtype_of(boundary.dtype).family == "float" else FULL

    def _stated(self, kind: Kind, step: int) -> Level:
        if kind in ALWAYS:
            return FULL
        fitting = (level for rule, level in reversed(self._rules) if _fits(rule, kind, step))
        return next(fitting, self._plain)


def _fits(rule: LevelRule, kind: Kind, step: int) -> bool:
    in_step = not rule.steps or any(first <= step <= last for first, last in rule.steps)
    return in_step and (not rule.kinds or kind in rule.kinds)


def read_level(text: str) -> Level:
    """Return the level that a text such as ``sketch:8x8`` names; raise ValueError where it is none."""
    match = LEVEL.fullmatch(text)
    if match is None:
        raise ValueError(text)
    if match[1] is None:
        return FULL if text == "full" else Level("stats" if text == "stats" else "sketch")
    size = int(match[1]), int(match[2])
    if not all(1 <= number <= MOST for number in size):
        raise ValueError(text)
    return Level("sketch", size)


def parse_levels(texts: Iterable[str]) -> tuple[str, tuple[LevelRule, ...]]:
    """Return level and rules of a promise from options ``LEVEL`` and ``[KIND,…][@STEPS]=LEVEL``, in order.

    Raises BadRequest naming the option and what is wrong in it.
    """
    plain, rules = "full", []
    for text in texts:
        scope, equals, level = text.rpartition("=")
        known = _known_level(level, text)
        if not equals:
            plain = known
            continue
        kinds, at, steps = scope.partition("@")
        if not scope or (at and not steps):
            raise _bad(text)
        rules.append(
            LevelRule(
                known,
                parse_kinds(kinds, option="--level") if kinds else (),
                parse_steps(steps, option="--level") if steps else (),
            )
        )
    return plain, tuple(rules)


def _known_level(level: str, text: str) -> str:
    try:
        return str(read_level(level.strip()))
    except ValueError as error:
        raise _bad(text) from error


def _bad(text: str) -> BadRequest:
    return BadRequest(
        "option --level", found=repr(text),
        expected=f"full, stats, sketch or sketch:K1xK2 (1 to {MOST}), or of some [KIND,…][@STEPS]=LEVEL",
        remedy="for example --level sketch --level param@0-10=full",
    )  # fmt: skip
