"""Gradients that ranks or microbatches do not add up to: not reduced, reduced twice, left over, dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tensortrace.diff.catalog import Item
from tensortrace.diff.causes.case import Case, Proposal, told
from tensortrace.diff.causes.holders import local_of_copies
from tensortrace.diff.causes.tied import uses_of
from tensortrace.diff.gradients import CLIP
from tensortrace.diff.holders import odd_of
from tensortrace.diff.kinds import RUNGS
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.plan.comparison import Comparison, replica
from tensortrace.diff.replicas import values_of
from tensortrace.tracer.types import INIT_STEP, Kind


def not_zeroed(case: Case) -> Sequence[Proposal]:
    """Propose that ``.grad`` still holds what the previous step consumed when the window opened.

    Where the reference holds something too, programs leave it on purpose: they write new ones over it.
    """
    slot = case.origin.node.slot
    if slot.kind != Kind.LOCAL_GRAD or slot.slot != "start":
        return ()
    before = {
        s: i for s, i in case.pair.before_b.items.items() if s.kind == Kind.CLIPPED_GRAD and s.slot == "grad"
    }
    mistaken, actual, reference = [], [], []
    for outcome in case.siblings:
        consumed = before.get(outcome.node.slot._replace(kind=Kind.CLIPPED_GRAD, slot="grad"))
        loaded = outcome.assembled
        left = [i for i in consumed or () if i.entry.microbatch is None]
        if loaded is None or not left or np.any(loaded.a):
            continue
        mistaken.append(replica(left).read())
        actual.append(loaded.b)
        reference.append(loaded.a)
    if not mistaken:
        return ()
    text = (
        f"zero_grad is missing: when the window opened, .grad of {len(mistaken)} parameters still held the "
        "gradient that the previous step consumed"
    )
    return (
        Proposal("grad.not_zeroed", text, mistaken, actual, reference, 1.0, "the previous step's gradient"),
    )


def missing(case: Case) -> Sequence[Proposal]:
    """Propose that gradients are not reduced across ranks: each rank goes on with its own."""
    if case.origin.node.slot.kind not in RUNGS or case.origin.node.slot.name == CLIP:
        return ()
    names = [o.node.slot.name for o in case.siblings if _unlike(o)]
    gradients = case.pair.gradients_b
    held = [(n, copies, local_of_copies(gradients, n, copies)) for n in names if (copies := _copies(n, case))]
    samples = [
        (x, local[x.source.rank]) for _, copies, local in held for x in copies if x.source.rank in local
    ]
    reference = [case.pair.gradients_a.unclipped(n) for n, copies, _ in held for _ in copies]
    if not samples or len(samples) != len(reference) or any(r is None for r in reference):
        return ()
    mine = [local.astype(np.float64) for _, local in samples]
    actual = [item.read().astype(np.float64) for item, _ in samples]
    groups = [item.source.rank if gradients.shared else 0 for item, _ in samples]
    factors = {g: _factor(*_of_group(g, groups, mine, actual)) for g in set(groups)}
    factor = float(np.median(list(factors.values())))
    if not factor:
        return ()
    tied = all(_is_tied(n, case) for n in names)
    text = (
        f"{_shown(names)} is {'one parameter of' if tied else 'not reduced across'} ranks in b: "
        f"each of its {len({i.source.rank for i, _ in samples})} ranks goes on with its own gradient"
        + (f", times {factor:.6g}" if abs(factor - 1) > 1e-4 else "")
    )
    whole = [r.read() for r in reference if r]
    floor = case.gradient_floor([item for item, _ in samples])
    words = "each rank's own gradient"
    mistaken = [x * factors[g] for x, g in zip(mine, groups, strict=True)]
    code = "tied.not_summed" if tied else "reduction.missing"
    return (Proposal(code, text, mistaken, actual, whole, factor, words, floor=floor),)


def _of_group(
    group: int, groups: Sequence[int], *sides: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], ...]:
    return tuple([value for value, g in zip(side, groups, strict=True) if g == group] for side in sides)


def _is_tied(name: str, case: Case) -> bool:
    """Tell whether a uses a parameter under several names, of which each rank of b holds its own."""
    if len(uses_of(case, name)) < 2:
        return False
    items = case.pair.gradients_b.local_items(name)
    return len({item.cell for item in items}) == 1


def _unlike(outcome: Outcome) -> bool:
    """Tell whether ranks disagree at an outcome, or only one run has it."""
    return outcome.disagrees is not None or not isinstance(outcome.comparison, Comparison)


def _copies(name: str, case: Case) -> tuple[Item, ...]:
    """Return what each rank of b holds at the origin's rung; where it is not there, before clipping."""
    gradients, kind = case.pair.gradients_b, case.origin.node.slot.kind
    rung = gradients.rung_copies(kind, name) if kind != Kind.CLIPPED_GRAD else ()
    return rung or gradients.unclipped_copies(name)


def double(case: Case) -> Sequence[Proposal]:
    """Propose that gradients which were reduced already are reduced again."""
    if case.origin.node.slot.kind != Kind.REDUCED_GRAD:
        return ()
    outcomes = [o for o in case.siblings if o.assembled is not None]
    factors, events = [], 0
    for outcome in outcomes:
        again = _last_reductions(case, outcome.node.slot.name)
        if len(again) < 2:
            return ()
        first, last = (again[n].read().astype(np.float64) for n in (0, -1))
        size = float(np.vdot(first, first))
        factors.append(float(np.vdot(first, last)) / size if size else 1.0)
        events = len(again)
    if not outcomes:
        return ()
    left, right = (list(side) for side in zip(*case.arrays, strict=True))
    mistaken = [x * f for x, f in zip(left, factors, strict=True)]
    factor = float(np.median(factors))
    equals = f"the world size ({case.world_b})" if abs(factor / case.world_b - 1) < 1e-3 else None
    text = (
        f"{_shown([o.node.slot.name for o in outcomes])} is reduced {events} times in b after one backward; "
        f"what came after the first makes it {factor:.6g} times as large"
    )
    return (Proposal("reduction.double", text, mistaken, right, left, factor, equals),)


def _last_reductions(case: Case, name: str) -> list[Item]:
    """Return b's reductions of a gradient after the window's last backward, on its lowest rank."""
    events = case.pair.gradients_b.rung_events(Kind.REDUCED_GRAD, name)
    last = max((i.entry.microbatch or 0 for i in events), default=0)
    mine = [i for i in events if i.source.rank == events[0].source.rank]
    return [i for i in mine if (i.entry.microbatch or 0) == last]


def early(case: Case) -> Sequence[Proposal]:
    """Propose that b reduces before the window's last backward, so that ranks keep the rest."""
    slot = case.origin.node.slot
    if slot.kind not in RUNGS or slot.name == CLIP or case.microbatches_b < 2:
        return ()
    gradients, moments = case.pair.gradients_b, set()
    held: list[np.ndarray] = []
    actual: list[np.ndarray] = []
    whole: list[np.ndarray] = []
    for name in [o.node.slot.name for o in case.siblings]:
        events, parts = gradients.rung_events(Kind.REDUCED_GRAD, name), gradients.by_microbatch(name)
        if not events or not parts:
            return ()
        at = max(item.entry.microbatch or 0 for item in events)
        moments.add(at)
        held.append(np.asarray(sum(value for number, value in parts.items() if number <= at)))
        actual.append(events[-1].read().astype(np.float64))
        whole.append(np.asarray(sum(parts.values())))
    if len(moments) != 1 or max(moments) >= case.microbatches_b - 1:
        return ()
    factor = _factor(held, actual)
    floor = case.gradient_floor([i for i in gradients.rung_events(Kind.REDUCED_GRAD, slot.name)])
    text = (
        f"b reduces its gradients after microbatch {max(moments)} of {case.microbatches_b}: "
        "what comes after stays each rank's own"
    )
    mistaken, right = ([x * factor for x in side] for side in (held, whole))
    number, words = float(case.microbatches_b - 1 - max(moments)), "microbatches after the reduction"
    return (Proposal("reduction.early", text, mistaken, actual, right, number, words, floor=floor),)


def _factor(x: Sequence[np.ndarray], y: Sequence[np.ndarray]) -> float:
    size = sum(float(np.vdot(v, v)) for v in x)
    return sum(float(np.vdot(v, w)) for v, w in zip(x, y, strict=True)) / size if size else 0.0


def dropped_microbatch(case: Case) -> Sequence[Proposal]:
    """Propose that the gradient holds only some of the window's microbatches."""
    slot = case.origin.node.slot
    if slot.kind not in RUNGS or slot.name == CLIP or case.microbatches_b < 2 or not case.arrays:
        return ()
    outcomes = [o for o in case.siblings if o.assembled is not None]
    parts = [case.pair.gradients_b.by_microbatch(o.node.slot.name) for o in outcomes]
    proposals = []
    subsets = list(_subsets(case.microbatches_b))
    for kept in subsets:
        triples = [_holding(kept, p, o) for p, o in zip(parts, outcomes, strict=True)]
        known = [t for t in triples if t is not None]
        if len(known) != len(triples):
            continue
        mistaken, actual, reference = (list(side) for side in zip(*known, strict=True))
        lost = [m for m in range(case.microbatches_b) if m not in kept]
        text = (
            f"the gradient of b holds microbatch {_numbers(kept)} of its {case.microbatches_b} only: "
            f"{_numbers(lost)} was dropped"
        )
        number, words = float(len(lost)), f"microbatches dropped of {case.microbatches_b}"
        proposals.append(
            Proposal(
                "grad.dropped_microbatch",
                text,
                mistaken,
                actual,
                reference,
                number,
                words,
                tried=len(subsets),
            )
        )
    return proposals


def _subsets(count: int) -> Iterator[tuple[int, ...]]:
    """Yield what is usually left: the last microbatch alone, the first alone, all but one."""
    everything = tuple(range(count))
    usual = [everything[-1:], everything[:1], *(everything[:m] + everything[m + 1 :] for m in everything)]
    yield from dict.fromkeys(usual)


def _holding(
    kept: Sequence[int], parts: dict[int, np.ndarray], outcome: Outcome
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return (a's gradient with only some microbatches in it, b's, a's)."""
    loaded = outcome.assembled
    if loaded is None or not parts or any(m not in parts for m in kept):
        return None
    whole = sum(parts.values())
    size = float(np.vdot(whole, whole))
    if not size:
        return None
    reference = loaded.a.astype(np.float64)
    factor = float(np.vdot(whole, reference)) / size  # from b's local gradients to a correct one
    return np.asarray(sum(parts[m] for m in kept)) * factor, loaded.b, reference


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def replica_disagrees(case: Case) -> Sequence[Proposal]:
    """Propose that ranks that should hold one value do not, and say whether the odd ones are stale."""
    entry, side = case.origin.comparison, case.origin.disagrees
    if case.origin.node.slot.kind == Kind.BUFFER and side is None:
        return _buffer_of_own_rows(case)
    if side is None or not isinstance(entry, Comparison):
        return ()
    odd = odd_of(entry, side)
    ranks = ", ".join(map(str, odd))
    slot = case.origin.node.slot
    at_init = case.origin.node.step == INIT_STEP  # which no step comes before
    view = case.pair.before_b if side == "b" else case.pair.before_a
    before = {i.source.rank: i for i in view.items.get(slot, ()) if not at_init}
    copies = {i.source.rank: i for i in (entry.copies_b if side == "b" else entry.copies_a)}
    if odd and all(r in before and r in copies and _same(copies[r], before[r]) for r in odd):
        text = f"rank {ranks} of {side} kept the value of before the step"
        old, new = ([held[r].read() for r in odd] for held in (before, copies))
        right = [replica(entry.items_a if side == "b" else entry.items_b).read() for _ in odd]
        words = "rank(s) that hold the value before the step"
        return (Proposal("replica.disagrees", text, old, new, right, float(len(odd)), words, simplicity=1),)
    others = [r for r in copies if r not in odd]
    held = values_of(tuple(copies.values()))
    text = f"rank {ranks} of {side} should hold one value, and {held or 'each holds another'}"
    if others:
        text = f"rank {ranks} of {side} holds another value than rank {', '.join(map(str, others))}"
    return (told("replica.disagrees", text, len(odd), "rank(s) that differ", simplicity=5),)


def _buffer_of_own_rows(case: Case) -> Sequence[Proposal]:
    """Propose that ranks of b have buffers of their own where those of a have one: of their own rows.

    Buffers may differ from rank to rank, as running statistics do, so that this is no difference by itself.
    """
    slot = case.origin.node.slot
    sides = [view.items.get(slot, ()) for view in (case.pair.a, case.pair.b)]
    values = [{item.entry.digest for item in items} for items in sides]
    if len(sides[0]) < 2 or len(values[0]) != 1 or len(values[1]) < 2:
        return ()
    ranks = ", ".join(str(item.source.rank) for item in sides[1])
    text = f"rank {ranks} of b hold values of their own of {slot.name}, those of a one value"
    return (told("replica.disagrees", text, len(values[1]), "values on ranks of b", simplicity=5),)


def _same(one: Item, other: Item) -> bool:
    return one.entry.digest == other.entry.digest


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
