"""Finds the first operation of a module call at which two runs part, in the order of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from tensortrace.diff.assemble import Assembled, NotComparable
from tensortrace.diff.catalog import Item
from tensortrace.diff.logical import Member
from tensortrace.diff.operations.calls import RETURN, Given, Operation
from tensortrace.diff.operations.meeting import Met
from tensortrace.diff.operations.sequences import align
from tensortrace.diff.operations.sides import Side, Unreadable
from tensortrace.diff.operations.verdicts import Verdict, eps_of, judge, unknown
from tensortrace.diff.tolerance import Error
from tensortrace.tracer.errors import TraceError

ByRows = Callable[[Sequence[Item], Sequence[Item]], Assembled]
"""Brings what the data cells of a and of b hold to one order of the batch's rows; may raise NotComparable."""

Way = Literal["value", "wiring", "gradient", "one-sided", "flow"]

SUBTRACTING = ("aten.add", "aten.sub", "aten.rsub", "aten.mean", "aten.sum", "aten.addmm", "aten.lerp")
"""Operations whose result may be smaller than what was summed: they are judged by their terms."""

SIGNIFICANT = 1e-3
"""An operation's error explains its module's only if it is not this much smaller."""


@dataclass(frozen=True)
class Found:
    """An operation at which the runs part; one of the sides is None where only the other has it.

    ``shows_at`` is the operation of both whose result tells, where that is another one.
    """

    way: Way
    a: Operation | None
    b: Operation | None
    verdict: Verdict | None = None
    shows_at: tuple[Operation, Operation] | None = None
    others_a: tuple[Operation, ...] = ()
    others_b: tuple[Operation, ...] = ()


class Search:
    """Compares one module call of two runs, operation by operation.

    ``coarser`` says that the runs' modules compute in different precisions, by choice. ``noise`` is the
    relative error with which the module's own inputs and parameters agree. ``rows`` and ``gradient_rows``
    bring what data cells hold to one order of rows.
    """

    def __init__(
        self,
        a: Side,
        b: Side,
        *,
        coarser: bool,
        noise: float = 0.0,
        microbatch: int | None = None,
        rows: ByRows | None = None,
        gradient_rows: ByRows | None = None,
    ) -> None:
        self.a = a
        self.b = b
        self.same_layout = len(a.ranks) == len(b.ranks)
        self._coarser = coarser
        self._ops_a, self._ops_b = a.base.operations, b.base.operations
        indices = align(self._ops_a, self._ops_b)
        self.pairs = [(self._ops_a[i], self._ops_b[j]) for i, j in indices]
        self._partner_a = {x.number: y for x, y in self.pairs if x.packet == y.packet}
        self._partner_b = {y.number: x for x, y in self.pairs if x.packet == y.packet}
        self._known: dict[tuple[str, str], Verdict] = {}
        self.unmet: list[tuple[Operation, str]] = []
        self._noise = noise
        self._microbatch = microbatch
        self._rows, self._gradient_rows = rows, gradient_rows

    def only(self) -> tuple[list[Operation], list[Operation]]:
        """Return the operations that only a has, and those that only b has."""
        left = [op for op in self._ops_a if op.number not in self._partner_a and op.packet != RETURN]
        right = [op for op in self._ops_b if op.number not in self._partner_b and op.packet != RETURN]
        return left, right

    def forward(self, *, least: float) -> Found | None:
        """Return the first operation whose result diverges although what it was given agrees.

        Errors below ``least`` are taken only where nothing larger is found.
        """
        small: Found | None = None
        shaped: Found | None = None
        for op_a, op_b in self.pairs:
            if op_a.packet == RETURN:
                continue
            given = self._given(op_a, op_b)
            for number in range(min(len(op_a.outputs), len(op_b.outputs))):
                verdict = self._output(op_a, op_b, number, given)
                if verdict.status == "unknown" and op_a.packet == op_b.packet:
                    self.unmet.append((op_b, verdict.why))
                    shaped = shaped or self._of_settings(op_a, op_b, given)
                if verdict.status != "diverges":
                    continue
                found = self._origin(op_a, op_b, given, verdict)
                if found is not None and verdict.error.rel >= least:
                    return found
                small = small or found
        return small or self._at_the_end() or shaped

    def _of_settings(self, op_a: Operation, op_b: Operation, given: Sequence[Verdict] | None) -> Found | None:
        """Return operations that make other shapes of what agrees, because they were told to.

        Legal programs do so too (a dimension kept or not), so that they are named only where nothing else is.
        """
        if given is None or not self.same_layout or op_a.settings == op_b.settings:
            return None
        agree = all(verdict.status == "agrees" for verdict in given)
        return Found("value", op_a, op_b) if agree else None

    def _at_the_end(self) -> Found | None:
        """Return operations that only one run has between what agrees and what the module returns."""
        ends = [(x, y) for x, y in self.pairs if x.packet == RETURN and y.packet == RETURN]
        for op_a, op_b in ends:
            given = self._given(op_a, op_b)
            for number, verdict in enumerate(given or ()):
                if verdict.status == "diverges":
                    return self._one_sided(op_a, op_b, number, verdict)
        return None

    def backward(self, scale: float | None, *, least: float) -> Found | None:
        """Return where gradients flow in one run only, else the last operation whose gradient diverges.

        Last in the order of the data is first in backward: the gradients of all that used the result agree.
        """
        flow = self._flow()
        if flow is not None:
            return flow
        agrees: dict[int, bool] = {}
        small: Found | None = None
        for op_a, op_b in reversed(self.pairs):
            if op_a.packet != op_b.packet:
                continue
            verdict = self._gradient(op_a, op_b, scale)
            if verdict is None:
                continue
            agrees[op_a.number] = verdict.status == "agrees"
            if verdict.status != "diverges" or not verdict.certain:
                continue
            users = [user for ref in op_a.outputs for user in self.a.base.users[ref]]
            if all(agrees.get(user.number, True) for user in users):
                found = self._of_gradient(op_a, op_b, verdict)
                if verdict.error.rel >= least:
                    return found
                small = small or found
        return small

    def gradient_scale(self) -> float | None:
        """Return b's gradients over a's at what the module returned: the factor of the loss, if it is one."""
        for op_a, op_b in reversed(self.pairs):
            if op_a.packet != op_b.packet or not op_a.gradients or not op_b.gradients:
                continue
            try:
                left = self.a.read(self.a.gradients(op_a, 0))
                right = self.b.read(self.b.gradients(op_b, 0))
            except Unreadable:
                return None
            norms = [math.sqrt(sum(float(np.vdot(x, x).real) for x in side)) for side in (left, right)]
            return norms[1] / norms[0] if all(math.isfinite(n) and n > 0 for n in norms) else None
        return None

    # --- values ----------------------------------------------------------------------------------

    def _output(
        self, op_a: Operation, op_b: Operation, number: int, given: Sequence[Verdict] | None
    ) -> Verdict:
        known = [v.error for v in given or () if v.status == "agrees"] or [Error(self._noise, self._noise)]
        eps = eps_of(
            op_a.dtypes[number : number + 1], op_b.dtypes[number : number + 1], coarser=self._coarser
        )
        terms = 0.0
        if op_a.packet.startswith(SUBTRACTING) and given:
            terms = max((v.error.norm for v in given if v.status == "agrees"), default=0.0)
        try:
            members = self.a.outputs(op_a, number), self.b.outputs(op_b, number)
            verdict = self._judge(members, eps, known, terms=terms, sums=not _elementwise(op_a))
        except Unreadable as error:
            verdict = unknown(str(error))
        keys = list(op_a.outputs)[number], list(op_b.outputs)[number]
        self._known[keys] = verdict
        if verdict.status == "agrees":
            self._noise = max(self._noise, verdict.error.rel)
        return verdict

    def _judge(
        self,
        members: tuple[list[Member], list[Member]],
        eps: float,
        inputs: Sequence[Error],
        *,
        terms: float = 0.0,
        sums: bool = True,
        scale: float | None = None,
        rows: ByRows | None = None,
    ) -> Verdict:
        """Judge a tensor that ranks of both runs hold; b's is divided by ``scale``. Raises Unreadable."""
        left, right = self.a.read(members[0]), self.b.read(members[1])
        if scale is not None and abs(scale - 1) > 1e-6:
            right = [np.asarray(part / scale) for part in right]
        bring = rows or self._rows

        def by_rows() -> Met | None:
            try:
                items = [
                    side.items(m, self._microbatch) for side, m in zip((self.a, self.b), members, strict=True)
                ]
                found = bring(items[0], items[1]) if bring else None
            except (NotComparable, TraceError, Unreadable, ValueError):
                return None
            return None if found is None else Met("row by row", found.a, found.b)

        return judge(left, right, eps=eps, inputs=inputs, terms=terms, sums=sums, rows=by_rows)

    def _given(self, op_a: Operation, op_b: Operation) -> list[Verdict] | None:
        """Return whether what two operations were given agrees, None where they were given other numbers."""
        if len(op_a.given) != len(op_b.given):
            return None
        return [self._one_given(op_a, op_b, number) for number in range(len(op_a.given))]

    def _one_given(self, op_a: Operation, op_b: Operation, number: int) -> Verdict:
        left, right = op_a.given[number], op_b.given[number]
        key = left.reference, right.reference
        if key not in self._known:
            eps = eps_of((left.dtype,), (right.dtype,), coarser=self._coarser)
            try:
                members = self.a.given(op_a, number), self.b.given(op_b, number)
                self._known[key] = self._judge(members, eps, [Error(self._noise, self._noise)])
            except Unreadable as error:
                self._known[key] = unknown(str(error))
        return self._known[key]

    def _origin(
        self, op_a: Operation, op_b: Operation, given: Sequence[Verdict] | None, verdict: Verdict
    ) -> Found | None:
        """Return what to say of two operations whose results part; None for what only passes it on."""
        if given is None:
            return None if op_a.packet != op_b.packet else Found("value", op_a, op_b, verdict)
        bad = [number for number, found in enumerate(given) if found.status != "agrees"]
        if not bad:
            if not verdict.certain and not self._same_way(op_a, given):
                self.unmet.append((op_b, "in no way of putting the ranks' parts together"))
                return None
            return self._of_dtype(op_a, op_b, verdict) or Found("value", op_a, op_b, verdict)
        diverging = [number for number in bad if given[number].status == "diverges"]
        if op_a.packet != op_b.packet or len(diverging) < len(bad):
            return None
        if all(self._rewired(op_a.given[number], op_b.given[number]) for number in diverging):
            number = diverging[0]
            made = self.a.maker(op_a.given[number]), self.b.maker(op_b.given[number])
            others = [(one,) if one else () for one in made]
            return Found("wiring", op_a, op_b, verdict, None, *others)
        return self._one_sided(op_a, op_b, diverging[0], verdict)

    def _rewired(self, left: Given, right: Given) -> bool:
        """Tell whether operations were given other tensors, which both runs have and in which they agree."""
        theirs, ours = self._same(self.a, left, self._partner_a), self._same(self.b, right, self._partner_b)
        if theirs is None or ours is None or theirs == right.reference:
            return False
        keys = (left.reference, theirs), (ours, right.reference)
        return all(key in self._known and self._known[key].status == "agrees" for key in keys)

    def _same(self, side: Side, given: Given, partners: dict[int, Operation]) -> str | None:
        """Return the other run's reference to a tensor, None where that run does not make it."""
        maker = side.maker(given)
        if maker is None:
            return given.reference if not given.reference.startswith("#") else None
        if maker.number not in partners:
            return None
        pair = self._pair_of(side, maker, given.reference, partners)
        return pair[1] if side is self.a else pair[0]

    def _same_way(self, op: Operation, given: Sequence[Verdict]) -> bool:
        """Tell whether a result must lie over ranks as what it was computed from: it has the same shape."""
        shapes = {entry.local_shape for entry in op.outputs.values()}
        return any(tensor.shape in shapes for tensor in op.given) and all(v.certain for v in given)

    def _one_sided(self, op_a: Operation, op_b: Operation, number: int, verdict: Verdict) -> Found | None:
        """Return operations that only one run has behind a tensor that diverges, if what they used agrees."""
        left, right = op_a.given[number], op_b.given[number]
        only_a, clean_a = self._behind(self.a, left, self._partner_a)
        only_b, clean_b = self._behind(self.b, right, self._partner_b)
        if not (only_a or only_b) or not (clean_a and clean_b):
            return None
        return Found(
            "one-sided", only_a[0] if only_a else None, only_b[0] if only_b else None, verdict, (op_a, op_b),
            tuple(only_a[1:]), tuple(only_b[1:]),
        )  # fmt: skip

    def _behind(
        self, side: Side, given: Given, partners: dict[int, Operation]
    ) -> tuple[list[Operation], bool]:
        """Return the run's own operations that lead to a tensor, and whether all they come from agrees."""
        found: dict[int, Operation] = {}
        clean = True
        todo = [given]
        while todo:
            tensor = todo.pop()
            maker = side.maker(tensor)
            if maker is None or maker.number in found:
                continue
            if maker.number in partners:
                verdict = self._known.get(self._pair_of(side, maker, tensor.reference, partners))
                clean = clean and verdict is not None and verdict.status == "agrees"
                continue
            found[maker.number] = maker
            todo += maker.given
        return [found[number] for number in sorted(found)], clean

    def _pair_of(
        self, side: Side, maker: Operation, reference: str, partners: dict[int, Operation]
    ) -> tuple[str, str]:
        """Return the references of a tensor in a and in b, where operations of both made it."""
        theirs, number = list(partners[maker.number].outputs), list(maker.outputs).index(reference)
        other = theirs[number] if number < len(theirs) else ""
        return (reference, other) if side is self.a else (other, reference)

    def _of_dtype(self, op_a: Operation, op_b: Operation, verdict: Verdict) -> Found | None:
        """Return the operation from which the runs compute in different dtypes, if that is what differs."""
        start = op_a, op_b
        for _ in range(len(self.pairs)):
            step = self._other_dtype(op_a, op_b)
            if step is None:
                break
            if isinstance(step, Found):
                return replace(step, verdict=verdict, shows_at=start)
            op_a, op_b = step
        if (op_a, op_b) == start:
            return None
        return Found("value", op_a, op_b, verdict, start)

    def _other_dtype(self, op_a: Operation, op_b: Operation) -> tuple[Operation, Operation] | Found | None:
        """Return the pair that made what two operations were given in different dtypes, None for none."""
        for left, right in zip(op_a.given, op_b.given, strict=False):
            if left.dtype == right.dtype:
                continue
            made_a, made_b = self.a.maker(left), self.b.maker(right)
            if made_a is not None and made_b is not None and self._partner_a.get(made_a.number) is made_b:
                return made_a, made_b
            only_a = made_a if made_a is not None and made_a.number not in self._partner_a else None
            only_b = made_b if made_b is not None and made_b.number not in self._partner_b else None
            if only_a or only_b:
                return Found("one-sided", only_a, only_b)
        return None

    # --- gradients -------------------------------------------------------------------------------

    def _gradient(self, op_a: Operation, op_b: Operation, scale: float | None) -> Verdict | None:
        """Judge the gradient of an operation's first result; None where neither run has one."""
        if not op_a.gradients and not op_b.gradients:
            return None
        if not op_a.gradients or not op_b.gradients:
            return unknown("only one run has a gradient")
        eps = eps_of(op_a.dtypes[:1], op_b.dtypes[:1], coarser=self._coarser)
        try:
            members = self.a.gradients(op_a, 0), self.b.gradients(op_b, 0)
            noise = [Error(self._noise, self._noise)]
            verdict = self._judge(members, eps, noise, scale=scale, rows=self._gradient_rows)
        except Unreadable as error:
            return unknown(str(error))
        if verdict.status == "agrees":
            self._noise = max(self._noise, verdict.error.rel)
        return verdict

    def _flow(self) -> Found | None:
        """Return the first operation through which a gradient can flow in one run and not in the other."""
        for op_a, op_b in self.pairs:
            if op_a.packet != op_b.packet or op_a.requires_grad == op_b.requires_grad:
                continue
            blocked, side, partners = (
                (op_a, self.a, self._partner_a) if op_b.requires_grad else (op_b, self.b, self._partner_b)
            )
            stop = next((m for m in self._makers(side, blocked, partners) if m.packet == "aten.detach"), None)
            others = (stop,) if stop else ()
            if blocked is op_a:
                return Found("flow", stop or op_a, None if stop else op_b, None, (op_a, op_b), others)
            return Found("flow", None if stop else op_a, stop or op_b, None, (op_a, op_b), (), others)
        return None

    def _makers(
        self, side: Side, operation: Operation, partners: dict[int, Operation]
    ) -> Iterator[Operation]:
        """Yield the run's own operations that made what an operation was given, nearest first."""
        todo = list(operation.given)
        while todo:
            maker = side.maker(todo.pop(0))
            if maker is not None and maker.number not in partners:
                yield maker
                todo += maker.given

    def _of_gradient(self, op_a: Operation, op_b: Operation, verdict: Verdict) -> Found:
        """Say which use of a result only one run has, if that is why its gradient differs."""
        left = [u for ref in op_a.outputs for u in self.a.base.users[ref]]
        right = [u for ref in op_b.outputs for u in self.b.base.users[ref]]
        only_a = [u for u in left if u.number not in self._partner_a]
        only_b = [u for u in right if u.number not in self._partner_b]
        if only_a or only_b:
            return Found(
                "gradient", only_a[0] if only_a else None, only_b[0] if only_b else None, verdict,
                (op_a, op_b), tuple(only_a[1:]), tuple(only_b[1:]),
            )  # fmt: skip
        return Found("gradient", op_a, op_b, verdict)


def _elementwise(operation: Operation) -> bool:
    """Tell whether the result has the shape of what was given, so that ranks have no sum to share."""
    shapes = {entry.local_shape for entry in operation.outputs.values()}
    multiplies = operation.packet.split(".")[-1] in ("mm", "bmm", "addmm", "matmul", "linear", "embedding")
    return not multiplies and any(given.shape in shapes for given in operation.given)
