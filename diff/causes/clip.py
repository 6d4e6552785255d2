"""Clipping at the wrong time, by the wrong norm, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tensortrace.diff.catalog import Item, StepView
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.causes.holders import added_by_rank, held_by_rank
from tensortrace.diff.coefficient import odd_names
from tensortrace.diff.gradients import CLIP, Gradients
from tensortrace.diff.logical import Together
from tensortrace.diff.plan.clips import early_events, final_events
from tensortrace.tracer.types import Kind


def before_accumulation(case: Case) -> Sequence[Proposal]:
    """Propose that clipping came before the window's gradients were complete, in one run only."""
    found = case.one_sided
    if found is None or found.slot.name != CLIP or found.microbatch is None:
        return ()
    view = case.pair.b if found.side == "b" else case.pair.a
    other = case.pair.gradients_a if found.side == "b" else case.pair.gradients_b
    events = early_events(view)
    gradients = Gradients(view)
    accumulated = _clipped_as_it_went(gradients, view)
    if accumulated is None:
        return ()
    names, mistaken = accumulated
    consumed = [(gradients.consumed(n), other.consumed(n)) for n in names]
    kept = [(m, x, y) for m, (x, y) in zip(mistaken, consumed, strict=True) if x and y]
    actual, reference = (
        [item.read() for item in side] for side in ([x for _, x, _ in kept], [y for *_, y in kept])
    )
    if all(np.array_equal(x, y) for x, y in zip(actual, reference, strict=True)):  # of one run alone
        whole = _clipped_as_it_went(gradients, view, only_last=True)
        both = zip(whole[1] if whole else (), consumed, strict=True)
        reference = [plain for plain, (x, y) in both if x and y]
    coefficients = ", ".join(f"{_scalar(e.scalars.get('coefficient')):.4g}" for e in events)
    text = (
        f"{found.side} clips before accumulation ends: {len(events)} clip event(s) before the last of "
        f"{view.last_microbatch() + 1} microbatches, coefficients {coefficients}"
    )
    return (
        Proposal(
            "clip.before_accumulation",
            text,
            [m for m, _, _ in kept],
            actual,
            reference,
            float(len(events)),
            "clip events in the middle of the window",
            floor=case.gradient_floor([x for _, x, _ in kept]),
        ),
    )


def _clipped_as_it_went(
    gradients: Gradients, view: StepView, *, only_last: bool = False
) -> tuple[list[str], list[np.ndarray]] | None:
    """Return each parameter's gradient if it is clipped after every microbatch, or the last, as told."""
    last = view.last_microbatch()
    coefficients = {at: c for at, c in _coefficients(view).items() if not only_last or at[1] == last}
    total: dict[str, np.ndarray] = {}
    names = [n for n in gradients.names if gradients.local_items(n)]
    ranks = {i.cell for n in names for i in gradients.local_items(n)}
    for name in names:
        for rank in sorted(ranks):  # a rank's own gradient may be clipped before it is reduced
            share = np.zeros(())
            mine = {i.entry.microbatch: i for i in gradients.local_items(name) if i.cell == rank}
            for microbatch in range(view.last_microbatch() + 1):
                if microbatch in mine:
                    share = share + mine[microbatch].read().astype(np.float64)
                share = share * coefficients.get((rank, microbatch), 1.0)
            total[name] = total.get(name, np.zeros(())) + share / len(ranks)
    return (list(total), list(total.values())) if total else None


def _coefficients(view: StepView) -> dict[tuple[int, int], float]:
    """Return the product of the factors that clipping applied on each rank after each microbatch."""
    found: dict[tuple[int, int], float] = {}
    for slot, items in view.find(Kind.CLIPPED_GRAD):
        if slot.name == CLIP and slot.slot == "coefficient":
            for item in items:
                key = (item.cell, item.entry.microbatch or 0)
                found[key] = found.get(key, 1.0) * _scalar(item)
    return found


def _scalar(item: Item | None) -> float:
    return float(item.read()) if item else math.nan


def skipped(case: Case) -> Sequence[Proposal]:
    """Propose that only one run clips: the other consumes the gradient as it was."""
    found = case.one_sided
    if found is None or found.slot.name != CLIP or found.microbatch is not None:
        return ()
    clipping, plain = (
        (case.pair.gradients_a, case.pair.gradients_b)
        if found.side == "a"
        else (case.pair.gradients_b, case.pair.gradients_a)
    )
    triples = [(clipping.before_clip(n), clipping.consumed(n), plain.consumed(n)) for n in clipping.names]
    kept = [(x.read(), y.read(), z.read()) for x, y, z in triples if x and y and z]
    if not kept:
        return ()
    floor = case.gradient_floor([item for triple in triples for item in triple if item])
    mistaken, clipped, unclipped = (list(side) for side in zip(*kept, strict=True))
    event = final_events(case.pair.a if found.side == "a" else case.pair.b)[0]
    number, equals = _scalar(event.scalars.get("coefficient")), "the coefficient left out"
    told = f"the coefficient of {found.side} is {number:.6g}"
    if math.isnan(number):  # elements are cut off one by one
        number, equals = max(float(np.max(np.abs(y), initial=0.0)) for y in clipped), "the limit left out"
        told = f"{found.side} cuts off elements at {number:.6g}"
    other = "b" if found.side == "a" else "a"
    text = f"{other} does not clip: it consumes the gradient as it was; {told}"
    return (
        Proposal(
            "clip.skipped", text, mistaken, unclipped, clipped, number, equals,
            floor=floor,
        ),
    )  # fmt: skip


def not_applied(case: Case) -> Iterator[Proposal]:
    """Propose that a clip leaves gradients as they were, though it computed a coefficient below 1."""
    slot = case.origin.node.slot
    if slot.kind != Kind.CLIPPED_GRAD or slot.slot != "grad" or slot.name == CLIP:
        return
    gradients, known = case.pair.gradients_b, [o for o in case.siblings if o.assembled is not None]
    names = [o.node.slot.name for o in known]
    before = [gradients.before_clip(name) for name in names]
    coefficients = {gradients.coefficient(name) for name in names}
    if len(coefficients) != 1 or any(item is None for item in before) or coefficients == {1.0}:
        return
    number = coefficients.pop()
    text = f"the coefficient {number:.6g} is computed and not applied: clipping leaves gradients as they were"
    sides = [o.assembled for o in known if o.assembled]
    yield Proposal(
        "clip.skipped", text, [item.read() for item in before if item], [x.b for x in sides],
        [x.a for x in sides], number, "the coefficient left out",
    )  # fmt: skip


def after_the_update(case: Case) -> Iterator[Proposal]:
    """Propose that one run clips only when its optimizer has consumed the gradients."""
    slot = case.origin.node.slot
    if slot.kind != Kind.CLIPPED_GRAD or slot.slot != "grad" or slot.name == CLIP:
        return
    a, b = case.pair.gradients_a, case.pair.gradients_b
    names = [o.node.slot.name for o in case.siblings if o.assembled is not None]
    late = {side: all(_consumed_first(g, n) for n in names) for side, g in (("a", a), ("b", b))}
    if late["a"] == late["b"] or any(not g.before_clip(n) for g in (a, b) for n in names):
        return
    side, plain, clipping = ("b", b, a) if late["b"] else ("a", a, b)
    consumed = [(clipping.before_clip(n), plain.consumed(n), clipping.consumed(n)) for n in names]
    kept = [(x.read(), y.read(), z.read()) for x, y, z in consumed if x and y and z]
    mistaken, unclipped, clipped = (list(found) for found in zip(*kept, strict=True))
    coefficient = _scalar(
        final_events(case.pair.a if side == "b" else case.pair.b)[-1].scalars.get("coefficient")
    )
    text = f"{side} clips after its optimizer's step, which consumes the gradient as it was"
    items = [item for triple in consumed for item in triple if item]
    yield Proposal(
        "clip.skipped", text, mistaken, unclipped, clipped, coefficient,
        "the coefficient that comes too late", floor=case.gradient_floor(items),
    )  # fmt: skip


def left_out(case: Case) -> Iterator[Proposal]:
    """Propose that a clip of the program's own leaves out parameters that the other run clips."""
    slot = case.origin.node.slot
    if slot.kind != Kind.CLIPPED_GRAD or slot.slot != "grad" or slot.name == CLIP:
        return
    a, b = case.pair.gradients_a, case.pair.gradients_b
    if a.from_rung == b.from_rung:
        return
    side, plain, clipping = ("b", b, a) if b.from_rung else ("a", a, b)
    names = [o.node.slot.name for o in case.siblings if o.assembled is not None]
    triples = [(clipping.before_clip(n), plain.consumed(n), clipping.consumed(n)) for n in names]
    kept = [(x.read(), y.read(), z.read()) for x, y, z in triples if x and y and z]
    if not kept:
        return
    before, consumed, clipped = (list(found) for found in zip(*kept, strict=True))
    size = sum(float(np.vdot(x, x)) for x in before)
    factor = sum(float(np.vdot(x, z)) for x, z in zip(before, clipped, strict=True)) / size if size else 1.0
    text = f"{side} clips by code of its own, which leaves out {', '.join(names[:3])}"
    text += ", …" if len(names) > 3 else ""
    items = [item for triple in triples for item in triple if item]
    yield Proposal(
        "clip.skipped", text, before, consumed, clipped, factor, "the coefficient left out",
        floor=case.gradient_floor(items),
    )  # fmt: skip


def _consumed_first(gradients: Gradients, name: str) -> bool:
    """Tell whether a rank's optimizer consumed a gradient before it was clipped."""
    clipped = {i.source.rank: i.entry.event for i in gradients.before_clip_copies(name)}
    consumed = {i.source.rank: i.entry.event for i in gradients.consumed_copies(name)}
    return any(consumed[rank] < clipped[rank] for rank in clipped.keys() & consumed.keys())


def wrong_norm(case: Case) -> Sequence[Proposal]:
    """Propose that clipping uses another kind of norm, or another maximum."""
    slot = case.origin.node.slot
    if slot.name != CLIP or slot.slot not in ("norm_type", "max_norm") or not case.arrays:
        return ()
    a, b = case.arrays[0]
    text = f"clipping uses {slot.slot} {float(b):g}, the reference {float(a):g}"
    return (Proposal("clip.wrong_norm", text, [b], [b], [a], float(b), slot.slot),)


def total_norm(case: Case) -> Sequence[Proposal]:
    """Propose that the total norm is one rank's own."""
    slot = case.origin.node.slot
    if slot.name != CLIP or slot.slot != "total_norm" or not case.arrays:
        return ()
    a, b = (float(v) for v in case.arrays[0])
    proposals = []
    local = _local_norms(case)
    for rank, norm in local.items() if len(local) > 1 else ():
        text = f"the total norm {b:.6g} is that of rank {rank}'s own gradients, not of the global ones"
        proposals.append(
            Proposal(
                "clip.local_norm",
                text,
                [np.array(norm)],
                [np.array(b)],
                [np.array(a)],
                norm,
                f"rank {rank}'s local norm",
                tried=len(local),
            )
        )
    held = _held_norms(case)
    for rank, norm in held.items() if len(held) > 1 else ():
        text = (
            f"the total norm {b:.6g} is that of what rank {rank} holds of the gradients, not of all of them"
        )
        proposals.append(
            Proposal(
                "clip.local_norm", text, [np.array(norm)], [np.array(b)], [np.array(a)], norm,
                f"the norm of rank {rank}'s shards", tried=len(held),
            )
        )  # fmt: skip
    return proposals


def of_some_gradients(case: Case) -> Iterator[Proposal]:
    """Propose that clipping is given other parameters than in the reference."""
    slot = case.origin.node.slot
    if slot.name != CLIP or slot.slot != "total_norm" or not case.arrays:
        return
    members = [_members(view, slot.call) for view in (case.pair.a, case.pair.b)]
    if not all(members) or set(members[0]) == set(members[1]):
        return
    a, b = (float(v) for v in case.arrays[0])
    found = [case.pair.gradients_b.unclipped_value(name) for name in members[1]]
    values = [np.ravel(one.read()).astype(np.float64) for one in found if one is not None]
    events = final_events(case.pair.b)
    order = _scalar(events[-1].scalars.get("norm_type")) if events else 2.0
    norm = float(np.linalg.norm([np.linalg.norm(v, order) for v in values if v.size], order))
    lacking, more = (sorted(set(x) - set(y)) for x, y in (members, members[::-1]))
    what = f"without {', '.join(lacking[:3])}" if lacking else f"with {', '.join(more[:3])}"
    what += ", …" if len(lacking or more) > 3 else ""
    text = (
        f"clipping is given {len(members[1])} parameters in b and {len(members[0])} in the reference: "
        f"the total norm {b:.6g} is that of its own, {what}"
    )
    yield Proposal(
        "clip.wrong_norm", text, [np.array(norm)], [np.array(b)], [np.array(a)], norm,
        "the norm of the parameters that clipping is given", simplicity=-1, floor=case.gradient_floor([]),
    )  # fmt: skip


def _members(view: StepView, call: int) -> tuple[str, ...]:
    """Return the parameters that a clip is given, over all ranks."""
    items = (i for s, held in view.find(Kind.CLIPPED_GRAD) for i in held if s.name == CLIP and s.call == call)
    return tuple(dict.fromkeys(name for item in items for name in item.entry.meta.members))


_MOST_ELEMENTS = 1 << 22
"""Of more gradients at once none are looked at: all of them are held."""


def own_part_by_hand(case: Case) -> Iterator[Proposal]:
    """Propose that code of the program's own clips each rank's part by the norm of that part alone.

    No function is seen to clip: the greatest norm is that which a's gradients have after it.
    """
    slot, only_a = case.origin.node.slot, case.one_sided is not None and case.one_sided.side == "a"
    clips = slot.slot == "grad" or (slot.name == CLIP and only_a)
    if slot.kind != Kind.CLIPPED_GRAD or not clips or final_events(case.pair.b):
        return
    a, b = case.pair.gradients_a, case.pair.gradients_b
    names = [n for n in b.names if a.consumed(n) and b.consumed(n)]
    if sum(math.prod(i.entry.local_shape) for n in names for i in b.consumed_copies(n)) > _MOST_ELEMENTS:
        return
    limit = math.sqrt(sum(float(np.sum(_consumed(a, n).astype(np.float64) ** 2)) for n in names))
    before = {n: added_by_rank(b.rung_copies(Kind.REDUCED_GRAD, n) or b.local_items(n)) for n in names}
    after = {n: added_by_rank(b.consumed_copies(n)) for n in names}
    for name, found in before.items():  # of equal copies one stands for all
        copy = next(iter(found.values()), None)
        found |= {r: copy for r in after[name] if r not in found and copy is not None}
    norms: dict[int, float] = {}
    for found in before.values():
        for rank, value in found.items():
            norms[rank] = math.hypot(norms.get(rank, 0.0), float(np.linalg.norm(np.ravel(value))))
    if max(norms.values(), default=0.0) <= limit:
        return  # nothing would be clipped
    if a.shared and slot.name in odd_names(names, a, b):
        return  # ranks' norms differ because this gradient does
    if len(norms) < 2 or any(before[n].keys() != after[n].keys() for n in names):
        return
    held = [(rank, before[n][rank], after[n][rank]) for n in names for rank in before[n]]
    whole = math.sqrt(sum(float(np.sum(_whole(b, n) ** 2)) for n in names))
    yield by_own_norms(held, norms, whole, limit, names, case)


def by_own_norms(
    held: Sequence[tuple[int, np.ndarray, np.ndarray]],
    norms: Mapping[int, float],
    whole: float,
    limit: float,
    names: Sequence[str],
    case: Case,
) -> Proposal:
    """Return that each rank clips what it holds by the norm of that; ``whole`` is the norm of all gradients.

    ``held`` are a rank, what it holds of a gradient, and what its optimizer was given of it.
    """
    odd = min(norms, key=lambda rank: norms[rank])
    text = (
        f"each rank of b clips what it holds by the norm of that alone: {norms[odd]:.6g} on rank {odd}, "
        f"of all gradients {whole:.6g}"
    )
    items = [item for n in names for item in case.pair.gradients_b.consumed_copies(n)]
    return Proposal(
        "clip.local_norm", text, [x * min(1.0, limit / (norms[rank] + 1e-6)) for rank, x, _ in held],
        [y for _, _, y in held], [x * min(1.0, limit / (whole + 1e-6)) for _, x, _ in held], norms[odd],
        f"the norm of rank {odd}'s part", simplicity=-1, floor=max(case.gradient_floor(items), 1e-5),
    )  # fmt: skip


def _consumed(gradients: Gradients, name: str) -> np.ndarray:
    found = gradients.consumed(name)
    assert found is not None  # asked before
    return found.read()


def _whole(gradients: Gradients, name: str) -> np.ndarray:
    """Return a gradient before it is clipped, whole."""
    reduced = gradients.rung(Kind.REDUCED_GRAD, name)
    if reduced:
        return reduced.read().astype(np.float64)
    return np.asarray(sum(gradients.local(name).values()), np.float64)


def before_unscale(case: Case) -> Sequence[Proposal]:
    """Propose that gradients were clipped while they still carried the loss scale."""
    slot = case.origin.node.slot
    if slot.name != CLIP or slot.slot != "total_norm" or not case.arrays:
        return ()
    left, right = (list(side) for side in zip(*case.arrays, strict=True))
    proposals = []
    for scale in _loss_scales(case.pair.b):
        factor = math.sqrt(sum(float(np.vdot(b, b)) for b in right) / sum(float(np.vdot(a, a)) for a in left))
        text = f"gradients were clipped before unscaling: they are {factor:.6g} times the reference"
        proposals.append(
            Proposal(
                "clip.before_unscale", text, [a * scale for a in left], right, left, factor,
                f"the loss scale ({scale:g})", simplicity=-1,
            )
        )  # fmt: skip
    return proposals


def _loss_scales(view: StepView) -> list[float]:
    found = (i for slot, items in view.find(Kind.SCHEDULE) if slot.slot == "scale" for i in items)
    return sorted({float(item.read()) for item in found} - {1.0})


def _held_norms(case: Case) -> dict[int, float]:
    """Return the norm of what each rank of b holds of the gradients that were clipped."""
    events = final_events(case.pair.b)
    order = _scalar(events[-1].scalars.get("norm_type")) if events else 2.0
    order = order if order > 0 else 2.0
    norms: dict[int, list[float]] = {}
    for name in case.pair.gradients_b.names:
        for item in case.pair.gradients_b.before_clip_copies(name):
            whole = not isinstance(item.source, Together)
            for rank, part in ({item.source.rank: item.read()} if whole else held_by_rank(item)).items():
                value = np.ravel(part).astype(np.float64)
                norms.setdefault(rank, []).append(float(np.linalg.norm(value, order)) if value.size else 0.0)
    return {rank: float(np.linalg.norm(found, order)) for rank, found in sorted(norms.items())}


def _local_norms(case: Case) -> dict[int, float]:
    squares: dict[int, float] = {}
    for name in case.pair.gradients_b.names:
        for rank, value in case.pair.gradients_b.local(name).items():
            squares[rank] = squares.get(rank, 0.0) + float(np.sum(value.astype(np.float64) ** 2))
    return {rank: math.sqrt(square) for rank, square in sorted(squares.items())}
