"""Which sample of one run each sample of the other is."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field, replace

from tensortrace.diff.catalog import Part
from tensortrace.diff.extent import Extent
from tensortrace.diff.rows import Batch, Row


@dataclass(frozen=True)
class Pairing:
    """Rows of ``a`` with their counterparts in ``b``, in a's order.

    ``by_order`` tells that rows which did not match by content were paired by order instead.
    """

    pairs: tuple[tuple[Row, Row], ...]
    only_a: tuple[Row, ...] = ()
    only_b: tuple[Row, ...] = ()
    by_order: bool = False
    extents_a: dict[Part, Extent] = field(default_factory=dict)
    extents_b: dict[Part, Extent] = field(default_factory=dict)

    def of_answers(self) -> Pairing | None:
        """Return the pairing by the rows' second sequences; None where rows have none."""
        if any(extent.answers is None for of in (self.extents_a, self.extents_b) for extent in of.values()):
            return None
        return replace(
            self,
            pairs=tuple((x.of_answer(), y.of_answer()) for x, y in self.pairs),
            extents_a={part: extent.of_answers() for part, extent in self.extents_a.items()},
            extents_b={part: extent.of_answers() for part, extent in self.extents_b.items()},
        )

    def same_split(self) -> bool:
        """Tell whether every pair lies in the same microbatch on both sides and none is left over."""
        matched = all(x.part.number == y.part.number for x, y in self.pairs)
        return matched and not self.only_a and not self.only_b


def pair(a: Batch, b: Batch) -> Pairing:
    """Match rows by content as multisets; what is left over is paired by order if the counts agree.

    Rows that take part in the objective meet first; idle ones that are left over are no difference.
    """
    waiting: dict[bytes, deque[Row]] = defaultdict(deque)
    for row in sorted(b.rows, key=_is_idle):
        waiting[row.digest].append(row)
    pairs: list[tuple[Row, Row]] = []
    left_a: list[Row] = []
    for row in sorted(a.rows, key=_is_idle):
        if waiting[row.digest]:
            pairs.append((row, waiting[row.digest].popleft()))
        elif not row.idle:
            left_a.append(row)
    used = {id(found) for _, found in pairs}
    left_b = [row for row in b.rows if id(row) not in used and not row.idle]
    order = {id(row): n for n, row in enumerate(a.rows)}
    by_order = bool(left_a) and len(left_a) == len(left_b)
    if by_order:
        pairs += list(zip(left_a, left_b, strict=True))
        left_a, left_b = [], []
    pairs.sort(key=lambda p: order[id(p[0])])
    return Pairing(tuple(pairs), tuple(left_a), tuple(left_b), by_order, a.extents, b.extents)


def _is_idle(row: Row) -> bool:
    return row.idle


def duplicated_across_ranks(a: Batch, b: Batch) -> tuple[Row, ...]:
    """Return rows of ``b`` that several ranks saw more often than ``a`` has them at all."""
    often_a = Counter(row.digest for row in a.rows)
    ranks_b: dict[bytes, set[int]] = defaultdict(set)
    working = [row for row in b.rows if not row.idle]
    often_b = Counter(row.digest for row in working)
    for row in working:
        ranks_b[row.digest].add(row.part.rank)
    return tuple(
        row
        for row in working
        if len(ranks_b[row.digest]) > 1 and often_b[row.digest] > often_a.get(row.digest, 0)
    )
