"""Right values of something else: of another moment, another parameter, an earlier step; another decay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tensortrace.diff.catalog import Item, Part, Slot, StepView
from tensortrace.diff.causes.case import Case, Proposal, told
from tensortrace.diff.gradients import CLIP
from tensortrace.diff.plan.comparison import replica
from tensortrace.tracer.types import INIT_STEP, Kind

_STALE = frozenset(Kind) - {Kind.SCHEDULE, Kind.LOSS, Kind.PARAM, Kind.OPTIMIZER_STATE}


def swapped_state(case: Case) -> Iterator[Proposal]:
    """Propose that a moment is another moment of its parameter, or the moment of another parameter."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.OPTIMIZER_STATE or loaded is None or not loaded.a.ndim or not loaded.b.any():
        return
    for other, items in case.pair.a.find(Kind.OPTIMIZER_STATE):
        item = replica(items)
        if other == slot or item.entry.local_shape != loaded.shape:
            continue
        if other.name != slot.name and other.slot != slot.slot:
            continue
        what = f"{other.slot} of {other.name}"
        text = f"{slot.slot} of {slot.name} is the reference's {what}"
        yield Proposal("optimizer.swapped_state", text, [item.read()], [loaded.b], [loaded.a], None, what)


def weight_decay_mode(case: Case) -> Sequence[Proposal]:
    """Propose that decay is added to the gradient where it should shrink the weight, as the settings say."""
    slot = case.origin.node.slot
    if slot.kind != Kind.SCHEDULE or slot.slot != "decoupled_weight_decay" or not case.arrays:
        return ()
    a, b = case.arrays[0]
    words = [("added to the gradient", "taken off the weight")[bool(x)] for x in (b, a)]
    text = f"weight decay is {words[0]} in b, {words[1]} in a"
    return (Proposal("optimizer.weight_decay_mode", text, [b], [b], [a], float(b), slot.slot),)


def stale(case: Case) -> Sequence[Proposal]:
    """Propose that b holds, bit by bit, what it held at an earlier microbatch or step, where a moved on."""
    slot, step = case.origin.node.slot, case.origin.node.step
    if slot.kind not in _STALE or case.origin.assembled is None or step == INIT_STEP or slot.name == CLIP:
        return ()  # what is asked of a clip is a setting, not a value that moves on
    now_b = _digests(case.pair.b, slot, case.origin.node.microbatch)
    now_a = _digests(case.pair.a, slot, case.origin.node.microbatch)
    if not now_b or not case.origin.assembled.b.any():
        return ()
    for words, then_a, then_b in _earlier(case, slot):
        same = [key for key, digest in now_b.items() if then_b.get(key[0], {}).get(key[1]) == digest]
        moved = any(then_a.get(k[0], {}).get(k[1]) not in (None, d) for k, d in now_a.items())
        if len(same) == len(now_b) and moved:
            text = f"{slot.kind} {slot.name} {slot.slot} of b is, bit by bit, what it was {words}"
            return (told("value.stale", text, len(same), "parts that did not change"),)
    return ()


_ByPart = Mapping[int, Mapping[int | None, str]]


def _earlier(case: Case, slot: Slot) -> Iterator[tuple[str, _ByPart, _ByPart]]:
    """Yield (when, a's digests, b's) of earlier steps, the latest first."""
    step = case.origin.node.step
    before = [views for views in case.views() if views[0].step < step]
    for view_a, view_b in reversed(before):
        yield f"in step {view_a.step}", _nested(view_a, slot), _nested(view_b, slot)


def _digests(view: StepView, slot: Slot, microbatch: int | None) -> dict[tuple[int, int | None], str]:
    return {
        (item.cell, _number(item)): item.entry.digest
        for item in view.items.get(slot, ())
        if microbatch is None or item.part is None or item.part.number == microbatch
    }


def _nested(view: StepView, slot: Slot) -> _ByPart:
    found: dict[int, dict[int | None, str]] = {}
    for item in view.items.get(slot, ()):
        found.setdefault(item.cell, {})[_number(item)] = item.entry.digest
    return found


def _number(item: Item) -> int | None:
    part: Part | None = item.part
    return part.number if part else item.entry.microbatch
