"""Which step of one run is which of the other's: by request, state, input tokens, position, or index."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensortrace.diff.assemble import NotComparable
from tensortrace.diff.catalog import Catalog, Slot, StepView
from tensortrace.diff.logical import Unplaceable
from tensortrace.diff.plan.comparison import replica
from tensortrace.diff.rows import read_batches
from tensortrace.diff.scheduled import scheduled
from tensortrace.diff.stream import one
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import INIT_STEP, Kind

PROBES = 8
"""How many parameters, the smallest ones, tell which state a run starts from."""


@dataclass(frozen=True)
class Alignment:
    """Steps of ``b`` are steps of ``a`` minus ``offset``; ``steps`` are those that both have, in a's numbers.

    ``before_a`` and ``before_b`` are the steps that leave the state in which the first of them begins;
    ``with_init`` tells whether both were recorded.
    """

    offset: int
    steps: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def before_a(self) -> int:
        """The step of ``a`` before the first common one, ``init`` where that is its first."""
        return INIT_STEP if self.offset <= 0 else self.offset - 1

    @property
    def before_b(self) -> int:
        """The step of ``b`` before the first common one, ``init`` where that is its first."""
        return INIT_STEP if self.offset >= 0 else -self.offset - 1

    def with_init(self, a: Catalog, b: Catalog) -> bool:
        """Tell whether both runs recorded the state in which the first common step begins."""
        sides = ((a, self.before_a), (b, self.before_b))
        return all(c.has_init if step == INIT_STEP else step in c.steps for c, step in sides)


def align_steps(a: Catalog, b: Catalog, request: str | None) -> Alignment:
    """Align steps by request, else by what the runs hold: see ``_Evidence``.

    Raises BadRequest for a request that is not of the form ``b:0=a:100`` or names steps that do not exist.
    """
    if not a.steps or not b.steps:
        side = "a" if not a.steps else "b"
        raise BadRequest(f"trace {side} holds no step", remedy="record at least one training step")
    offset, notes = (_requested(request, a, b), ()) if request is not None else _Evidence(a, b).found()
    steps = tuple(s for s in a.steps if s - offset in b.steps)
    if not steps:
        raise BadRequest(
            "the traces have no step in common",
            found=f"steps {a.steps[0]}-{a.steps[-1]} and {b.steps[0]}-{b.steps[-1]}",
            remedy=_remedy(a, b),
        )
    return Alignment(offset, steps, notes)


def _remedy(a: Catalog, b: Catalog) -> str:
    say = "say which steps meet with --align b:STEP=a:STEP"
    for kept, other in ((a, "b"), (b, "a")):
        if any(rank.manifest and rank.manifest.window for rank in kept.trace.ranks):
            return f"record {other} with --steps {kept.steps[0]}-{kept.steps[-1]}, or {say}"
    return say


def _requested(request: str, a: Catalog, b: Catalog) -> int:
    match = re.fullmatch(r"b:(\d+)=a:(\d+)", request)
    if not match:
        raise BadRequest("--align", found=repr(request), expected="b:STEP=a:STEP, such as b:0=a:100")
    step_b, step_a = int(match[1]), int(match[2])
    for side, catalog, step in (("a", a, step_a), ("b", b, step_b)):
        if step not in catalog.steps:
            raise BadRequest(
                f"--align {request}: {side} has no step {step}",
                found=f"steps {catalog.steps[0]}-{catalog.steps[-1]} in {side}",
                remedy="name a step that was recorded on each side",
            )
    return step_a - step_b


def starts_from(a: Catalog, b: Catalog, offset: int) -> bool:
    """Tell whether ``b`` starts, under an offset, with the parameters that ``a`` then had, bit for bit."""
    return _Evidence(a, b)._agreeing(offset) == PROBES


class _Evidence:
    """What tells how far the steps of two runs are apart.

    A run that goes on from a checkpoint starts from a state that the other was in, has the next step's
    tokens, and its scheduler stands there. All three agree unless the resumption forgot something: then the
    state decides, where the runs were in it bit for bit, else the tokens, else the position. Whatever
    is at odds with the choice is said.
    """

    def __init__(self, a: Catalog, b: Catalog) -> None:
        self.a, self.b = a, b

    def found(self) -> tuple[int, tuple[str, ...]]:
        """Return the offset, and notes on how it was found."""
        likely = self._likely()
        offset = self._of_same_state(likely)
        return offset, tuple(self._notes(offset))

    @cached_property
    def by_tokens(self) -> tuple[int, ...]:
        """Offsets under which the first step of one run has the other's input rows, the present one first."""
        first = self.b.steps[0]
        found = [s - first for s in _from(first, self.a.steps) if self._same_rows(s, first)]
        if found or not self._has_rows:
            return tuple(found)
        first = self.a.steps[0]  # or the reference is the run that was resumed
        return tuple(first - s for s in _from(first, self.b.steps) if self._same_rows(first, s))

    @cached_property
    def by_position(self) -> int | None:
        """The offset under which the schedulers stand alike at the first step; None where that is unknown."""
        for here, there, sign in ((self.b, self.a, 1), (self.a, self.b, -1)):
            wanted = _position(here, here.steps[0])
            if wanted is None:
                continue
            steps = [s for s in _from(here.steps[0], there.steps) if _position(there, s) == wanted]
            if steps:
                return sign * (steps[0] - here.steps[0])
        return None

    def _likely(self) -> int:
        if self.by_tokens:
            return self.by_position if self.by_position in self.by_tokens else self.by_tokens[0]
        return 0

    def _of_same_state(self, likely: int) -> int:
        """Return the offset under which the runs start from one state; ``likely`` where none is more so."""
        best, agreeing = likely, self._agreeing(likely)
        if agreeing is None or agreeing == PROBES:
            return likely
        position = [self.by_position] if self.by_position is not None else []
        starts = [s + 1 - self.b.steps[0] for s in self.a.steps]
        starts += [self.a.steps[0] - s - 1 for s in self.b.steps]
        for offset in dict.fromkeys((0, *position, *starts)):
            here = self._agreeing(offset)
            if here is not None and here > max(agreeing, PROBES // 2):
                best, agreeing = offset, here
        return best

    def _agreeing(self, offset: int) -> int | None:
        """Return how many of PROBES parameters the runs start with alike; None where that is not known."""
        alignment = Alignment(offset, (), ())
        if not alignment.with_init(self.a, self.b):
            return None
        if not any(s - offset in self.b.steps for s in self.a.steps):
            return None
        held_a, held_b = self.a.view(alignment.before_a), self.b.view(alignment.before_b)
        slots = [s for s, _ in held_b.find(Kind.PARAM) if s.slot == "model" and s in held_a.items]
        chosen = sorted(slots, key=lambda s: (_size(s, held_b), s.name))[:PROBES]
        equal = sum(_equal(slot, held_a, held_b) for slot in chosen)
        return equal * PROBES // len(chosen) if chosen else None

    def _notes(self, offset: int) -> Iterator[str]:
        said = self._said(offset)
        if self.by_tokens and offset not in self.by_tokens:
            yield (
                f"steps aligned by the state that the runs start from: {said}; by equal input tokens "
                f"{self._said(self.by_tokens[0])} ({self._flag(self.by_tokens[0])})"
            )
        elif offset:
            how = "equal input tokens" if self.by_tokens else "the state that the runs start from"
            yield f"steps aligned by {how}: {said}"
        if self.by_position not in (None, offset):
            yield (
                f"the scheduler's position disagrees with that: by it {self._said(self.by_position or 0)} "
                f"({self._flag(self.by_position or 0)})"
            )

    def _said(self, offset: int) -> str:
        step_a, step_b = self._meeting(offset)
        return f"b's step {step_b} is a's step {step_a}"

    def _flag(self, offset: int) -> str:
        step_a, step_b = self._meeting(offset)
        return f"--align b:{step_b}=a:{step_a}"

    def _meeting(self, offset: int) -> tuple[int, int]:
        step_b = max(self.b.steps[0], self.a.steps[0] - offset)
        return step_b + offset, step_b

    @cached_property
    def _has_rows(self) -> bool:
        batches = read_batches(self.a.view(self.a.steps[0]), self.b.view(self.b.steps[0]), "train")
        return all(batch.rows for batch in batches)

    def _same_rows(self, step_a: int, step_b: int) -> bool:
        rows_a, rows_b = (
            {row.digest for row in batch.rows}
            for batch in read_batches(self.a.view(step_a), self.b.view(step_b), "train")
        )
        return bool(rows_a) and rows_a == rows_b


def _from(first: int, steps: Iterable[int]) -> list[int]:
    """Return the steps in order, the one of the same number before all others."""
    return sorted(steps, key=lambda s: (s != first, s))


def _position(catalog: Catalog, step: int) -> float | None:
    if not catalog.records(step, Kind.SCHEDULE, "position"):
        return None
    return scheduled(catalog.view(step), "position")


def _size(slot: Slot, view: StepView) -> int:
    return int(np.prod(replica(view.items[slot]).entry.local_shape, dtype=np.int64))


def _equal(slot: Slot, a: StepView, b: StepView) -> bool:
    x, y = replica(a.items[slot]), replica(b.items[slot])
    if x.entry.digest == y.entry.digest:
        return True
    if x.entry.local_shape != y.entry.local_shape or x.entry.dtype != y.entry.dtype:
        return False
    try:
        blocks = zip(one(x).blocks(), one(y).blocks(), strict=True)  # parameters may be larger than memory
        return all(np.array_equal(left, right) for left, right in blocks)
    except (NotComparable, Unplaceable):
        return False
