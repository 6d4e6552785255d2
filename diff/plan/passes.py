"""Plans what forward and backward passes recorded: inputs, activations, losses, activation gradients."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from tensortrace.diff.assemble import Assembled, NotComparable, by_rows, one_for_all, same_everywhere
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import is_exact
from tensortrace.diff.dispatch import CLOSE
from tensortrace.diff.estimate import NEEDS_VALUES, is_estimate
from tensortrace.diff.masks import in_one_form
from tensortrace.diff.objective import weighed_sum
from tensortrace.diff.orders import distance
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.plan.backward import calls_of_pass, summed_over_passes
from tensortrace.diff.plan.comparison import Comparison, OneSided, StepPlan, by_rank, coarser_eps
from tensortrace.diff.plan.dispatched import by_dispatch, of_chosen, taken_by_others
from tensortrace.diff.plan.edges import SUMMED, Edges
from tensortrace.diff.plan.evaluations import AMPLIFIED
from tensortrace.diff.plan.fitted import gradient_scale, of_a_sum
from tensortrace.diff.plan.gates import without_flipped
from tensortrace.diff.plan.labels import (
    as_rows,
    cut_otherwise,
    is_target,
    labels_in_order,
    sorted_labels,
    where_both_count,
)
from tensortrace.diff.plan.lacking import beside, excuse_of
from tensortrace.diff.plan.packed import is_order_of_packed, unpacked
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.plan.precision import (
    eps_of_loss,
    eps_of_scores,
    size_of_scores,
    terms_of_loss,
    terms_of_scores,
)
from tensortrace.diff.plan.whole import rank_by_rank
from tensortrace.diff.rows import Row
from tensortrace.diff.rowsketch import of_rows
from tensortrace.diff.stream import Sketched, Streamed
from tensortrace.tracer.types import ROOT, Kind

_OTHER_SUMS = "one run gives the gradient of all modules that take this tensor, the other that of this one"
_UNUSED = "nothing consumed this output and no gradient reached it, unlike others of the same call"

_PACKED = "it says how long packed documents are, and the runs pack them differently"

_PACKED_ORDER = "it is the order in which a call packs its own rows, which meet as the batch has them"

_CRITERION = "the module computes nothing but a loss, which is compared by itself"

_NO_WEIGHT = "no token weight was recorded"

Side = Literal["a", "b", "both"]


def plan_passes(pair: StepPair, plan: StepPlan) -> None:
    """Add the comparisons of one step's forward and backward passes to the plan."""
    edges = Edges(pair)
    returned = {s for view in (pair.a, pair.b) for s in _returned_losses(view)}
    criteria = _criteria(pair, returned)
    for slot in dict.fromkeys((*pair.a.items, *pair.b.items)):
        if slot.phase == "window" or (slot.kind == Kind.LOSS and not _judged_loss(slot, pair)):
            continue
        if slot._replace(kind=Kind.ACTIVATION) in returned:
            continue
        if slot.kind == Kind.LOSS and slot.call and (slot.slot in SUMMED or cut_otherwise(slot, pair)):
            continue  # chunked losses are summed under call 0, and their labels are taken together
        if 0 < calls_of_pass(slot, pair) <= slot.call:
            continue  # added to the gradient of the first backward pass
        unused = _UNUSED if edges.unused(slot) else ""
        for microbatch, a, b in _groups(slot, pair):
            other = unused or _other_sums(slot, a, b, pair)
            if _other_packing(a, b, pair):
                side: Side = "both" if a and b else "a" if a else "b"
                plan.one_sided.append(OneSided(side, slot, microbatch, (*a, *b), _PACKED, counts=False))
            elif is_order_of_packed(slot, pair):
                side = "both" if a and b else "a" if a else "b"
                plan.one_sided.append(OneSided(side, slot, microbatch, (*a, *b), _PACKED_ORDER, counts=False))
            elif other and a and b:
                plan.one_sided.append(OneSided("both", slot, microbatch, (*a, *b), other, counts=False))
            elif (unused or slot.name in criteria) and not (a and b):
                side = "a" if a else "b"
                why = unused or _CRITERION
                plan.one_sided.append(OneSided(side, slot, microbatch, (*a, *b), why, counts=False))
            else:
                _plan_one(slot, microbatch, a, b, pair, plan, edges)
    if not pair.scale.observed and pair.pairing.pairs and not pair.same_scheme:
        why = "every rank computes the loss of all rows" if pair.whole_on_ranks else _NO_WEIGHT
        plan.notes.append(f"scale not observed: {why}, gradients compared up to a factor")


def _other_packing(a: Sequence[Item], b: Sequence[Item], pair: StepPair) -> bool:
    """Tell whether a tensor holds nothing but the lengths of documents, which are matched one by one."""
    pairing, known = pair.pairing, (pair.batch_a.lengths, pair.batch_b.lengths)
    if not any(known) or pairing.by_order or pairing.only_a or pairing.only_b:
        return False
    if {item.entry.digest for item in a} == {item.entry.digest for item in b}:
        return False
    return all(i.entry.digest in lengths for items, lengths in zip((a, b), known, strict=True) for i in items)


def _other_sums(slot: Slot, a: Sequence[Item], b: Sequence[Item], pair: StepPair) -> str:
    """Return why gradients of an input are not one and the same sum in both runs, "" where they are."""
    if slot.kind != Kind.ACTIVATION_GRAD or not slot.slot.startswith("in"):
        return ""
    totals = [{item.entry.meta.total for item in side} for side in (a, b)]
    return "" if totals[0] == totals[1] and not taken_by_others(slot, a, b, pair) else _OTHER_SUMS


def _judged_loss(slot: Slot, pair: StepPair) -> bool:
    """Tell whether a loss slot is compared by itself: values depend on the scheme, weights are apart."""
    if slot.slot == "weight":
        return False
    if slot.slot == "value":
        has_sum = any(s.name == slot.name and s.slot == "sum" for s in (*pair.a.items, *pair.b.items))
        return pair.same_scheme and not has_sum and slot.name != "backward"
    return True


def _returned_losses(view: StepView) -> set[Slot]:
    """Return the scalar activations that are a loss's value, or made of one.

    A module that returns its loss (a criterion, a model given labels) repeats the ``loss`` boundary. Its
    value and its gradient depend on the scheme, so sum, count and token weight are compared in its place.
    """
    losses = {
        (item.part, item.entry.digest)
        for slot, items in view.find(Kind.LOSS)
        if slot.slot == "value"
        for item in items
    }
    found: set[Slot] = set()
    for slot, items in view.find(Kind.ACTIVATION):  # in the order in which they were recorded
        if all(item.entry.local_shape == () for item in items):
            same = all((item.part, item.entry.digest) in losses for item in items)
            sources = {source for item in items for source, _ in view.producers(item)}
            if same or any(source.kind == Kind.LOSS or source in found for source in sources):
                found.add(slot)
    return found


def _criteria(pair: StepPair, returned: Container[Slot]) -> set[str]:
    """Return the modules that do nothing but compute a loss, which is compared whoever computes it."""
    slots = [s for view in (pair.a, pair.b) for s in view.items if s.kind in (Kind.ACTIVATION, Kind.INPUT)]
    names = {s.name for s in slots if s in returned} - {ROOT}
    others = {s.name for s in slots if s.slot.startswith("out") and s not in returned}
    return {name for name in names - others if not any(s.name.startswith(f"{name}.") for s in slots)}


def _groups(slot: Slot, pair: StepPair) -> Iterable[tuple[int | None, tuple[Item, ...], tuple[Item, ...]]]:
    """Yield a slot's entries by the microbatch under which they are compared."""
    grouped: dict[int | None, tuple[list[Item], list[Item]]] = defaultdict(lambda: ([], []))
    for side, view in enumerate((pair.a, pair.b)):
        for item in _entries(slot, view, together=cut_otherwise(slot, pair)):
            if item.part is not None:
                grouped[pair.group(item.part)][side].append(item)
    for microbatch, (a, b) in grouped.items():
        yield microbatch, by_rank(a), by_rank(b)


def _entries(slot: Slot, view: StepView, *, together: bool) -> Sequence[Item]:
    if together or (slot.kind == Kind.LOSS and slot.slot in SUMMED):
        calls = (s for s in view.items if s._replace(call=0) == slot._replace(call=0))
        return [item for s in calls for item in view.items[s]]
    return view.items.get(slot, ())


def _plan_one(
    slot: Slot,
    microbatch: int | None,
    a: tuple[Item, ...],
    b: tuple[Item, ...],
    pair: StepPair,
    plan: StepPlan,
    edges: Edges,
) -> None:
    parents, earlier = edges.of(slot, microbatch)
    if not a or not b:
        side, items = ("a", a) if a else ("b", b)
        excuse = excuse_of(slot, *((pair.b, pair.a) if a else (pair.a, pair.b)))
        excuse = excuse or beside(slot, microbatch, pair.b if a else pair.a, edges)
        plan.one_sided.append(
            OneSided(
                "a" if a else "b", slot, microbatch, items, excuse or f"recorded only in {side}",
                parents=parents, earlier=earlier, counts=not excuse,
            )
        )  # fmt: skip
        return
    eps, terms, of_error = _known_arithmetic(slot, microbatch, (*a, *b), pair, edges)
    of_gradient = slot.kind == Kind.ACTIVATION_GRAD
    plan.comparisons.append(
        Comparison(
            slot=slot,
            microbatch=microbatch,
            load=_loader(slot, a, b, pair),
            items_a=a,
            items_b=b,
            parents=parents,
            earlier=earlier,
            exact=all(is_exact(i.entry.dtype) for i in (*a, *b)),
            noise=AMPLIFIED if microbatch in pair.evaluations and slot.kind == Kind.ACTIVATION else 0.0,
            quiet=partial(without_flipped, eps=coarser_eps((*a, *b))) if of_gradient else None,
            eps=eps,
            terms=terms,
            of_error=of_error,
        )
    )


def _known_arithmetic(
    slot: Slot, microbatch: int | None, items: tuple[Item, ...], pair: StepPair, edges: Edges
) -> tuple[float, float, float]:
    """Return ``eps``, ``terms`` and ``of_error`` of a loss, and of the gradient of what one was given."""
    if slot.phase != "train" or slot.kind not in (Kind.LOSS, Kind.ACTIVATION_GRAD):
        return 0.0, 0.0, 0.0
    if slot.kind == Kind.LOSS:
        given = [source for _, source in edges.producers.get((microbatch, slot), {})]
        return eps_of_loss(slot, pair), terms_of_loss(slot, microbatch, given, pair), 0.0
    scores = slot._replace(kind=Kind.ACTIVATION)
    users = [user for _, user in edges.consumers.get((microbatch, scores), {})]
    if not users or any(user.kind != Kind.LOSS for user in users):
        return 0.0, 0.0, 0.0
    eps, terms = eps_of_scores(users, items, pair), terms_of_scores(users, microbatch, scores, pair)
    return eps, terms, 2 * size_of_scores(users, scores, pair)  # errors of the target's score and of others


def _loader(
    slot: Slot, a: tuple[Item, ...], b: tuple[Item, ...], pair: StepPair
) -> Callable[[], Assembled | Streamed]:
    pairing = pair.pairing if slot.phase == "train" else pair.eval_pairing
    if slot.kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD) and any(item.bare for item in (*a, *b)):
        return lambda: _estimates(slot, a, b, pair, pairing)
    if slot.kind == Kind.LOSS and slot.slot in SUMMED:
        if slot.phase == "eval":  # every rank may have evaluated the same rows: each counts once
            a, b = (_of_rows(side, items, pairing) for side, items in enumerate((a, b)))
        if slot.slot == "sum" and slot.phase == "train" and pair.weighed_inside:
            return lambda: _weighed_totals(slot.name, a, b, pair)
        return lambda: _totals(a, b, pair)
    if is_target(slot) and pair.whole_on_ranks:
        return lambda: rank_by_rank(a, b, pair.whole_on_ranks, sorted_labels)
    if cut_otherwise(slot, pair):
        return lambda: labels_in_order(a, b)
    if slot.kind == Kind.ACTIVATION_GRAD:
        calls = calls_of_pass(slot, pair)

        def gradients(scale: Scale) -> Assembled:
            def one(x: tuple[Item, ...], y: tuple[Item, ...]) -> Assembled:
                x, y = unpacked(slot, x, y, pair) or (x, y)
                found = of_a_sum(slot, x, y, pair, scale)
                found = found or by_rows(x, y, pairing, scale_b=scale, additive=True)
                if not found.owners and _lacks_gradients(pair):
                    raise NotComparable(
                        "it is summed over the batch, and some ranks recorded no gradients of it"
                    )
                return found

            return summed_over_passes(slot, a, b, pair, calls, one) if calls else one(a, b)

        return _or_dispatched(gradients, slot, a, b, pair, lambda: gradient_scale(pair))

    def values(_: Scale) -> Assembled:
        x, y = unpacked(slot, a, b, pair) or (a, b)
        found = by_rows(x, y, pairing, row_bound=slot.kind == Kind.LOSS)
        if is_target(slot):
            labels = where_both_count(found, a, b)
            return as_rows(labels, pairing) if _sums_agree(slot, pair) else labels
        masks = in_one_form(found.a, found.b) if slot.slot.startswith("in") else None
        return found._replace(a=masks[0], b=masks[1]) if masks else found

    return _or_dispatched(values, slot, a, b, pair, lambda: None)


def _estimates(
    slot: Slot, a: tuple[Item, ...], b: tuple[Item, ...], pair: StepPair, pairing: Pairing
) -> Sketched:
    """Return both sides of a boundary by their sketches, where some of it was not stored with its values."""
    if slot.kind == Kind.ACTIVATION_GRAD and (calls_of_pass(slot, pair) or _lacks_gradients(pair)):
        raise NotComparable(NEEDS_VALUES)
    scale = gradient_scale(pair) if slot.kind == Kind.ACTIVATION_GRAD else None
    additive = slot.kind == Kind.ACTIVATION_GRAD
    return of_rows(a, b, (pair.a, pair.b), pairing, scale_b=scale, additive=additive)


def _lacks_gradients(pair: StepPair) -> bool:
    """Tell whether some part of a batch has no activation gradients at all: its rank did not record them."""
    for side, view in enumerate((pair.a, pair.b)):
        wanted = {rows[side].part for rows in pair.pairing.pairs}
        for _, items in view.find(Kind.ACTIVATION_GRAD, phase="train"):
            wanted -= {item.part for item in items if item.part is not None}
            if not wanted:
                break
        if wanted:
            return True
    return False


Scale = Callable[[Row], float] | None


def _or_dispatched(
    aligned: Callable[[Scale], Assembled],
    slot: Slot,
    a: tuple[Item, ...],
    b: tuple[Item, ...],
    pair: StepPair,
    scale_of: Callable[[], Scale],
) -> Callable[[], Assembled]:
    """Return a loader by the batch's rows, or where there are none by the rows that the module was given."""

    def load() -> Assembled:
        scale = scale_of()
        try:
            loaded = aligned(scale)
            if chosen := of_chosen(slot, a, b, pair, scale, loaded):
                return chosen
            if loaded.owners and not (loaded.guessed and _is_elsewhere(loaded)):
                return loaded
            other = _of_other_order(slot, a, b, pair, scale)
            if other and loaded.owners and distance(loaded.a, loaded.b) <= distance(other.a, other.b):
                return loaded
            if other is None and not is_estimate(loaded.a) and _is_of_unknown_order(slot, pair, loaded):
                raise NotComparable(NEEDS_VALUES)
            return other or loaded
        except NotComparable:
            found = by_dispatch(slot, a, b, pair, scale) if slot.phase == "train" else None
            found = found or _of_equal_inputs(slot, a, b, pair)
            if found is None and is_target(slot):
                return labels_in_order(a, b)
            if found is None:
                raise
            return found

    return load


def _is_of_unknown_order(slot: Slot, pair: StepPair, loaded: Assembled) -> bool:
    """Tell whether values may differ by their order, which only tensors tell that were not stored."""
    if slot.kind not in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD) or not loaded.a.ndim:
        return False
    given = [
        item
        for view in (pair.a, pair.b)
        for s in view.named(Kind.ACTIVATION, slot.name)
        if s.slot.startswith("in") and (s.phase, s.call) == (slot.phase, slot.call)
        for item in view.items[s]
    ]
    unknown = any(not item.source.stored(item.entry) for item in given)
    return unknown and loaded.a.shape == loaded.b.shape and _is_elsewhere(loaded)


def _is_elsewhere(loaded: Assembled) -> bool:
    """Tell whether a quarter of the entries of the first dimension is not what the other run has there.

    A mistake in a few of them is no other order.
    """
    a, b = (np.asarray(x, dtype=np.float64).reshape(len(x), -1) for x in (loaded.a, loaded.b))
    apart = np.linalg.norm(b - a, axis=1) > CLOSE * np.linalg.norm(a, axis=1)
    return bool(4 * np.count_nonzero(apart) > len(a))


def _of_other_order(
    slot: Slot, a: tuple[Item, ...], b: tuple[Item, ...], pair: StepPair, scale: Scale
) -> Assembled | None:
    """Return what was chosen from rows that came in another order, with matching rows; None of others.

    As many tokens may be chosen in both runs, in the order of the batch: no size tells that they are tokens.
    """
    if slot.phase != "train" or all((x.part, x.number) == (y.part, y.number) for x, y in pair.pairing.pairs):
        return None
    if (
        len({sum(item.entry.local_shape[0] for item in side if item.entry.local_shape) for side in (a, b)})
        > 1
    ):
        return None
    try:
        return by_dispatch(slot, a, b, pair, scale)
    except NotComparable:
        return None


def _of_equal_inputs(
    slot: Slot, a: tuple[Item, ...], b: tuple[Item, ...], pair: StepPair
) -> Assembled | None:
    """Return what a module made of inputs that are equal in all parts of both runs, such as positions.

    No rows are in it, and all parts should have made the same: the parts of one run are compared with the
    value that the other has in all of its parts. None where inputs differ or are not known.
    """
    if slot.kind != Kind.ACTIVATION or not slot.slot.startswith("out"):
        return None
    views = (pair.a, pair.b)
    given = {s for v in views for s in v.named(Kind.ACTIVATION, slot.name) if s.slot.startswith("in.")}
    given = {s for s in given if (s.phase, s.call) == (slot.phase, slot.call)}
    inputs = [[i for v in views for i in v.items.get(s, ())] for s in given]
    if not inputs or not all(same_everywhere(items) for items in inputs):
        return None
    return one_for_all(a, b)


def _of_rows(side: int, items: tuple[Item, ...], pairing: Pairing) -> tuple[Item, ...]:
    """Return the items of the parts whose rows were paired; all of them where none was."""
    parts = {rows[side].part for rows in pairing.pairs}
    return tuple(item for item in items if item.part in parts) or items


def _totals(a: Sequence[Item], b: Sequence[Item], pair: StepPair) -> Assembled:
    if pair.whole_on_ranks:
        return rank_by_rank(a, b, pair.whole_on_ranks, _total)
    return Assembled(_total(a), _total(b))


def _weighed_totals(name: str, a: Sequence[Item], b: Sequence[Item], pair: StepPair) -> Assembled:
    """Return the sums of a loss that one run weighs inside, and the other's in the same units."""
    weights = (pair.weights_a if pair.weighed_inside == "a" else pair.weights_b).weight
    items, view = (b, pair.b) if pair.weighed_inside == "a" else (a, pair.a)
    parts = {item.part: weights[item.part] or math.nan for item in items if item.part is not None}
    other = weighed_sum(view, name, parts)
    if other is None:
        raise NotComparable("scale not observed: a loss has no single weight for its tokens")
    sides = (_total(a), np.asarray(other)) if pair.weighed_inside == "a" else (np.asarray(other), _total(b))
    return Assembled(*sides)


_SAME_SUM = 1e-2
"""Relative difference up to which a loss is taken for that of the same labels, in low precision too."""


def _sums_agree(slot: Slot, pair: StepPair) -> bool:
    """Tell whether a call of a loss comes to the same sum in both runs: labels of other rows would not."""
    sides = [view.items.get(slot._replace(slot="sum"), ()) for view in (pair.a, pair.b)]
    if not all(sides) or not all(item.source.stored(item.entry) for side in sides for item in side):
        return True
    a, b = (float(_total(side)) for side in sides)
    return math.isclose(a, b, rel_tol=_SAME_SUM)


def _total(items: Sequence[Item]) -> np.ndarray:
    return np.asarray(sum(np.asarray(item.read(), dtype=np.float64) for item in items))
