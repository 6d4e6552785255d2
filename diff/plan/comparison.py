"""One planned comparison: two sides of a boundary, how to load them, and how they may legally differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import EPS
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.result import Judgement, Metrics
from tensortrace.diff.stream import Streamed
from tensortrace.diff.tolerance import Unexplained


@dataclass(frozen=True)
class Broken:
    """A rung that only one run makes of its own rung before as it does of its other parameters'.

    ``loaded`` has what that rung gives as the reference and what is there as ``b`` (the other way round where
    ``a`` is the odd one); ``against`` says so in words.
    """

    side: Literal["a", "b"]
    loaded: Assembled | Streamed
    metrics: Metrics
    judgement: Judgement
    against: str


@dataclass(frozen=True)
class Comparison:
    """Two sides of one boundary.

    ``load`` returns both global tensors and may raise NotComparable. ``own`` measures what remains of
    ``b - a`` after the part that the recorded inputs explain is taken away, beside the terms that were
    summed, element by element; None where no formula is known. ``magnitude`` is the norm of the terms
    summed where that exceeds the norm of the result (cancellation). ``copies_*`` are what every rank
    holds where all should hold the same. ``quiet`` returns both sides without the elements of which the
    recorded inputs are nothing but round-off, or that a gate may let pass in one run alone, None where there
    are none: it is asked where no formula tells what was made of them. ``eps`` is the spacing at which the
    operation computed, where it is known better than by the coarsest dtype of the run; 0 where it isn't.
    ``rung`` tells of a gradient whether only one run fails to make it of its own rung before.
    ``terms`` is the norm of the terms summed, where the plan knows it; ``noise`` an allowance beyond
    round-off, relative; ``of_error`` one in terms of the relative error of the activations that the boundary
    was computed from. ``summed`` says that ``a`` was computed from recorded values alone, each element of so
    many terms: nothing is inherited, and the boundary speaks for itself. ``follows`` are boundaries that
    change this one as a whole where they diverge, by any factor, and give it no error where they agree: all
    gradients do, by the coefficient that clips them.
    """

    slot: Slot
    microbatch: int | None
    load: Callable[[], Assembled | Streamed]
    items_a: tuple[Item, ...]
    items_b: tuple[Item, ...]
    parents: tuple[tuple[int | None, Slot], ...] = ()
    earlier: tuple[tuple[int | None, Slot], ...] = ()
    exact: bool = False
    own: Callable[[], Unexplained | None] | None = None
    magnitude_of: tuple[tuple[int | None, Slot], ...] = ()
    text: str = ""
    copies_a: tuple[Item, ...] = ()
    copies_b: tuple[Item, ...] = ()
    quiet: Callable[[Assembled], Assembled | None] | None = None
    eps: float = 0.0
    rung: Callable[[], Broken | None] | None = None
    terms: float = 0.0
    noise: float = 0.0
    of_error: float = 0.0
    summed: int = 0
    follows: tuple[tuple[int | None, Slot], ...] = ()

    @property
    def same_bytes(self) -> bool:
        """Tell whether one entry stands on each side and their digests agree."""
        single = len(self.items_a) == 1 and len(self.items_b) == 1
        return single and self.items_a[0].entry.digest == self.items_b[0].entry.digest


@dataclass(frozen=True)
class OneSided:
    """A boundary that only one run has, or that is not judged. ``diverges`` tells a defect from a gap.

    ``names`` are the parameters that it tells of, where its own name isn't one. ``own`` says that other
    values of what it was computed from do not explain why a run lacks it.
    """

    side: Literal["a", "b", "both"]
    slot: Slot
    microbatch: int | None
    items: tuple[Item, ...]
    reason: str
    diverges: bool = False
    parents: tuple[tuple[int | None, Slot], ...] = ()
    earlier: tuple[tuple[int | None, Slot], ...] = ()
    counts: bool = True
    names: tuple[str, ...] = ()
    own: bool = False


@dataclass
class StepPlan:
    """Everything planned for one aligned step; ``step`` is a's number.

    What ``shown`` says no to is compared all the same, for what is computed from it, and not told.
    """

    step: int
    comparisons: list[Comparison] = field(default_factory=list)
    one_sided: list[OneSided] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shown: Callable[[Slot], bool] = lambda _: True


def coarser_eps(items: Sequence[Item]) -> float:
    """Return the spacing of the coarsest dtype among the entries, autocast included; 0 for exact dtypes."""
    found = [EPS.get(item.entry.dtype, 0.0) for item in items]
    if any(found):
        found += [EPS.get(item.entry.meta.autocast or "", 0.0) for item in items]
    return max(found, default=0.0)


def by_rank(items: Sequence[Item]) -> tuple[Item, ...]:
    """Return the entries in order of rank."""
    return tuple(sorted(items, key=lambda i: (i.source.rank, i.entry.event)))


def replica(items: Sequence[Item]) -> Item:
    """Return the entry of the lowest rank, which stands for its replicas."""
    return by_rank(items)[0]


def is_early(entry: Comparison | OneSided, pair: StepPair) -> bool:
    """Tell whether a pass without gradients came before the first loss, which may be computed from it."""
    items, view = _held(entry, pair)
    return any(item.entry.event < view.first_loss.get(item.source.rank, -1) for item in items)


def is_late(entry: Comparison | OneSided, pair: StepPair) -> bool:
    """Tell whether a pass without gradients came after the update, which what it is given may depend on."""
    items, view = _held(entry, pair)
    last = view.last_update
    return any(item.source.rank in last and item.entry.event > last[item.source.rank] for item in items)


def _held(entry: Comparison | OneSided, pair: StepPair) -> tuple[Sequence[Item], StepView]:
    items = entry.items if isinstance(entry, OneSided) else entry.items_a
    return items, pair.b if isinstance(entry, OneSided) and entry.side == "b" else pair.a
