"""Finds how tensors without a layout belong together, by their shapes and values in the other run.

The ranks of a cell may hold pieces of a tensor that nothing declared: a plain tensor inside a tensor-parallel
region, a gradient that is yet to be reduced. Shapes tell along which dimension pieces join; values tell a sum
from copies. What is found at a boundary the first time stands for the rest of the run, so that a later error
is not taken for another layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from tensortrace.diff.assemble import NotComparable, by_rows
from tensortrace.diff.catalog import EVIDENCE_KINDS, Item, Slot, StepView
from tensortrace.diff.compare import is_exact
from tensortrace.diff.dimensions import label_dims
from tensortrace.diff.extent import Extent
from tensortrace.diff.logical import CELL_KINDS, Member, Merged, Unlabelled, Unplaceable, merged_entry
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.plan.pair import StepPair
from tensortrace.tracer.geometry import Held, Region, full_region
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Kind

FITS = 0.05
"""Relative residual below which values count as the same tensor: far above round-off, far below a mistake."""


class Rule(NamedTuple):
    """How the tensors of a cell's ranks make one: joined along ``dim``, added up, or copies that disagree."""

    how: Literal["joined", "sum", "copies"]
    dim: int = 0

    def __str__(self) -> str:
        return f"joined along dimension {self.dim}" if self.how == "joined" else self.how


Place = tuple[Kind, str, str]
"""What a rule is for: kind, name and slot."""


@dataclass
class Rules:
    """What was found about one run so far."""

    known: dict[Place, Rule] = field(default_factory=dict)

    def notes(self, side: str) -> Iterator[str]:
        """Yield a line for each kind of rule that was inferred."""
        for how, text in (("joined", "pieces of one tensor"), ("sum", "parts of a sum")):
            places = [place for place, rule in self.known.items() if rule.how == how]
            if places:
                more = f" and {len(places) - 3} more" if len(places) > 3 else ""
                names = ", ".join(f"{kind} {name} {slot}" for kind, name, slot in places[:3])
                yield f"{side}: no layout was declared for {names}{more}: taken as {text}, by shape and value"


def resolve(pair: StepPair, rules_a: Rules, rules_b: Rules) -> StepPair:
    """Return the pair with unlabelled tensors put together where shapes or the other run tell how."""
    slots_a, slots_b = _open(pair.a), _open(pair.b)
    by_rank = _held_by_rank(pair)
    if not (slots_a or slots_b or by_rank[0]):
        return pair
    new_a, new_b = (
        dict(pair.a.items) | by_rank[0],
        dict(pair.b.items) | by_rank[1],
    )
    for slot in slots_a & slots_b:
        _same_way(slot, pair, rules_a, rules_b)
    flipped = _flipped(pair.pairing)
    for slot in slots_b:
        new_b[slot] = _resolved(slot, pair.b.items[slot], pair.a.items.get(slot, ()), pair.pairing, rules_b)
    for slot in slots_a:
        new_a[slot] = _resolved(slot, pair.a.items[slot], pair.b.items.get(slot, ()), flipped, rules_a)
    return StepPair(replace(pair.a, items=new_a), replace(pair.b, items=new_b), pair.before_a, pair.before_b)


Slots = dict[Slot, tuple[Item, ...]]


def _held_by_rank(pair: StepPair) -> tuple[Slots, Slots]:
    """Return what every rank holds another tensor of, in both runs alike, as one tensor of all ranks' parts.

    Neither run knows a layout for it, and both have the same one: so ranks are compared with ranks.
    """
    found: tuple[Slots, Slots] = ({}, {})
    window = [s for s in pair.a.items if s.kind not in CELL_KINDS | EVIDENCE_KINDS]
    _join_ranks(pair, [s for s in window if _differ(pair.a.items[s])], found)
    names = {slot.name for slot in found[0]}
    local = [s for s in pair.a.items if s.kind == Kind.LOCAL_GRAD and s.name in names]
    _join_ranks(pair, local, found)
    return found


def _join_ranks(pair: StepPair, slots: Iterable[Slot], found: tuple[Slots, Slots]) -> None:
    for slot in slots:
        a, b = pair.a.items[slot], pair.b.items.get(slot, ())
        alike = [_held(item) for item in a] == [_held(item) for item in b]
        if alike and _differ(b) and len({i.entry.local_shape[1:] for i in a}) == 1 and a[0].entry.local_shape:
            for side, items in zip(found, (a, b), strict=True):
                side[slot] = tuple(_joined_ranks(items))


def _held(item: Item) -> tuple[object, ...]:
    return item.ranks, item.entry.local_shape, item.entry.microbatch


def _joined_ranks(items: Sequence[Item]) -> Iterator[Item]:
    """Yield what all ranks hold of each microbatch, or of the window, one rank's part after the other."""
    groups: dict[int | None, list[Item]] = defaultdict(list)
    for item in items:
        groups[item.entry.microbatch].append(item)
    for group in groups.values():
        members = [Member(i.source, i.entry) for i in group if isinstance(i.source, RankTrace)]
        yield _joined(group[0], members, 0)


def _differ(items: Sequence[Item]) -> bool:
    """Tell whether several ranks hold tensors of no known layout that are not copies."""
    plain = all(i.entry.shard is None and isinstance(i.source, RankTrace) for i in items)
    return plain and len(items) > 1 and len({item.entry.digest for item in items}) > 1


def _open(view: StepView) -> set[Slot]:
    return {
        slot for slot, items in view.items.items() if any(isinstance(i.source, Unlabelled) for i in items)
    }


def _flipped(pairing: Pairing) -> Pairing:
    return replace(
        pairing, pairs=tuple((y, x) for x, y in pairing.pairs), only_a=pairing.only_b, only_b=pairing.only_a,
        extents_a=pairing.extents_b, extents_b=pairing.extents_a,
    )  # fmt: skip


def _same_way(slot: Slot, pair: StepPair, rules_a: Rules, rules_b: Rules) -> None:
    """Where both runs lack a layout and shapes are equal, any one way of joining compares all ranks."""
    place = (slot.kind, slot.name, slot.slot)
    shapes = {_shapes(item) for view in (pair.a, pair.b) for item in view.items[slot]}
    if len(shapes) == 1 and place not in rules_a.known and place not in rules_b.known:
        last = len(next(iter(shapes))[0]) - 1
        if last >= 1:
            rules_a.known[place] = rules_b.known[place] = Rule("joined", last)


def _shapes(item: Item) -> tuple[tuple[int, ...], ...]:
    return tuple(entry.local_shape for _, entry in item.members)


def _resolved(
    slot: Slot, items: Sequence[Item], like: Sequence[Item], pairing: Pairing, rules: Rules
) -> tuple[Item, ...]:
    place = (slot.kind, slot.name, slot.slot)
    rule = rules.known.get(place)
    if rule is None:
        rule = _find(slot, items, like, pairing)
        if rule is not None:
            rules.known[place] = rule
    return tuple(items) if rule is None else tuple(_apply(rule, item) for item in items)


def _find(slot: Slot, items: Sequence[Item], like: Sequence[Item], pairing: Pairing) -> Rule | None:
    """Return the rule whose outcome has the shape, and of several the values, of the other run's tensor."""
    if not like or any(isinstance(i.source, Unlabelled) for i in like):
        return None
    fitting = [rule for rule in _candidates(items) if _fits_shape(slot, rule, items, like, pairing)]
    ids = all(is_exact(item.entry.dtype) for item in items)  # in another order they are other rows' ids
    if len(fitting) == 1 and fitting[0].how == "joined" and not ids:
        return fitting[0]
    scored = [(_misfit(slot, rule, items, like, pairing), n, rule) for n, rule in enumerate(fitting)]
    misfit, _, best = min(scored, default=(np.inf, 0, None))
    if best is None or misfit <= FITS or (best.how == "joined" and not ids):
        return best
    return None if ids else Rule("copies")  # of the right shape, and no sum: they should have been equal


def _candidates(items: Sequence[Item]) -> list[Rule]:
    rules = [Rule("sum")]
    open_items = [item for item in items if isinstance(item.source, Unlabelled)]
    if any(len(set(_shapes(item))) > 1 for item in open_items):
        rules = []
    return rules + [Rule("joined", dim) for dim in range(min(len(s) for i in open_items for s in _shapes(i)))]


def _fits_shape(
    slot: Slot, rule: Rule, items: Sequence[Item], like: Sequence[Item], pairing: Pairing
) -> bool:
    try:
        shapes = [(_apply(rule, item).entry.local_shape, item.part) for item in items]
    except Unplaceable:
        return False
    others = [(item.entry.local_shape, item.part) for item in like]
    if slot.phase == "window" or (slot.kind == Kind.LOSS and not shapes[0][0]):
        return len({shape for shape, _ in (*shapes, *others)}) == 1
    cases: list[tuple[tuple[int, ...], Extent]] = []
    for found, extents in ((others, pairing.extents_a), (shapes, pairing.extents_b)):
        cases += [(shape, extents[part]) for shape, part in found if part in extents]
    if not cases:
        return False
    ways = [cases, [(shape, e.of_answers()) for shape, e in cases if e.answers is not None]]
    ways += [[(shape, e.one_fewer()) for shape, e in way] for way in ways]
    return any(label_dims(way) is not None for way in ways if len(way) == len(cases))


def _misfit(slot: Slot, rule: Rule, items: Sequence[Item], like: Sequence[Item], pairing: Pairing) -> float:
    """Return the relative residual that is left after the best factor between both runs' tensors."""
    ours = [_apply(rule, item) for item in items]
    try:
        if slot.phase == "window" or (slot.kind == Kind.LOSS and slot.slot in ("sum", "count")):
            a, b = (sum(np.asarray(i.read(), np.float64) for i in side) for side in (like, ours))
        else:
            a, b, *_ = by_rows(like, ours, pairing, additive=slot.kind == Kind.ACTIVATION_GRAD)
    except (NotComparable, Unplaceable):
        return np.inf
    a, b = np.ravel(np.asarray(a, np.float64)), np.ravel(np.asarray(b, np.float64))
    if a.shape != b.shape or not np.isfinite(a).all() or not np.isfinite(b).all():
        return np.inf
    scalar = a.size == 1 or slot.kind == Kind.ACTIVATION
    factor = 1.0 if scalar else float(np.vdot(a, b)) / (float(np.vdot(a, a)) or 1.0)
    size = float(np.linalg.norm(a * factor))
    return float(np.linalg.norm(b - a * factor)) / size if size else np.inf


def _apply(rule: Rule, item: Item) -> Item:
    """Return the item put together by the rule. Raises Unplaceable where its shapes do not allow that."""
    if not isinstance(item.source, Unlabelled):
        return item
    return _APPLY[rule.how](item, item.source.members, rule.dim)


def _joined(item: Item, members: Sequence[Member], dim: int) -> Item:
    shapes = [member.entry.local_shape for member in members]
    rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
    if len(rest) > 1:
        raise Unplaceable(f"local shapes {shapes} do not join along dimension {dim}")
    whole = (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])
    parts, start = [], 0
    for member, shape in zip(members, shapes, strict=True):
        dims = list(full_region(whole).dims)
        dims[dim] = ((start, start + shape[dim]),) if shape[dim] else ()
        parts.append(Held(member.rank, Region(whole, tuple(dims)), shape))
        start += shape[dim]
    return _item(item, Merged(tuple(members), tuple(parts)), whole)


def _summed(item: Item, members: Sequence[Member], dim: int) -> Item:
    shape, count = members[0].entry.local_shape, len(members)
    parts = tuple(
        Held(member.rank, full_region(shape), shape, (number,), (count,), ("sum",))
        for number, member in enumerate(members)
    )
    return _item(item, Merged(tuple(members), parts), shape)


def _copied(item: Item, members: Sequence[Member], dim: int) -> Item:
    """Take the lowest rank's for the tensor and the others for copies that differ from it."""
    shape = members[0].entry.local_shape
    odd = tuple(m.rank for m in members if m.entry.digest != members[0].entry.digest)
    merged = Merged(tuple(members), (Held(members[0].rank, full_region(shape), shape),), odd=odd)
    return _item(item, merged, shape)


_APPLY: dict[str, Callable[[Item, Sequence[Member], int], Item]] = {
    "joined": _joined,
    "sum": _summed,
    "copies": _copied,
}


def _item(item: Item, merged: Merged, shape: tuple[int, ...]) -> Item:
    return item._replace(source=merged, entry=merged_entry(merged, shape))
