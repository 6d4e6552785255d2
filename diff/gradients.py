"""The gradient rungs of one step of one run, each brought to the scale of the gradient before clipping."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tensortrace.diff.catalog import Item, Part, StepView
from tensortrace.diff.factors import Factors, any_nonzero, made_of_one, rank_factors, scalar_factor
from tensortrace.diff.replicas import odd_ranks
from tensortrace.diff.stream import Sum, Term, one
from tensortrace.tracer.types import Kind

CLIP = "(clip)"

_SHOWN, _MOST_PASSES = 16, 8
"""Of how many parameters, and how many passes, it is read which passes' gradients were dropped."""

_EXPLAINED, _BY_FAR = 1e-3, 1e-2
"""Residual below which passes explain a gradient, and how much smaller than that of all passes it is then."""


def _by_param(view: StepView, kind: Kind, slot: str) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = defaultdict(list)
    for key, items in view.find(kind):
        if key.slot == slot and key.name != CLIP:
            found[key.name].extend(items)
    return found


def _latest(items: list[Item]) -> list[Item]:
    """Return the last event of each rank."""
    last: dict[int, Item] = {}
    for item in sorted(items, key=lambda i: i.entry.event):
        last[item.source.rank] = item
    return [last[rank] for rank in sorted(last)]


def _first(items: tuple[Item, ...]) -> Item | None:
    return items[0] if items else None


@dataclass(frozen=True)
class Gradients:
    """What one run recorded of its parameters' gradients in one step.

    Values are local tensors; under data parallelism every rung after ``local_grad`` is a replica, so the
    first rank stands for all (that replicas agree is checked elsewhere). ``by_hand`` is the factor of a clip
    that no function was seen to apply, None without; where it is no common factor, ``by_hand`` is 1 and
    ``from_rung`` says that the last rung before it is the gradient before clipping. ``shared`` has the factor
    of each parameter where both runs clip so.
    """

    view: StepView
    by_hand: float | None = None
    from_rung: bool = False
    shared: Mapping[str, float] = field(default_factory=dict)
    _factor_cache: dict[Kind, float | None] = field(default_factory=dict, repr=False)
    _class_factors: dict[frozenset[int], Factors | None] = field(default_factory=dict, repr=False)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters that have any gradient in this step."""
        return tuple(sorted({*self._window, *self._parts, *self._consumed}))

    @cached_property
    def _window(self) -> dict[str, list[Item]]:
        found = _by_param(self.view, Kind.LOCAL_GRAD, "grad")
        return {n: [i for i in items if i.entry.microbatch is None] for n, items in found.items()}

    @cached_property
    def _parts(self) -> dict[str, list[Item]]:
        found = _by_param(self.view, Kind.LOCAL_GRAD, "grad")
        return {n: [i for i in items if i.entry.microbatch is not None] for n, items in found.items()}

    @cached_property
    def _hooked(self) -> dict[str, list[Item]]:
        found = _by_param(self.view, Kind.LOCAL_GRAD, "hooked")
        return {n: items for n, items in found.items() if not self._reduced_by_hooks(n, items)}

    def _reduced_by_hooks(self, name: str, hooked: list[Item]) -> bool:
        """Tell whether hooks leave the same on every cell: they reduce, and what they leave is no part."""
        cells = {item.cell for item in self._parts.get(name, [])}
        of_pass: dict[int | None, dict[int, str]] = defaultdict(dict)
        for item in hooked:
            of_pass[item.entry.microbatch][item.cell] = item.entry.digest
        return len(cells) > 1 and all(
            left.keys() == cells and len(set(left.values())) == 1 for left in of_pass.values()
        )

    @cached_property
    def _consumed(self) -> dict[str, list[Item]]:
        found = _by_param(self.view, Kind.CLIPPED_GRAD, "grad")
        return {n: [i for i in items if i.entry.microbatch is None] for n, items in found.items()}

    @cached_property
    def _before_clip(self) -> dict[str, list[Item]]:
        return _by_param(self.view, Kind.CLIPPED_GRAD, "before")

    @cached_property
    def _start(self) -> dict[str, list[Item]]:
        return _by_param(self.view, Kind.LOCAL_GRAD, "start")

    def local(self, name: str) -> dict[int, np.ndarray]:
        """Return each data cell's own sum over the window."""
        return {cell: found.read() for cell, found in self.local_sums(name).items()}

    def local_sums(self, name: str, *, first: int = 0) -> dict[int, Sum]:
        """Return each data cell's own sum over the window, as tensor hooks left it, unread.

        Of the microbatches from ``first`` on.
        """
        hooked = name in self._hooked
        whole = {} if hooked or first else {i.cell: one(i) for i in _latest(self._window.get(name, []))}
        if whole:
            return whole
        terms: dict[int, list[Term]] = defaultdict(list)
        for item in self.hooked_parts(name) if hooked else self._parts.get(name, []):
            if (item.entry.microbatch or 0) >= first:
                terms[item.cell].append(Term(item))
        return {cell: Sum(tuple(found)) for cell, found in terms.items()}

    def window_sum(self, name: str) -> Sum | None:
        """Return the sum of all cells' local gradients, unread."""
        terms = [term for found in self.local_sums(name).values() for term in found.terms]
        return Sum(tuple(terms)) if terms else None

    def local_items(self, name: str) -> list[Item]:
        """Return the entries of the per-microbatch local gradients, or of the window sums."""
        return self._parts.get(name) or self._window.get(name, [])

    def hooked_items(self, name: str) -> tuple[Item, ...]:
        """Return the entries of local gradients that tensor hooks of the program changed."""
        return tuple(self._hooked.get(name, ()))

    def hooked_parts(self, name: str) -> list[Item]:
        """Return the local gradients of all microbatches as the program's tensor hooks left them."""
        changed = {(i.cell, i.entry.microbatch, i.call): i for i in self._hooked.get(name, ())}
        parts = self._parts.get(name, [])
        return [changed.get((i.cell, i.entry.microbatch, i.call), i) for i in parts]

    def scaled_local(self, name: str, divide_by: Callable[[Part], float]) -> Sum | None:
        """Return Σ over cells and microbatches of the local gradient divided by each part's factor."""
        return _divided(self._parts.get(name, []), divide_by)

    def scaled_hooked(self, name: str, divide_by: Callable[[Part], float]) -> Sum | None:
        """Return the same of what tensor hooks left of it."""
        return _divided(self.hooked_parts(name), divide_by)

    def by_microbatch(self, name: str) -> dict[int, np.ndarray]:
        """Return the local gradient of each microbatch, summed over ranks."""
        sums: dict[int, np.ndarray] = {}
        for item in self._parts.get(name, []):
            number, value = item.entry.microbatch or 0, item.read().astype(np.float64)
            sums[number] = sums[number] + value if number in sums else value
        return sums

    def start_items(self, name: str) -> tuple[Item, ...]:
        """Return the entries of ``.grad`` as each rank found it when the window's first backward began."""
        return tuple(_latest(self._start.get(name, [])))

    def start(self, name: str) -> dict[int, np.ndarray]:
        """Return ``.grad`` as each rank found it when the window's first backward began."""
        return {i.cell: i.read() for i in self.start_items(name)}

    def has_rung(self, kind: Kind) -> bool:
        """Tell whether any parameter has a rung."""
        return bool(self._rungs[kind])

    @cached_property
    def _rungs(self) -> dict[Kind, dict[str, list[Item]]]:
        found = {k: _by_param(self.view, k, "grad") for k in (Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD)}
        return found | {Kind.UNSCALED_GRAD: {}} if self.clipped_scale else found

    @cached_property
    def clipped_scale(self) -> float | None:
        """The loss scale that was still in the gradients when the window's last clip came; None without."""
        unscaled = _by_param(self.view, Kind.UNSCALED_GRAD, "grad")
        for name, after in unscaled.items():
            before = {i.source.rank: i.entry.event for i in self.before_clip_copies(name)}
            if any(i.entry.event > before.get(i.source.rank, i.entry.event) for i in _latest(after)):
                scales = (i for s, i in self.view.find(Kind.SCHEDULE) if s.slot == "scale")
                return next((float(items[0].read()) for items in scales), None)
        return None

    def rung_events(self, kind: Kind, name: str) -> list[Item]:
        """Return every event of ``reduced_grad`` or ``unscaled_grad``, in order of rank and event."""
        items = self._rungs[kind].get(name, [])
        return sorted(items, key=lambda i: (i.source.rank, i.entry.event))

    def rung_copies(self, kind: Kind, name: str) -> tuple[Item, ...]:
        """Return the last event of ``reduced_grad`` or ``unscaled_grad`` on each rank."""
        return tuple(_latest(self._rungs[kind].get(name, [])))

    def rung(self, kind: Kind, name: str) -> Item | None:
        """Return the last event of ``reduced_grad`` or ``unscaled_grad``; None where the rung is absent."""
        return _first(self.rung_copies(kind, name))

    def before_clip_copies(self, name: str) -> tuple[Item, ...]:
        """Return each rank's gradient before the window's last clip event; empty where nothing clipped it."""
        last = self.view.last_microbatch()
        found = [i for i in self._before_clip.get(name, []) if (i.entry.microbatch or 0) >= last]
        return tuple(_latest(found))

    def before_clip(self, name: str) -> Item | None:
        """Return the gradient before the window's last clip event; None where nothing clipped it."""
        return _first(self.before_clip_copies(name))

    def coefficient(self, name: str) -> float:
        """Return the factor that the window's last clip event applied to a gradient, 1 where none is told.

        Clipping by value has no single factor. A loss scale that was in the gradient then is divided out.
        """
        found: dict[int, float] = {}
        for slot, items in self.view.find(Kind.CLIPPED_GRAD):
            if (slot.name, slot.slot) == (CLIP, "coefficient"):
                mine = [i for i in items if name in i.entry.meta.members]
                if mine:
                    found[slot.call] = float(mine[0].read())
        return (found[max(found)] if found else 1.0) / (self.clipped_scale or 1.0)

    def consumed_copies(self, name: str) -> tuple[Item, ...]:
        """Return what the optimizer of each rank consumed."""
        return tuple(_latest(self._consumed.get(name, [])))

    def consumed(self, name: str) -> Item | None:
        """Return what the optimizer consumed."""
        return _first(self.consumed_copies(name))

    @cached_property
    def by_program(self) -> bool:
        """Whether the program updates its parameters itself, so that no optimizer consumed a gradient."""
        return Kind.CLIPPED_GRAD in self.view.absent and not any(self._consumed.values())

    def unclipped_copies(self, name: str) -> tuple[Item, ...]:
        """Return each rank's gradient before clipping; without an optimizer it is the last rung there is."""
        found = self.before_clip_copies(name)
        if not found and self.from_rung:
            found = self.last_rung_copies(name)
        found = found or self.consumed_copies(name)
        return found if found or not self.by_program else self.last_rung_copies(name)

    def last_rung_copies(self, name: str) -> tuple[Item, ...]:
        """Return each rank's gradient after the last reduction or unscale; of one rank alone its own sum."""
        rungs = (Kind.UNSCALED_GRAD, Kind.REDUCED_GRAD)
        alone = tuple(_latest(self._window.get(name, [])))
        reduced = next((copies for k in rungs if (copies := self.rung_copies(k, name))), ())
        return reduced or (alone if len(alone) == 1 and not self.has_rung(Kind.REDUCED_GRAD) else ())

    def unclipped(self, name: str) -> Item | None:
        """Return the gradient before clipping: the rung at which runs are compared as they are."""
        return _first(self.unclipped_copies(name))

    def unclipped_value(self, name: str) -> Sum | None:
        """Return the gradient before clipping, without a loss scale that was still in it."""
        item, factor = self.unclipped(name), self.shared.get(name, self.by_hand or 1.0)
        return None if item is None else Sum((Term(item, 1.0, (self.clipped_scale or 1.0) * factor),))

    def last_seen(self, kind: Kind, name: str) -> Sum | None:
        """Return a rung's gradient as recorded; where the run lacks the rung, that before it."""
        item = self.rung(kind, name)
        if item is not None:
            return Sum((Term(item),))
        if not self.by_program:
            return self.unclipped_value(name)
        if kind == Kind.UNSCALED_GRAD:
            return self.last_seen(Kind.REDUCED_GRAD, name)
        return self.window_sum(name)

    @cached_property
    def factors(self) -> Factors | None:
        """Each cell's measured factor from its local gradients to the gradient before clipping.

        Of the parameters that most cells have gradients of: see ``factors_of``.
        """
        return rank_factors(self._local_samples(self._most_common, self.kept_from))

    @cached_property
    def _most_common(self) -> list[str]:
        """The parameters that most cells have gradients of."""
        return max(self._classes.values(), key=len, default=[])

    @cached_property
    def kept_from(self) -> int:
        """The first microbatch of the window whose gradients are still there at its end, 0 as a rule.

        A program that goes through a batch twice drops the gradients between (sharpness-aware updates). That
        it does is read off what came of them: the later passes alone explain it, and all together do not.
        """
        last = self.view.last_microbatch()
        names = self._most_common[:_SHOWN]
        if not last or not any(self._parts.get(name) for name in names):
            return 0
        found = [
            rank_factors(self._local_samples(names, first)) for first in range(min(last, _MOST_PASSES) + 1)
        ]
        left = [math.inf if factors is None else factors.residual for factors in found]
        best = min(range(len(left)), key=lambda n: left[n])
        return best if best and left[best] < min(_EXPLAINED, _BY_FAR * left[0]) else 0

    def factors_of(self, name: str) -> Factors | None:
        """Return the factors of a parameter's reduction class: experts are reduced over fewer ranks."""
        cells = self._cells_of(name)
        if cells not in self._class_factors:
            self._class_factors[cells] = rank_factors(
                self._local_samples(self._classes.get(cells, []), self.kept_from)
            )
        return self._class_factors[cells]

    @cached_property
    def _classes(self) -> dict[frozenset[int], list[str]]:
        """The parameters by the set of cells that have a gradient of them."""
        found: dict[frozenset[int], list[str]] = defaultdict(list)
        for name in self.names:
            if cells := self._cells_of(name):
                found[cells].append(name)
        return dict(found)

    def _cells_of(self, name: str) -> frozenset[int]:
        return frozenset(i.cell for i in self.local_items(name))

    def _local_samples(self, names: Iterable[str], first: int) -> Iterator[tuple[dict[int, Sum], Sum]]:
        for name in names:
            copies, local = self.unclipped_copies(name), self.local_sums(name, first=first)
            if (
                not copies
                or not local
                or odd_ranks(copies)
                or not _readable((*copies, *self.local_items(name)))
            ):
                continue  # where replicas disagree there is no one gradient to explain
            start = {i.cell: one(i) for i in self.start_items(name)}
            if not first and any(any_nonzero(found) for found in start.values()):
                # leftovers are a regressor of their own
                local = local | {-1 - cell: found for cell, found in start.items()}
            final = self.unclipped_value(name)
            assert final is not None  # there are copies
            holders = {rank for item in copies for rank in item.ranks}
            if len(holders) == 1 and made_of_one(copies[0].cell, local, final):
                continue  # its holder did not add the others', which is no weight of their tokens
            yield local, final

    def factor_from(self, kind: Kind) -> float | None:
        """Return the measured factor from a rung's gradient to the gradient before clipping."""
        if kind not in self._factor_cache:
            pairs = ((self.rung(kind, n), self.unclipped_value(n)) for n in self.names)
            self._factor_cache[kind] = scalar_factor(
                (one(x), y) for x, y in pairs if x is not None and y is not None
            )
        return self._factor_cache[kind]

    def noise_of(self, name: str) -> float:
        """Return how far the stages after the local gradients are from scaling and adding, measured."""
        factors = self.factors_of(name)
        return factors.residual + factors.uncertainty if factors is not None else math.inf

    def canonical(self, kind: Kind, name: str, *, factor: float | None = None) -> Sum | None:
        """Return a rung's gradient with the factors still to come divided out.

        ``factor`` replaces the measured one. A rung that the run does not have equals the rung before it.
        None where it cannot be told.
        """
        if kind == Kind.CLIPPED_GRAD:
            return self.unclipped_value(name)
        item = self.rung(kind, name)
        if item is not None:
            factor = self.factor_from(kind) if factor is None else factor
            if factor is None and not all(np.isfinite(block).all() for block in one(item).blocks()):
                return one(item)  # nothing finite measures a factor, and none would change the verdict
            return None if factor is None else one(item).scaled(factor)
        if kind == Kind.UNSCALED_GRAD:
            return self.canonical(Kind.REDUCED_GRAD, name)
        return self.combined_local(name)

    def combined_local(self, name: str) -> Sum | None:
        """Return what the local gradients give for the gradient before clipping, by measured factors."""
        factors, local = self.factors_of(name), self.local_sums(name, first=self.kept_from)
        if factors is None or not local or any(cell not in factors.by_rank for cell in local):
            return None
        parts = [(found, factors.by_rank[cell]) for cell, found in local.items()]
        for item in (
            () if self.kept_from else self.start_items(name)
        ):  # a reduction passes leftovers on with the new part
            own = factors.by_rank.get(item.cell, 0.0)
            parts.append((one(item), factors.by_rank.get(-1 - item.cell, own)))
        return Sum(tuple(term for found, factor in parts for term in found.scaled(factor).terms))


def _divided(items: Iterable[Item], divide_by: Callable[[Part], float]) -> Sum | None:
    parts = [(Part(item.cell, "train", item.entry.microbatch or 0), item) for item in items]
    return Sum(tuple(Term(item, 1.0, divide_by(part)) for part, item in parts)) if parts else None


def _readable(items: Iterable[Item]) -> bool:
    return all(item.readable for item in items)
