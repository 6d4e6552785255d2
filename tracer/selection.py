"""Which boundaries a recording selects: steps, kinds and globs on canonical names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.nearest import meant, nearest
from tensortrace.tracer.types import INIT_STEP, Kind, Promise

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_LIKE_RANGE = re.compile(r"(\d+) *(?:-+|:|\.+|to|\N{EN DASH}) *(\d+)")


class Selection:
    """Answers whether a promise includes a boundary; the same for hooks, recorder and reader."""

    def __init__(self, promise: Promise) -> None:
        self._steps = promise.steps
        self._kinds = frozenset(promise.kinds)
        self._all_names = not promise.include and not promise.exclude
        self._name_is_wanted = lru_cache(maxsize=65536)(_name_test(promise))

    def wants(self, kind: Kind, name: str, *, step: int) -> bool:
        """Tell whether the boundary of this kind, canonical name and step was selected."""
        if self._steps and not self.wants_step(step):
            return False
        if self._kinds and kind not in self._kinds:
            return False
        return self._all_names or self._name_is_wanted(name)

    def wants_name(self, name: str) -> bool:
        """Tell whether any boundary of this canonical name was selected."""
        return self._name_is_wanted(name)

    def wants_step(self, step: int) -> bool:
        """Tell whether any boundary of this step was selected; ``init`` is step -1."""
        return not self._steps or any(first <= step <= last for first, last in self._steps)

    def wants_kind(self, kind: Kind) -> bool:
        """Tell whether any boundary of this kind was selected."""
        return not self._kinds or kind in self._kinds


def parse_promise(
    *, steps: str = "", kinds: str = "", include: Iterable[str] = (), exclude: Iterable[str] = (),
    zoom: Iterable[str] = (), zoom_steps: str = "",
) -> Promise:  # fmt: skip
    """Return the promise that the command-line options state; raise BadRequest where one is malformed.

    Operations are many: without ``zoom_steps`` those of the first recorded step only are.
    """
    ranges, globs = parse_steps(steps) if steps else (), tuple(zoom)
    if zoom_steps and not globs:
        raise BadRequest("option --zoom-steps", expected="--zoom GLOB beside it")
    if any(not glob for glob in globs):
        raise BadRequest("option --zoom", found="''", expected="a glob on module names, such as 'blocks.1.*'")
    first = max(ranges[0][0], 0) if ranges else 0
    within = parse_steps(zoom_steps, option="--zoom-steps") if zoom_steps else ((first, first),)
    return Promise(
        steps=ranges,
        zoom=globs,
        zoom_steps=within if globs else (),
        kinds=parse_kinds(kinds) if kinds else (),
        include=tuple(include),
        exclude=tuple(exclude),
    )


def parse_steps(text: str, *, option: str = "--steps") -> tuple[tuple[int, int], ...]:
    """Return the ranges of ``0-3,100`` as inclusive pairs, sorted and merged.

    ``init`` is the state before the first step; a range that starts at 0 includes it, since no
    comparison from the start can do without.
    """
    ranges: list[tuple[int, int]] = []
    for first, last in sorted(_parse_range(part.strip(), option) for part in text.split(",")):
        if ranges and first <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], max(last, ranges[-1][1]))
        else:
            ranges.append((first, last))
    return tuple(ranges)


def parse_kinds(text: str, *, option: str = "--kinds") -> tuple[Kind, ...]:
    """Return the kinds of a comma-separated list, in the order of the ladder."""
    names = {part.strip() for part in text.split(",")}
    if unknown := sorted(names - {kind.value for kind in Kind}):
        raise BadRequest(
            f"option {option}", found=", ".join(map(repr, unknown)), expected=f"of {', '.join(Kind)}",
            remedy=meant(nearest(unknown[0], Kind)),
        )  # fmt: skip
    return tuple(kind for kind in Kind if kind.value in names)


def _parse_range(part: str, option: str) -> tuple[int, int]:
    if part == "init":
        return INIT_STEP, INIT_STEP
    match = _RANGE.fullmatch(part)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        likely = meant(_likely_steps(part))
        raise BadRequest(
            f"option {option}", found=repr(part), expected="steps such as init,0-3,100", remedy=likely
        )
    first = int(match[1])
    return first or INIT_STEP, int(match[2] or match[1])


def _likely_steps(part: str) -> str | None:
    """Return the range that one written otherwise means: ``0..3``, ``0:3``, ``3-0``."""
    match = _LIKE_RANGE.fullmatch(part)
    if match is None:
        return nearest(part, ("init",))
    first, last = sorted((int(match[1]), int(match[2])))
    return f"{first}-{last}"


def _name_test(promise: Promise) -> Callable[[str], bool]:
    included = _any_glob(promise.include or ("*",))
    excluded = _any_glob(promise.exclude)
    return lambda name: bool(included.fullmatch(name)) and not excluded.fullmatch(name)


def _any_glob(globs: tuple[str, ...]) -> re.Pattern[str]:
    """Compile globs into one pattern; ``*`` matches dots too, and no globs match nothing."""
    return re.compile("|".join(fnmatch.translate(glob) for glob in globs) or r"(?!)")
