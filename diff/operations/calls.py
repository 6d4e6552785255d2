"""The recorded operations of module calls, read from a trace."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from tensortrace.diff.logical import RankSource
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Entry, Kind

_SLOT = re.compile(r"(\d{5,9})\.([^.]+)\.(.+)")
_REFERENCE = re.compile(r"(#\d+[\w.]*|\d{5,9}\.[^\s\]]+|\?) ([a-z0-9_]+)\[([0-9,]{0,400})\]( grad\b)?")
RETURN = "return"
CALLED_AT = " < "
MAX_OPERATIONS = 20_000
"""Operations of one call that are looked at."""

CallKey = tuple[int | None, str, int]
"""Microbatch, module, call."""

_Passes = tuple[list[Entry], list[Entry]]
"""The entries of a call's first pass, and of its recomputed one."""


class Given(NamedTuple):
    """A tensor that an operation was given: where its value is, and what it is.

    ``flows`` tells whether it required a gradient, ``argument`` which of the operation's it was.
    """

    reference: str
    dtype: str
    shape: tuple[int, ...]
    flows: bool = False
    argument: str = ""


@dataclass
class Operation:
    """One operation of one rank's call.

    ``outputs`` are keyed as arguments refer to them (``#12``, ``#12.0``), so are ``gradients``.
    """

    number: int
    name: str
    op: str = ""
    source: str | None = None
    function: str | None = None
    callers: tuple[str, ...] = ()
    module: str = ""
    requires_grad: bool = False
    grad_enabled: bool | None = None
    arguments: tuple[str, ...] = ()
    outputs: dict[str, Entry] = field(default_factory=dict)
    gradients: dict[str, Entry] = field(default_factory=dict)

    @cached_property
    def given(self) -> tuple[Given, ...]:
        """The tensors that the operation was given, in the order of its arguments."""
        found = []
        for text in self.arguments:
            name, _, value = text.partition("=")
            for match in _REFERENCE.finditer(value):
                shape = tuple(int(n) for n in match[3].split(",") if n)
                found.append(Given(match[1], match[2], shape, match[4] is not None, name))
        return tuple(found)

    @cached_property
    def settings(self) -> dict[str, str]:
        """The arguments that aren't tensors, by name."""
        pairs = (text.partition("=") for text in self.arguments)
        return {name: value for name, _, value in pairs if not _REFERENCE.search(value)}

    @cached_property
    def packet(self) -> str:
        """The name without its overload, and without the mark of an operation in place."""
        return ".".join(self.op.split(".")[:2]).removesuffix("_")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of what it returned."""
        return tuple(entry.dtype for entry in self.outputs.values())


@dataclass
class Call:
    """A module call on one rank: its operations in order, and every tensor that they refer to."""

    source: RankSource
    operations: list[Operation]
    tensors: dict[str, Entry]
    gradients: dict[str, Entry]

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.source.rank

    @cached_property
    def by_reference(self) -> dict[str, Operation]:
        """The operation that made each tensor."""
        return {reference: op for op in self.operations for reference in op.outputs}

    @cached_property
    def tells_flow(self) -> bool:
        """Whether arguments say which of them require a gradient: those of older traces don't."""
        return any(given.flows for operation in self.operations for given in operation.given)

    @cached_property
    def by_event(self) -> dict[int, str]:
        """The reference of what each event of the call recorded as a result."""
        return {entry.event: reference for op in self.operations for reference, entry in op.outputs.items()}

    def made_from(self, given: Given) -> tuple[Given, ...]:
        """Return results of which a tensor is another view, written to since: it has no reference there."""
        entry = self.tensors.get(given.reference) if not given.reference.startswith("#") else None
        found = (self.by_event.get(event) for event in (entry.producers if entry else ()))
        return tuple(Given(one, given.dtype, ()) for one in dict.fromkeys(found) if one is not None)

    @cached_property
    def users(self) -> dict[str, list[Operation]]:
        """The operations that each tensor was given to."""
        found: dict[str, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            for given in operation.given:
                found[given.reference].append(operation)
        return found


def calls_of(trace: Trace, step: int) -> dict[CallKey, list[Call]]:
    """Return the calls of a step that were looked into, each on every rank that recorded it."""
    found: dict[CallKey, list[Call]] = defaultdict(list)
    for rank in trace.ranks:
        by_call: dict[CallKey, _Passes] = defaultdict(lambda: ([], []))
        for entry in rank.entries:
            if entry.step == step and entry.kind in (Kind.OPERATION, Kind.OPERATION_GRAD):
                by_call[entry.microbatch, entry.name, entry.call][entry.recompute].append(entry)
        for key, passes in by_call.items():
            found[key].append(_call(rank, _with_gradients(*passes)))
    return found


def _with_gradients(first: list[Entry], again: list[Entry]) -> list[Entry]:
    """Return the pass to whose operations gradients belong.

    Inside a reentrant checkpoint the first pass has none: autograd then keeps no results, so that its
    operations are fewer, and the gradients' numbers are those of the recomputed pass.
    """
    if not again or any(entry.meta.requires_grad for entry in first):
        return first
    return [*again, *(entry for entry in first if entry.kind is Kind.OPERATION_GRAD)]


def _call(source: RankSource, entries: Iterable[Entry]) -> Call:
    operations: dict[int, Operation] = {}
    tensors: dict[str, Entry] = {}
    gradients: dict[str, Entry] = {}
    for entry in entries:
        match = _SLOT.fullmatch(entry.slot)
        if match is None or int(match[1]) >= MAX_OPERATIONS:
            continue
        number, name, slot = int(match[1]), match[2], match[3]
        operation = operations.setdefault(number, Operation(number, name))
        if slot.startswith("in."):
            tensors[entry.slot] = entry
            continue
        reference = f"#{number}{slot.removeprefix('out')}"
        if entry.kind == Kind.OPERATION_GRAD:
            gradients[reference] = operation.gradients[reference] = entry
            continue
        if slot != "none":
            tensors[reference] = operation.outputs[reference] = entry
        _describe(operation, entry)
    ordered = [operations[number] for number in sorted(operations)]
    return Call(source, _without_bookkeeping(ordered), tensors, gradients)


def _describe(operation: Operation, entry: Entry) -> None:
    meta = entry.meta
    operation.op, operation.source = meta.op or operation.name, meta.source
    function, *callers = (meta.text or "").split(CALLED_AT)
    operation.function, operation.callers = function or None, tuple(callers)
    operation.module, operation.arguments = meta.module or entry.name, meta.arguments
    operation.requires_grad, operation.grad_enabled = bool(meta.requires_grad), meta.grad_enabled


def _without_bookkeeping(operations: list[Operation]) -> list[Operation]:
    """Leave out the ``detach`` by which autograd keeps a result: nothing is computed from it."""
    used = {given.reference for operation in operations for given in operation.given}
    return [op for op in operations if op.packet != "aten.detach" or any(ref in used for ref in op.outputs)]
