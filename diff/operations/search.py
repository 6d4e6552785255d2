"""Finds the first operation of a module call at which two runs part, in the order of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Way = Literal["value", "wiring", "gradient", "one-sided", "flow", "function"]

SUBTRACTING = ("aten.add", "aten.sub", "aten.rsub", "aten.mean", "aten.sum", "aten.addmm", "aten.lerp")
"""Operations whose result may be smaller than what was summed: they are judged by their terms."""

LARGEST = ("aten.amax", "aten.max", "aten.topk")
"""Operations whose results over a part of a tensor may be put together by taking the largest."""

SIGNIFICANT = 1e-3
"""An operation's error explains its module's only if it is not this much smaller."""


@dataclass(frozen=True)
class Found:
    """An operation at which the runs part; one of the sides is None where only the other has it.

    ``shows_at`` is the operation of both whose result tells, where that is another one. ``used_by`` are those
    of both to which a result was given whose gradient parts.
    """

    way: Way
    a: Operation | None
    b: Operation | None
    verdict: Verdict | None = None
    shows_at: tuple[Operation, Operation] | None = None
    others_a: tuple[Operation, ...] = ()
    others_b: tuple[Operation, ...] = ()
    given: tuple[Given, Given] | None = None
    used_by: tuple[tuple[Operation, Operation], ...] = ()


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
        self.coarser = coarser
        self._ops_a, self._ops_b = a.base.operations, b.base.operations
        indices = align(self._ops_a, self._ops_b)
        self.pairs = [(self._ops_a[i], self._ops_b[j]) for i, j in indices]
        self.partner_a = {x.number: y for x, y in self.pairs if x.packet == y.packet}
        self.partner_b = {y.number: x for x, y in self.pairs if x.packet == y.packet}
        self._known: dict[tuple[str, str], Verdict] = {}
        self.unmet: list[tuple[Operation, str]] = []
        self.healed: list[Found] = []
        self.noise = noise
        self._microbatch = microbatch
        self._rows, self.gradient_rows = rows, gradient_rows

    def only(self) -> tuple[list[Operation], list[Operation]]:
        """Return the operations that only a has, and those that only b has."""
        left = [op for op in self._ops_a if op.number not in self.partner_a and op.packet != RETURN]
        right = [op for op in self._ops_b if op.number not in self.partner_b and op.packet != RETURN]
        return left, right

    def forward(self, *, least: float) -> Found | None:
        """Return the first operation whose result diverges although what it was given agrees.

        Errors below ``least`` are taken only where nothing larger is found, and none whose effect is gone
        further on: that is how programs differ that compute the same in another way.
        """
        parting: list[Found] = []
        shaped: Found | None = None
        for op_a, op_b in self.pairs:
            given = self._given(op_a, op_b)
            for number in range(min(len(op_a.outputs), len(op_b.outputs))):
                verdict = self._output(op_a, op_b, number, given)
                unmet = verdict.status == "unknown" or not verdict.certain
                if unmet and op_a.packet == op_b.packet:
                    shaped = shaped or self._of_shape(op_a, op_b, given)
                if verdict.status == "unknown" and op_a.packet == op_b.packet:
                    self.unmet.append((op_b, verdict.why))
                if verdict.status != "diverges":
                    continue
                found = self._origin(op_a, op_b, given, verdict)
                if found is not None:
                    parting.append(found)
        lasting = [found for found in parting if not self._heals(*(found.shows_at or (found.a, found.b)))]
        self.healed = [found for found in parting if found not in lasting]
        large = (found for found in lasting if found.verdict and found.verdict.error.rel >= least)
        found = next(large, None) or next(iter(lasting), None) or self._at_the_end()
        return found or (shaped if shaped and not self._heals(shaped.a, shaped.b) else None)

    def _heals(self, op_a: Operation | None, op_b: Operation | None) -> bool:
        """Tell whether all that was computed from results that part agrees again further on."""
        return all(
            self._heals_in(side, op) for side, op in ((self.a, op_a), (self.b, op_b)) if op is not None
        )

    def _heals_in(self, side: Side, operation: Operation) -> bool:
        this = 0 if side is self.a else 1
        agree = {pair[this] for pair, verdict in self._known.items() if verdict.status == "agrees"}
        users, todo, seen = side.base.users, [operation], {operation.number}
        while todo:
            op = todo.pop()
            used = [user for ref in op.outputs if ref not in agree for user in users.get(ref, ())]
            if any(user.packet == RETURN for user in used) or not any(ref in users for ref in op.outputs):
                return False  # it leaves the call, or nothing tells where it goes
            new = {user.number: user for user in used if user.number not in seen}
            seen |= new.keys()
            todo += new.values()
        return True

    def _of_shape(self, op_a: Operation, op_b: Operation, given: Sequence[Verdict] | None) -> Found | None:
        """Return operations that make other shapes, because they were told to or were given other tensors.

        Legal programs do so too (a dimension kept or not), so that they are named only where nothing else is.
        """
        if given is None:
            return None
        other = [number for number, verdict in enumerate(given) if verdict.status != "agrees"]
        if not other:
            told = op_a.settings != op_b.settings if self.same_layout else _told_otherwise(op_a, op_b)
            return Found("value", op_a, op_b) if told else None
        if not all(self._rewired(op_a.given[number], op_b.given[number]) for number in other):
            return None
        return self._of_wiring(op_a, op_b, other[0], None)

    def _of_wiring(self, op_a: Operation, op_b: Operation, number: int, verdict: Verdict | None) -> Found:
        left, right = op_a.given[number], op_b.given[number]
        made: list[tuple[Operation, ...]] = [
            (one,) if one else () for one in (self.a.maker(left), self.b.maker(right))
        ]
        return Found("wiring", op_a, op_b, verdict, others_a=made[0], others_b=made[1], given=(left, right))

    def _at_the_end(self) -> Found | None:
        """Return operations that only one run has between what agrees and what the module returns."""
        ends = [(x, y) for x, y in self.pairs if x.packet == RETURN and y.packet == RETURN]
        for op_a, op_b in ends:
            given = self._given(op_a, op_b)
            for number, verdict in enumerate(given or ()):
                if verdict.status == "diverges":
                    return self._one_sided(op_a, op_b, number, verdict)
        return None

    # --- values ----------------------------------------------------------------------------------

    def _output(
        self, op_a: Operation, op_b: Operation, number: int, given: Sequence[Verdict] | None
    ) -> Verdict:
        known = [v.error for v in given or () if v.status == "agrees"] or [Error(self.noise, self.noise)]
        eps = eps_of(op_a.dtypes[number : number + 1], op_b.dtypes[number : number + 1], coarser=self.coarser)
        terms = 0.0
        if op_a.packet.startswith(SUBTRACTING) and given:
            terms = max((v.error.norm for v in given if v.status == "agrees"), default=0.0)
        try:
            members = self.a.outputs(op_a, number), self.b.outputs(op_b, number)
            most = op_a.packet in LARGEST
            verdict = self.judge(
                members, eps, known, terms=terms, sums=not (most or _elementwise(op_a)), most=most
            )
        except Unreadable as error:
            verdict = unknown(str(error))
        keys = list(op_a.outputs)[number], list(op_b.outputs)[number]
        self._known[keys] = verdict
        if verdict.status == "agrees":
            self.noise = max(self.noise, verdict.error.rel)
        return verdict

    def judge(
        self,
        members: tuple[list[Member], list[Member]],
        eps: float,
        inputs: Sequence[Error],
        *,
        terms: float = 0.0,
        sums: bool = True,
        most: bool = False,
        how: str = "",
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

        return judge(
            left, right, eps=eps, inputs=inputs, terms=terms, sums=sums, most=most, how=how, rows=by_rows
        )

    def cut(self, pair: tuple[str, str]) -> str:
        """Return how a tensor is known to be cut over ranks, ``""`` where it is not, or nothing tells."""
        verdict = self._known.get(pair)
        agrees = verdict is not None and verdict.status == "agrees"
        return verdict.how if agrees and verdict and verdict.how.startswith("cut") else ""

    def _given(self, op_a: Operation, op_b: Operation) -> list[Verdict] | None:
        """Return whether what two operations were given agrees, None where they were given other numbers."""
        if len(op_a.given) != len(op_b.given):
            return None
        return [self._one_given(op_a, op_b, number) for number in range(len(op_a.given))]

    def _one_given(self, op_a: Operation, op_b: Operation, number: int) -> Verdict:
        left, right = op_a.given[number], op_b.given[number]
        key = left.reference, right.reference
        if key not in self._known:
            eps = eps_of((left.dtype,), (right.dtype,), coarser=self.coarser)
            try:
                members = self.a.given(op_a, number), self.b.given(op_b, number)
                self._known[key] = self.judge(members, eps, [Error(self.noise, self.noise)])
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
            alone = self.a.of_one_rank(op_a), self.b.of_one_rank(op_b)
            if any(alone):
                return Found("one-sided", *alone, verdict, (op_a, op_b))
            if not verdict.certain and not self._same_way(op_a, given):
                self.unmet.append((op_b, "in no way of putting the ranks' parts together"))
                return None
            return self._of_dtype(op_a, op_b, verdict) or Found("value", op_a, op_b, verdict)
        diverging = [number for number in bad if given[number].status == "diverges"]
        if op_a.packet != op_b.packet or len(diverging) < len(bad):
            return None
        if all(self._rewired(op_a.given[number], op_b.given[number]) for number in diverging):
            return self._of_wiring(op_a, op_b, diverging[0], verdict)
        return self._one_sided(op_a, op_b, diverging[0], verdict)

    def _rewired(self, left: Given, right: Given) -> bool:
        """Tell whether operations were given other tensors, which both runs have and in which they agree."""
        theirs, ours = self._same(self.a, left), self._same(self.b, right)
        return theirs is not None and ours is not None and theirs != right.reference

    def _same(self, side: Side, given: Given) -> str | None:
        """Return the other run's reference to a tensor that agrees, None where that run has none."""
        maker = side.maker(given)
        partners = self.partner_a if side is self.a else self.partner_b
        if maker is None:
            return self._same_from_outside(side, given)
        if maker.number not in partners:
            return None
        pair = self._pair_of(side, maker, given.reference, partners)
        agree = pair in self._known and self._known[pair].status == "agrees"
        return (pair[1] if side is self.a else pair[0]) if agree else None

    def _same_from_outside(self, side: Side, given: Given) -> str | None:
        """Return the other run's reference to what came from outside of the call."""
        this, that = (0, 1) if side is self.a else (1, 0)
        for pair, verdict in self._known.items():
            if (
                pair[this] == given.reference
                and not pair[that].startswith("#")
                and verdict.status == "agrees"
            ):
                return pair[that]
        digest = side.base.tensors[given.reference].digest if given.reference in side.base.tensors else None
        other = (self.b if side is self.a else self.a).base.tensors
        alike = (ref for ref, entry in other.items() if entry.digest == digest and not ref.startswith("#"))
        return next(alike, None)

    def _same_way(self, op: Operation, given: Sequence[Verdict]) -> bool:
        """Tell whether a result must lie over ranks as what it was computed from: it has the same shape."""
        shapes = {entry.local_shape for entry in op.outputs.values()}
        return any(tensor.shape in shapes for tensor in op.given) and all(v.certain for v in given)

    def _one_sided(self, op_a: Operation, op_b: Operation, number: int, verdict: Verdict) -> Found | None:
        """Return operations that only one run has behind a tensor that diverges, if what they used agrees."""
        left, right = op_a.given[number], op_b.given[number]
        only_a, clean_a = self._behind(self.a, left, self.partner_a)
        only_b, clean_b = self._behind(self.b, right, self.partner_b)
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
            if maker is None:
                todo += side.base.made_from(tensor)
                continue
            if maker.number in found:
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
            if made_a is not None and made_b is not None and self.partner_a.get(made_a.number) is made_b:
                return made_a, made_b
            only_a = made_a if made_a is not None and made_a.number not in self.partner_a else None
            only_b = made_b if made_b is not None and made_b.number not in self.partner_b else None
            if only_a or only_b:
                return Found("one-sided", only_a, only_b)
        return None


def _told_otherwise(op_a: Operation, op_b: Operation) -> bool:
    """Tell whether operations are told to compute something else, which no other layout makes necessary.

    A layout changes a size in one place; which dimensions are meant it leaves as they are.
    """
    for name, left in op_a.settings.items():
        right = op_b.settings.get(name, left)
        if left == right:
            continue
        if name.startswith("dim"):
            return True
        sizes = left.split(","), right.split(",")
        if left.startswith("[") and right.startswith("["):
            places = sum(x.strip(" []") != y.strip(" []") for x, y in zip(*sizes, strict=False))
            if len(sizes[0]) != len(sizes[1]) or places > 1:
                return True
    return False


def _elementwise(operation: Operation) -> bool:
    """Tell whether the result has the shape of what was given, so that ranks have no sum to share."""
    shapes = {entry.local_shape for entry in operation.outputs.values()}
    multiplies = operation.packet.split(".")[-1] in ("mm", "bmm", "addmm", "matmul", "linear", "embedding")
    return not multiplies and any(given.shape in shapes for given in operation.given)
