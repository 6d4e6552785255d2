"""Which pass over which rows of the batch a recorded boundary belongs to."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tensortrace.diff.cells import SAMPLE_KINDS
from tensortrace.tracer.types import Entry, Kind

ROW_KINDS = SAMPLE_KINDS
"""Kinds that belong to one forward and backward pass over some rows of the batch."""


class Part(NamedTuple):
    """One data cell's pass over some rows: a microbatch, or the n-th eval pass of a step.

    ``rank`` is the cell's lowest; without parallelism inside a batch, every rank is a cell.
    """

    rank: int
    phase: str
    number: int


class EvalPasses:
    """Places entries in parts; eval passes have no microbatch and are told apart by what a root is given.

    Where several roots work on a batch (an encoder, then a head), the first one in the step begins each pass.
    """

    def __init__(self) -> None:
        self._leader: dict[int, str] = {}
        self._number: dict[int, int] = defaultdict(lambda: -1)
        self._open_input: dict[int, bool] = defaultdict(bool)
        self._first_call: dict[tuple[int, Kind, str, str], int] = {}
        self._pass_of: dict[tuple[int, Kind, str, str], int] = {}

    def place(self, rank: int, cell: int, entry: Entry, *, computed: bool) -> tuple[Part | None, int]:
        """Return the part of an entry, and its call number within the part.

        ``computed`` tells whether it came from anything but what modules were given, as a batch is.
        """
        if entry.kind not in ROW_KINDS:
            return None, entry.call
        if entry.microbatch is not None:
            return Part(cell, "train", entry.microbatch), entry.call
        is_input = entry.kind == Kind.INPUT and not computed
        is_input = is_input and entry.name == self._leader.setdefault(rank, entry.name)
        if is_input and not self._open_input[rank]:
            self._number[rank] += 1
        self._open_input[rank] = is_input
        number = max(self._number[rank], 0)
        key = (rank, entry.kind, entry.name, entry.slot)
        if self._pass_of.get(key) != number:
            self._pass_of[key] = number
            self._first_call[key] = entry.call
        return Part(cell, "eval", number), entry.call - self._first_call[key]
