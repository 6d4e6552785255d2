"""Forward passes that a program makes before the first backward: each is a microbatch, as the other run's.

A pipeline written by hand sends all microbatches forward, then all back; a program may add up the losses of
several forward passes. Their recording counts one microbatch, of several calls of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from tensortrace.diff.kinds import RUNGS
from tensortrace.tracer.types import ROOT, STAGE, Entry, Kind

_FORWARD = frozenset({Kind.INPUT, Kind.ACTIVATION})

Held = Sequence[tuple[int, Entry]]
"""Entries of one step of a run, with their rank, in the order in which each rank recorded them."""


def apart(a: Sequence[Held], b: Sequence[Held]) -> tuple[list[list[Entry]] | None, list[list[Entry]] | None]:
    """Return both runs' entries, step by step, with every forward pass as a microbatch; None: as they are.

    That is done where one run calls the model more often in a microbatch than the other, and where every
    such call has a loss of its own: an objective of several calls' outputs is that of one microbatch.
    """
    calls = [max((_calls(held) for held in side), default=0) for side in (a, b)]
    if calls[0] == calls[1] or min(calls) < 1:
        return None, None
    several = [count > 1 for count in calls]
    if not all(_is_one_by_one(side) for side, more in zip((a, b), several, strict=True) if more):
        return None, None
    left, right = (
        [_numbered(held) for held in side] if more else None
        for side, more in zip((a, b), several, strict=True)
    )
    return left, right


def _calls(held: Held) -> int:
    """Return how often the model is called in the microbatches of a step."""
    return max((e.call + 1 for _, e in held if _is_given(e)), default=0)


def _is_given(entry: Entry) -> bool:
    """Tell whether an entry is what a training pass gave the model."""
    is_model = entry.name == ROOT or entry.name.startswith(STAGE)
    given = entry.kind in _FORWARD and is_model and entry.slot.startswith("in")
    return given and entry.microbatch is not None and not entry.recompute


def _is_one_by_one(side: Sequence[Held]) -> bool:
    """Tell whether every call of the model is followed by a loss made of nothing but its own output."""
    seen = False
    for held in side:
        for entries in _by_rank(held).values():
            passes = _Passes(entries)
            with_loss: dict[int, set[int]] = defaultdict(set)
            for entry in entries:
                own = passes.at(entry.event)
                earlier = any(
                    passes.old(e) == entry.microbatch and passes.at(e) < own for e in entry.producers
                )
                if _is_given(entry) and earlier:
                    return False  # it is what an earlier call returned
                if entry.kind is Kind.LOSS and entry.slot == "sum" and entry.microbatch is not None:
                    if any(passes.at(e) != own for e in entry.producers):
                        return False
                    with_loss[entry.microbatch].add(own)
            for number, found in with_loss.items():
                if found != passes.of_old(number):
                    return False
            seen = seen or bool(with_loss)
    return seen


def _by_rank(held: Held) -> dict[int, list[Entry]]:
    found: dict[int, list[Entry]] = defaultdict(list)
    for rank, entry in held:
        found[rank].append(entry)
    return found


class _Passes:
    """The forward passes of one rank in one step, in order: where each began, and its old microbatch."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._begins: list[tuple[int, int]] = []
        seen: set[tuple[int, int]] = set()
        for entry in entries:
            key = (entry.microbatch or 0, entry.call)
            if _is_given(entry) and key not in seen:
                seen.add(key)
                self._begins.append((entry.event, key[0]))

    def at(self, event: int) -> int:
        """Return the pass that was the last to begin by an event, 0 before any."""
        return max(sum(begin <= event for begin, _ in self._begins) - 1, 0)

    def old(self, event: int) -> int | None:
        """Return the recorded microbatch of the pass to which an event belongs, None before any."""
        return self._begins[self.at(event)][1] if self._begins and event >= self._begins[0][0] else None

    def of_old(self, microbatch: int) -> set[int]:
        """Return the passes of a recorded microbatch."""
        return {n for n, (_, old) in enumerate(self._begins) if old == microbatch}


def _numbered(held: Held) -> list[Entry]:
    """Return a step's entries with the pass as their microbatch, and calls counted within it."""
    made = {rank: iter(_of_rank(entries)) for rank, entries in _by_rank(held).items()}
    return [next(made[rank]) for rank, _ in held]


def _of_rank(entries: Sequence[Entry]) -> list[Entry]:
    numbers = list(_pass_of_each(entries))
    first: dict[tuple[_Key, int], int] = {}
    for entry, number in zip(entries, numbers, strict=True):
        if number is not None:
            key = (_key(entry), number)
            first[key] = min(entry.call, first.get(key, entry.call))
    return [
        entry if number is None else _as_pass(entry, number, first[_key(entry), number])
        for entry, number in zip(entries, numbers, strict=True)
    ]


def _as_pass(entry: Entry, number: int, begin: int) -> Entry:
    call = entry.call if entry.kind in RUNGS else entry.call - begin
    return replace(entry, microbatch=number, call=call)


_Key = tuple[str, str, str]


def _key(entry: Entry) -> _Key:
    """Return what counts calls together: the tensors of a module with their gradients, those of a loss."""
    if entry.kind is Kind.LOSS:
        return "loss", entry.name, ""
    of_module = entry.kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD)
    return "module" if of_module else entry.kind.value, entry.name, entry.slot


def _pass_of_each(entries: Sequence[Entry]) -> Iterator[int | None]:
    """Yield the pass to which each entry belongs, None where it stays as it is.

    A gradient belongs to the pass that called the module then, a parameter's to that of the gradient before
    it, and what is done to gradients after them to the last.
    """
    passes = _Passes(entries)
    known: dict[tuple[_Key, int, int], int] = {}
    last = 0
    for entry in entries:
        if entry.microbatch is None or not passes.of_old(entry.microbatch):
            yield None
            continue
        key = (_key(entry), entry.call, entry.microbatch)
        forward = entry.kind in _FORWARD or (entry.kind is Kind.LOSS and entry.slot == "sum")
        if entry.kind in RUNGS:
            number = max(passes.of_old(entry.microbatch))
        elif forward and not entry.recompute:
            number = known[key] = passes.at(entry.event)
        elif entry.kind is Kind.LOSS and entry.name == "backward":
            number = max((passes.at(e) for e in entry.producers), default=last)
        else:
            number = known.get(key, last)
        last = number if entry.kind is Kind.ACTIVATION_GRAD else last
        yield number
