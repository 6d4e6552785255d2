"""Finds the operation behind which gradients part, where the values of both runs agree."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from tensortrace.diff.operations.calls import RETURN, Given, Operation
from tensortrace.diff.operations.meeting import one_of_copies
from tensortrace.diff.operations.search import Found, Search
from tensortrace.diff.operations.sides import Side, Unreadable
from tensortrace.diff.operations.verdicts import Verdict, eps_of, unknown
from tensortrace.diff.tolerance import Error

DETACH = "aten.detach"
NEGLIGIBLE = 1e-5
"""A gradient that one run alone has is none where it is this much smaller than what the module gets back."""


class _Below(NamedTuple):
    """What a result leads to on one side: the next operations of both runs, and the run's own on the way."""

    both: list[Operation]
    only: list[Operation]
    returned: bool = False
    cut: bool = False


class GradientSearch:
    """Goes through the results of one module call, from the last in the order of the data to the first."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._a, self._b = search.a, search.b
        self._told = all(side.base.tells_flow for side in (search.a, search.b))
        self._scale = 1.0
        self._least_norm = 0.0
        self._known: dict[tuple[int, int], Verdict | None] = {}

    def first(self, *, least: float) -> Found | None:
        """Return what stands behind the last result whose gradient alone diverges; None for nothing.

        Last in the order of the data is first in backward: the gradients of all that was computed from the
        result agree. Errors below ``least`` are taken only where nothing else is found.
        """
        self._measure_returned()
        small: Found | None = None
        for op_a, op_b in reversed(self._search.pairs):
            if op_a.packet != op_b.packet or op_a.requires_grad != op_b.requires_grad:
                continue
            for number in range(min(len(op_a.outputs), len(op_b.outputs))):
                verdict = self._verdict(op_a, op_b, number)
                if verdict is None or verdict.status != "diverges" or not verdict.certain:
                    continue
                found = self._behind(op_a, op_b, number, verdict)
                if found is not None and verdict.error.rel >= least:
                    return found
                small = small or found
        return self._flow() or small

    def _measure_returned(self) -> None:
        """Take b's gradients over a's at what the module returned: the factor of the loss, if it is one."""
        for op_a, op_b in reversed(self._search.pairs):
            if op_a.packet != op_b.packet or not op_a.gradients or not op_b.gradients:
                continue
            try:
                norms = [_norm(self._a, op_a, 0), _norm(self._b, op_b, 0)]
            except Unreadable:
                return
            if all(math.isfinite(n) and n > 0 for n in norms):
                self._scale, self._least_norm = norms[1] / norms[0], norms[0] * NEGLIGIBLE
            return

    def _verdict(self, op_a: Operation, op_b: Operation, number: int) -> Verdict | None:
        """Judge the gradient of one result; None where neither run has one."""
        key = op_a.number, number
        if key not in self._known:
            self._known[key] = self._judged(op_a, op_b, number)
        return self._known[key]

    def _judged(self, op_a: Operation, op_b: Operation, number: int) -> Verdict | None:
        search = self._search
        arrives = [list(op.outputs)[number] in op.gradients for op in (op_a, op_b)]
        if not any(arrives):
            return None
        if not all(arrives):
            return self._of_one(op_a, op_b, number)
        dtypes = op_a.dtypes[number : number + 1], op_b.dtypes[number : number + 1]
        eps = eps_of(*dtypes, coarser=search.coarser)
        try:
            members = self._a.gradients(op_a, number), self._b.gradients(op_b, number)
            noise = [Error(search.noise, search.noise)]
            how = search.cut((list(op_a.outputs)[number], list(op_b.outputs)[number]))
            verdict = search.judge(members, eps, noise, how=how, scale=self._scale, rows=search.gradient_rows)
        except Unreadable as error:
            return unknown(str(error))
        if verdict.status == "agrees":
            search.noise = max(search.noise, verdict.error.rel)
        return verdict

    def _of_one(self, op_a: Operation, op_b: Operation, number: int) -> Verdict | None:
        ref_a, ref_b = list(op_a.outputs)[number], list(op_b.outputs)[number]
        hidden_a, hidden_b = _used_in_function(self._a, ref_a), _used_in_function(self._b, ref_b)
        side, op = (self._a, op_a) if ref_a in op_a.gradients else (self._b, op_b)
        if (hidden_b and not hidden_a) if side is self._a else (hidden_a and not hidden_b):
            return unknown("one run hands it to an autograd.Function, which may keep its gradient to itself")
        try:
            norm = _norm(side, op, number) / (1.0 if side is self._a else self._scale)
        except Unreadable as error:
            return unknown(str(error))
        return Verdict("diverges", error=Error(1.0, 1.0, diverges=True)) if norm > self._least_norm else None

    def _behind(self, op_a: Operation, op_b: Operation, number: int, verdict: Verdict) -> Found | None:
        """Say by which use of a result its gradient parts; None where it does so further on, or outside."""
        ref_a, ref_b = list(op_a.outputs)[number], list(op_b.outputs)[number]
        below_a = self._below(self._a, ref_a, self._search.partner_a)
        below_b = self._below(self._b, ref_b, self._search.partner_b)
        if (below_a.returned and not below_b.cut) or (below_b.returned and not below_a.cut):
            return None
        uses = {x.number: (x, self._search.partner_a[x.number]) for x in below_a.both}
        uses |= {x.number: (x, y) for y in below_b.both for x in (self._search.partner_b[y.number],)}
        if not all(self._agree(x, y) for x, y in uses.values()):
            return None
        at = op_a, op_b
        for x, y in uses.values():
            way = _way_of_use(x, y, ref_a, ref_b) if self._told else None
            if way == "flow" or (way == "function" and self._seen_below(uses.values())):
                return Found(way, x, y, verdict, at)
        if not (below_a.cut or below_b.cut or self._seen_below(uses.values())):
            return None
        only_a, only_b = (
            sorted(below.only, key=lambda op: op.packet != DETACH) for below in (below_a, below_b)
        )
        if only_a or only_b:
            return Found(
                "gradient", only_a[0] if only_a else None, only_b[0] if only_b else None, verdict,
                at, tuple(only_a[1:]), tuple(only_b[1:]),
            )  # fmt: skip
        alike = [found for found in self._search.healed if any(found.a is x for x, _ in uses.values())]
        return alike[0] if alike else Found("gradient", op_a, op_b, verdict, used_by=tuple(uses.values()))

    def _agree(self, op_a: Operation, op_b: Operation) -> bool:
        """Tell whether the gradients of all results agree, of those that have one in both runs."""
        if op_a.requires_grad != op_b.requires_grad:
            return True
        found = (self._verdict(op_a, op_b, n) for n in range(min(len(op_a.outputs), len(op_b.outputs))))
        return all(verdict is None or verdict.status == "agrees" for verdict in found)

    def _seen_below(self, uses: Iterable[tuple[Operation, Operation]]) -> bool:
        """Tell whether any gradient behind a result was recorded: else what parts may lie further on."""
        return any(
            verdict is not None and verdict.status == "agrees"
            for x, y in uses
            for number in range(min(len(x.outputs), len(y.outputs)))
            for verdict in (self._verdict(x, y, number),)
        )

    def _below(self, side: Side, reference: str, partners: dict[int, Operation]) -> _Below:
        """Return what a result was given to, past operations that one run alone has or that have no gradient.

        Operations inside a custom autograd function have none: autograd sees the function as a whole.
        """
        users = side.base.users
        below = _Below([], [])
        seen: set[int] = set()
        todo = list(users.get(reference, ()))
        while todo:
            op = todo.pop(0)
            if op.number in seen:
                continue
            seen.add(op.number)
            if op.packet == RETURN:
                below = below._replace(returned=True)
            elif op.number in partners:
                below.both.append(op)
                if op.grad_enabled is not False or op.gradients:
                    continue
            else:
                below.only.append(op)
                if op.packet == DETACH:
                    below = below._replace(cut=True)
                    continue
            todo += [user for ref in op.outputs for user in users.get(ref, ())]
        return below

    # --- where gradients flow in one run only --------------------------------------------------------

    def _flow(self) -> Found | None:
        """Return the first operation through which a gradient flows in one run and not in the other."""
        for op_a, op_b in self._search.pairs:
            if op_a.packet != op_b.packet:
                continue
            if op_a.requires_grad == op_b.requires_grad:
                if self._told and _other_from_outside(op_a, op_b):
                    return Found("flow", op_a, op_b, None, (op_a, op_b))
                continue
            if not any(
                self._verdict(op_a, op_b, n) for n in range(min(len(op_a.outputs), len(op_b.outputs)))
            ):
                continue  # what flows is nothing
            blocked, side, partners = (
                (op_a, self._a, self._search.partner_a)
                if op_b.requires_grad
                else (op_b, self._b, self._search.partner_b)
            )
            stop = next((m for m in _makers(side, blocked, partners) if m.packet == DETACH), None)
            others = (stop,) if stop else ()
            if blocked is op_a:
                return Found("flow", stop or op_a, None if stop else op_b, None, (op_a, op_b), others)
            return Found("flow", None if stop else op_a, stop or op_b, None, (op_a, op_b), (), others)
        return None


def _way_of_use(x: Operation, y: Operation, ref_a: str, ref_b: str) -> Literal["flow", "function"] | None:
    """Return in which way the use of a result decides about its gradient; None where autograd alone does."""
    if len(x.given) != len(y.given):
        return None
    for left, right in zip(x.given, y.given, strict=True):
        if left.reference != ref_a or right.reference != ref_b:
            continue
        if left.flows != right.flows or x.requires_grad != y.requires_grad:
            return "flow"
        if left.flows and x.grad_enabled is False and y.grad_enabled is False:
            return "function"
    return None


def _other_from_outside(op_a: Operation, op_b: Operation) -> bool:
    """Tell whether a gradient leaves the call through what an operation was given in one run only."""
    if len(op_a.given) != len(op_b.given):
        return False
    return any(
        left.flows != right.flows and not (left.reference.startswith("#") and right.reference.startswith("#"))
        for left, right in zip(op_a.given, op_b.given, strict=True)
    )


def _makers(side: Side, operation: Operation, partners: dict[int, Operation]) -> Iterator[Operation]:
    """Yield the run's own operations that made what an operation was given, nearest first."""
    todo: list[Given] = list(operation.given)
    while todo:
        maker = side.maker(todo.pop(0))
        if maker is not None and maker.number not in partners:
            yield maker
            todo += maker.given


def _used_in_function(side: Side, reference: str) -> bool:
    """Tell whether a result is used without gradients: by a wrapper's own functions, as DTensor's."""
    return any(user.grad_enabled is False for user in side.base.users.get(reference, ()))


def _norm(side: Side, operation: Operation, number: int) -> float:
    parts = one_of_copies(side.read(side.gradients(operation, number)))
    return math.sqrt(sum(float(np.vdot(part, part).real) for part in parts))
