"""One run's ranks at one module call: reads what an operation was given, returned and got back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.catalog import Catalog, Item, Part
from tensortrace.diff.logical import Member, Unlabelled
from tensortrace.diff.operations.calls import Call, Given, Operation
from tensortrace.diff.operations.sequences import align
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.types import Kind

MAX_BYTES = 1 << 30
"""Tensors larger than this are not looked at."""


class Unreadable(Exception):
    """A tensor that not every rank recorded, or whose bytes are not there; the text says why."""


class Side:
    """A run's ranks at one module call. What an operation is, the first rank says; the others follow it."""

    def __init__(self, catalog: Catalog, calls: Sequence[Call]) -> None:
        self.base = calls[0]
        self.ranks = tuple(call.rank for call in calls)
        self._catalog = catalog
        self._calls = calls
        self._theirs = [_counterparts(self.base, call) for call in calls[1:]]

    def outputs(self, operation: Operation, number: int) -> list[Member]:
        """Return one result of an operation, as each rank recorded it."""
        members = []
        for call, own in self._each(operation):
            entries = list(own.outputs.values())
            if number >= len(entries):
                raise Unreadable("not every rank recorded it")
            members.append(Member(call.source, entries[number]))
        return members

    def given(self, operation: Operation, number: int) -> list[Member]:
        """Return one tensor that an operation was given, as ``outputs`` does."""
        members = []
        for call, own in self._each(operation):
            reference = own.given[number].reference if number < len(own.given) else ""
            if reference not in call.tensors:
                raise Unreadable("its value was not recorded")
            members.append(Member(call.source, call.tensors[reference]))
        return members

    def gradients(self, operation: Operation, number: int) -> list[Member]:
        """Return the gradient of one result of an operation, as ``outputs`` does."""
        members = []
        for call, own in self._each(operation):
            references = list(own.outputs)
            entry = own.gradients.get(references[number]) if number < len(references) else None
            if entry is None:
                raise Unreadable("no gradient was recorded on some rank")
            members.append(Member(call.source, entry))
        return members

    def maker(self, given: Given) -> Operation | None:
        """Return the operation that made a tensor, None for what came from outside of the call."""
        return self.base.by_reference.get(given.reference)

    def of_one_rank(self, operation: Operation) -> Operation | None:
        """Return what made a tensor that one rank was given here, an operation that the first has not."""
        for call, theirs in zip(self._calls[1:], self._theirs, strict=True):
            shared = {one.number for one in theirs.values()}
            own = theirs.get(operation.number)
            made = (call.by_reference.get(given.reference) for given in (own.given if own else ()))
            alone = next((one for one in made if one is not None and one.number not in shared), None)
            if alone is not None:
                return alone
        return None

    def _each(self, operation: Operation) -> list[tuple[Call, Operation]]:
        found = [(self.base, operation)]
        for call, theirs in zip(self._calls[1:], self._theirs, strict=True):
            if operation.number not in theirs:
                raise Unreadable("the ranks computed other operations")
            found.append((call, theirs[operation.number]))
        return found

    def read(self, members: Sequence[Member]) -> list[np.ndarray]:
        """Return what the ranks hold, put together where its parts are declared."""
        if any(not member.source.stored(member.entry) for member in members):
            raise Unreadable("its bytes are not there")
        if sum(_bytes(member) for member in members) > MAX_BYTES:
            raise Unreadable(f"it has more than {MAX_BYTES >> 30} GiB")
        try:
            return [np.asarray(array) for member in self._together(members) for array in member]
        except TraceError as error:
            raise Unreadable(str(error)) from error

    def items(self, members: Sequence[Member], microbatch: int | None) -> list[Item]:
        """Return what each data cell holds together; raises Unreadable where nothing tells how."""
        found = []
        for source, entry in self._catalog.together(Kind.ACTIVATION, members):
            if isinstance(source, Unlabelled):
                raise Unreadable("no layout is known")
            cell = self._catalog.cells.cell(source.rank)
            found.append(Item(source, entry, Part(cell, "train", microbatch or 0), 0, cell))
        return found

    def _together(self, members: Sequence[Member]) -> list[list[np.ndarray]]:
        """Put declared parts together; what no layout is known of stays one tensor a rank."""
        if not any(member.entry.shard for member in members):
            return [[member.source.read(member.entry) for member in members]]
        found: list[list[np.ndarray]] = []
        for source, entry in self._catalog.together(Kind.ACTIVATION, members):
            if isinstance(source, Unlabelled):
                found.append([member.source.read(member.entry) for member in source.members])
            else:
                found.append([source.read(entry)])
        return found


def _counterparts(base: Call, call: Call) -> dict[int, Operation]:
    pairs = align(base.operations, call.operations)
    return {base.operations[i].number: call.operations[j] for i, j in pairs}


def _bytes(member: Member) -> int:
    size = 8
    for count in member.entry.local_shape:
        size *= count
    return size
