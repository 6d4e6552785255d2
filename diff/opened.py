"""One trace as Python sees it: global tensors by kind, name and step, whatever the layout of its ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self, overload

import numpy as np

from tensortrace.diff.catalog import Catalog, Slot
from tensortrace.diff.joining import join
from tensortrace.diff.notebook import card, listing, table
from tensortrace.diff.relaid import laid_out
from tensortrace.diff.result import StepLabel
from tensortrace.diff.series import Series, series_of
from tensortrace.diff.tensors import GlobalTensor, OverSteps, global_tensors
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.nearest import meant, nearest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_index import OnDamage
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.request import Request, asked_steps
from tensortrace.tracer.safe import safe
from tensortrace.tracer.selection import parse_kinds
from tensortrace.tracer.types import INIT_STEP, Entry, Kind

_MAIN = ("model", "out", "grad", "value", "in.0")
"""Slots that are meant where none is named, the first that there is."""


class NoSuchBoundary(BadRequest, KeyError):
    """A kind, name, slot or step that a trace does not have; the text says which are nearest."""

    def __str__(self) -> str:  # a KeyError would show the text quoted
        return str(self.args[0])


class OpenTrace:
    """A trace to look into; ``tracer.open`` makes one. Of tensors nothing is read before it is asked for.

    >>> from tensortrace import tracer
    >>> trace = tracer.open("a")
    >>> trace
    <trace a: 1 rank, steps 0-2 and init, ... kinds, ... boundaries>
    >>> trace.names("param")
    ('embed.weight', 'hidden.weight', 'hidden.bias', 'head.weight', 'head.bias')
    >>> trace.get("param", "hidden.weight", step=2).shape
    (12, 8)

    One boundary over the steps is a mapping; a step more in the brackets gives the tensor:

    >>> weights = trace["param", "hidden.weight"]
    >>> list(weights)
    ['init', 0, 1, 2]
    >>> bool((weights[2] == trace["param", "hidden.weight", 2]).all())
    True

    What is not there is told with what may have been meant:

    >>> trace["param", "hiden.weight"]
    Traceback (most recent call last):
    ...
    tensortrace.diff.opened.NoSuchBoundary: a: no param 'hiden.weight'; did you mean hidden.weight?
    """

    trace: Trace
    """What the reader knows of it: each rank's entries, as a layout file describes them."""

    def __init__(self, trace: Trace, layout: Path | None = None) -> None:
        self.trace, self.notes = laid_out(trace, layout)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, layout: str | os.PathLike[str] | None = None,
        on_damage: OnDamage = "refuse",
    ) -> Self:  # fmt: skip
        """Read the manifests and indexes of a trace, and no tensor; a layout file says how it lies otherwise.

        Raises as ``tracer.reader.Trace.open`` does, and LayoutFileError for a layout that does not fit.
        """
        trace = Trace.open(Path(path), on_damage=on_damage)
        return cls(trace, None if layout is None else Path(layout))

    @property
    def path(self) -> Path:
        """Where the trace lies."""
        return self.trace.path

    @property
    def problems(self) -> tuple[str, ...]:
        """What is missing or damaged in the trace."""
        return self.trace.problems

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that recorded anything."""
        return self.catalog.ranks

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps recorded, without ``init``."""
        return self.catalog.steps

    @property
    def has_init(self) -> bool:
        """Whether the state before the first step was recorded: step ``"init"``."""
        return self.catalog.has_init

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of boundary that were recorded, in the order of the ladder."""
        return tuple(kind for kind in Kind if kind in self._known)

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names of a kind's boundaries, in the order in which they were first recorded."""
        return tuple(self._of_kind(kind))

    def slots(self, kind: str, name: str) -> tuple[str, ...]:
        """Return the slots of a boundary, in the order in which they were first recorded."""
        return tuple(self._of_name(kind, name))

    @property
    def numbers(self) -> Series:
        """Numbers over the steps, by name: loss and tokens, norms, learning rates.

        >>> from tensortrace import tracer
        >>> tracer.open("a").numbers["valid tokens of cross_entropy"]
        {0: ..., 1: ..., 2: ...}
        """
        return series_of(self.catalog, self.steps)

    def boundaries(
        self, *, kind: str | None = None, name: str | None = None, slot: str | None = None,
        step: int | str | None = None, microbatch: int | None = None, rank: int | None = None,
    ) -> Iterator[GlobalTensor]:  # fmt: skip
        """Yield the boundaries that fit, step by step in the order in which they were recorded.

        ``kind`` may be several, ``name`` a glob, ``step`` a number or ``"init,0-3"``; of ``rank`` is what it
        holds a part or a copy of. First passes only: recomputed ones are left out.
        """
        steps = () if step is None else _ranges(step)
        kinds = () if kind is None else parse_kinds(kind, option="kind")
        request = Request(steps, kinds, name, () if rank is None else (rank,))
        for tensor in self.wanted(request):
            if slot in (None, tensor.slot) and microbatch in (None, tensor.microbatch):
                yield tensor

    def recorded(self) -> Iterator[tuple[RankTrace, Entry]]:
        """Yield what each rank recorded, step by step, recomputed passes too."""
        for step in self._all_steps:
            yield from self.catalog.recorded(step)

    def wanted(self, request: Request) -> Iterator[GlobalTensor]:
        """Yield what a request asks for, as ``boundaries`` does."""
        for step in self._all_steps:
            if request.wants_step(step):
                found = self._of_step(step, lambda key: request.wants_key(key.kind, key.name))
                yield from (held for each in found if (held := _of_ranks(each, request.ranks)) is not None)

    def get(
        self, kind: str, name: str, *, step: StepLabel, microbatch: int | None = None,
        slot: str | None = None, call: int = 0, rank: int | None = None,
    ) -> np.ndarray:  # fmt: skip
        """Return one boundary's global tensor, put together from what ranks and microbatches hold.

        Without ``slot`` the value of a parameter, the output of a module, the gradient of either. Without
        ``microbatch`` what belongs to the whole step, else the rows of all its microbatches in order of
        microbatch and rank, as the batch's first dimension has them. ``rank`` asks for what this rank takes
        part in: its own rows, its own copy. Passes without gradients are among ``boundaries``.

        Raises NoSuchBoundary, a KeyError, where it was not recorded, BadRequest where several tensors are
        meant that nothing puts together, and as ``GlobalTensor.read`` does.
        """
        slot, steps = self._slot(kind, name, slot)
        number = _number(step)
        if number not in steps:
            recorded = _some(_label(n) for n in sorted(steps))
            raise NoSuchBoundary(f"{self._shown}: no {kind} {safe(name)!r} of step {step}; steps: {recorded}")
        wanted = (kind, name, slot, call)
        found = [
            held
            for each in self._of_step(number, lambda key: (key.kind, key.name, key.slot, key.call) == wanted)
            if each.eval_pass is None
            and (held := _of_ranks(each, () if rank is None else (rank,))) is not None
        ]
        whole = [tensor for tensor in found if tensor.microbatch is None]
        if microbatch is not None:
            found = [tensor for tensor in found if tensor.microbatch == microbatch]
        elif whole:
            found = whole
        if not found:
            raise NoSuchBoundary(
                f"{self._shown}: no {kind} {safe(name)!r} {safe(slot)} of step {step} has this microbatch, "
                "call and rank"
            )
        return join(self.catalog.view(number), found)

    @overload
    def __getitem__(self, key: tuple[str, str]) -> OverSteps: ...
    @overload
    def __getitem__(self, key: tuple[str, str, StepLabel]) -> np.ndarray: ...
    @overload
    def __getitem__(self, key: tuple[str, str, StepLabel, int]) -> np.ndarray: ...
    def __getitem__(
        self, key: tuple[str, str] | tuple[str, str, StepLabel] | tuple[str, str, StepLabel, int]
    ) -> OverSteps | np.ndarray:
        numbers = key[2:] if isinstance(key, tuple) else ()
        if not isinstance(key, tuple) or not 2 <= len(key) <= 4 or any(isinstance(n, slice) for n in numbers):
            raise BadRequest(
                "a trace's brackets",
                found=repr(key)[:80],
                expected="kind, name, and maybe step and microbatch",
            )
        if len(key) == 2:
            return self._over_steps(*key)
        return self.get(key[0], key[1], step=key[2], microbatch=key[3] if len(key) == 4 else None)

    def _over_steps(self, kind: str, name: str) -> OverSteps:
        slot, steps = self._slot(kind, name, None)

        def tensors() -> Iterator[GlobalTensor]:
            return (t for t in self.boundaries(kind=kind, slot=slot) if t.name == name)

        labels = tuple(_label(step) for step in sorted(steps))
        shown = f"{kind} {safe(name)} {safe(slot)}"
        return OverSteps(shown, labels, lambda step: self.get(kind, name, step=step, slot=slot), tensors)

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, tuple) or len(key) != 2:
            return False
        kind, name = key
        return kind in self._known and name in self._known[kind]

    def __iter__(self) -> Iterator[GlobalTensor]:
        return self.boundaries()

    def close(self) -> None:
        """Let go of the index; what was taken of the trace before can still be read."""
        self.trace.close()
        self.__dict__.pop("catalog", None)
        self.__dict__.pop("_known", None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        count, kinds = sum(len(rank.entries) for rank in self.trace.ranks), len(self.kinds)
        ranks = len(self.ranks)
        return (
            f"<trace {self._shown}: {ranks} rank{'s' * (ranks != 1)}, {self._spoken_steps}, {kinds} kinds, "
            f"{count:,} boundaries>"
        )

    def _repr_html_(self) -> str:
        """Return what notebooks show: kinds, with how many names and boundaries each has."""
        counts = Counter(entry.kind for rank in self.trace.ranks for entry in rank.entries)
        rows = [
            (kind, f"{len(self.names(kind)):,}", f"{counts[kind]:,}", _some(self.names(kind), most=4))
            for kind in self.kinds
        ]
        return card(
            repr(self).strip("<>"), table(rows, head=("kind", "names", "boundaries", "such as")),
            listing("problems", self.problems), listing("notes", self.notes),
            mark="open" if self.problems else "good",
        )  # fmt: skip

    @property
    def _spoken_steps(self) -> str:
        if not self.steps:
            return "init alone" if self.has_init else "no steps"
        first, last = self.steps[0], self.steps[-1]
        whole = len(self.steps) == last - first + 1
        text = f"step {first}" if first == last else f"{'' if whole else 'some of '}steps {first}-{last}"
        return text + " and init" * self.has_init

    @cached_property
    def catalog(self) -> Catalog:
        """What the diff knows of the trace."""
        return Catalog(self.trace)

    @property
    def _shown(self) -> str:
        return safe(str(self.path))

    @property
    def _all_steps(self) -> tuple[int, ...]:
        return (INIT_STEP,) * self.has_init + self.steps

    @cached_property
    def _known(self) -> dict[str, dict[str, dict[str, set[int]]]]:
        """In which steps each kind, name and slot was recorded."""
        known: dict[str, dict[str, dict[str, set[int]]]] = {}
        for _, entry in self.recorded():
            if not entry.recompute:
                slots = known.setdefault(entry.kind, {}).setdefault(entry.name, {})
                slots.setdefault(entry.slot, set()).add(entry.step)
        return known

    def _of_kind(self, kind: str) -> dict[str, dict[str, set[int]]]:
        if kind not in self._known:
            raise self._no(f"kind {safe(str(kind))!r}", str(kind), self._known)
        return self._known[kind]

    def _of_name(self, kind: str, name: str) -> dict[str, set[int]]:
        names = self._of_kind(kind)
        if name not in names:
            raise self._no(f"{kind} {safe(str(name))!r}", str(name), names)
        return names[name]

    def _slot(self, kind: str, name: str, slot: str | None) -> tuple[str, set[int]]:
        """Return the slot that is meant, and the steps in which it was recorded."""
        slots = self._of_name(kind, name)
        if slot is None:
            slot = next((main for main in _MAIN if main in slots), None)
        if slot is None and len(slots) > 1:
            found = f"slots {_some(slots)}"
            raise BadRequest(f"{self._shown}: {kind} {safe(name)!r}", found=found, remedy="say which: slot=")
        slot = next(iter(slots)) if slot is None else slot
        if slot not in slots:
            raise self._no(f"slot {safe(slot)!r} of {kind} {safe(name)!r}", slot, slots)
        return slot, slots[slot]

    def _of_step(self, step: int, wanted: Callable[[Slot], bool]) -> list[GlobalTensor]:
        """Return the tensors recorded in a step whose keys are wanted, in the order of events."""
        found = [
            tensor
            for key, items in self.catalog.view(step).items.items()
            if wanted(key) and step in self._known.get(key.kind, {}).get(key.name, {}).get(key.slot, ())
            for tensor in global_tensors(step, key, items)
        ]
        return sorted(found, key=lambda tensor: min(item.entry.event for item in tensor.items))

    def _no(self, what: str, asked: str, there: Iterable[str]) -> NoSuchBoundary:
        known = list(there)
        likely = meant(nearest(asked, known)) or f"there are {_some(known)}"
        return NoSuchBoundary(f"{self._shown}: no {what}", remedy=likely)


def _of_ranks(tensor: GlobalTensor, ranks: tuple[int, ...]) -> GlobalTensor | None:
    """Return the tensor with the copies that these ranks take part in; None where there are none."""
    if not ranks:
        return tensor
    own = tuple(item for item in tensor.items if not set(ranks).isdisjoint(item.ranks))
    return replace(tensor, items=own) if own else None


def _ranges(step: int | str) -> tuple[tuple[int, int], ...]:
    return ((step, step),) if isinstance(step, int) else asked_steps(step, option="step")


def _number(step: StepLabel) -> int:
    return INIT_STEP if step == "init" else step


def _label(step: int) -> StepLabel:
    return "init" if step == INIT_STEP else step


def _some(names: Iterable[object], most: int = 8) -> str:
    shown = [safe(str(name), limit=80) for name in names]
    return ", ".join(shown[:most]) + (", …" if len(shown) > most else "")
