"""Plans the gradient rungs of a window: token weights, local, reduced, unscaled, clipped gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from tensortrace.diff.assemble import Assembled, NotComparable
from tensortrace.diff.catalog import Item, Part, Slot
from tensortrace.diff.gradients import CLIP, Gradients
from tensortrace.diff.plan.clipping import plan_coefficients
from tensortrace.diff.plan.clips import early_events, final_events, plan_clip_events, window_slot
from tensortrace.diff.plan.comparison import Comparison, OneSided, StepPlan
from tensortrace.diff.plan.consumers import Ref, consumers
from tensortrace.diff.plan.edges import read_by_gradient, states_by_module
from tensortrace.diff.plan.evaluations import AMPLIFIED
from tensortrace.diff.plan.fitted import fitted_scale
from tensortrace.diff.plan.ladder import own_rung
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.plan.samples import ROWS
from tensortrace.diff.plan.weights import plan_weights, weight_refs
from tensortrace.diff.replicas import odd_ranks
from tensortrace.diff.scale import WEIGHT_TOLERANCE
from tensortrace.diff.stream import Streamed, one, paired, zeros
from tensortrace.tracer.types import Kind

UP_TO_A_FACTOR = (
    "parameters are updated by the program itself: what scales gradients after their reduction is not seen, "
    "so reduced gradients are compared up to one factor, and the updates as they are"
)
UNWEIGHED = (
    "the runs split the batch differently and no token weights were recorded: "
    "local gradients are compared up to one factor"
)
NOT_CONSUMED = "no optimizer is given this gradient in this step"
_RUNGS = (Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD)


def plan_gradients(pair: StepPair, plan: StepPlan) -> None:
    """Add the comparisons of one step's gradient rungs to the plan."""
    plan_weights(pair, plan)
    if pair.by_program:
        plan.notes.append(UP_TO_A_FACTOR)
    names = sorted({*pair.gradients_a.names, *pair.gradients_b.names})
    split = not pair.same_scheme and any(pair.gradients_a.local_items(name) for name in names)
    if split and not (pair.weights_a.weight or pair.weights_b.weight):
        plan.notes.append(UNWEIGHED)
    states = states_by_module(pair)
    plan_clip_events(pair, plan)
    last: dict[str, Slot] = {}
    for name in names:
        has_a, has_b = name in pair.gradients_a.names, name in pair.gradients_b.names
        if not (has_a and has_b):
            _plan_missing_param(name, "a" if has_a else "b", pair, plan)
            continue
        _plan_start(name, pair, plan)
        _plan_local(name, pair, plan, states)
        previous = _plan_hooked(name, pair, plan)
        for kind in _RUNGS:
            previous = _plan_rung(kind, name, previous, pair, plan)
        _plan_clipped(name, previous, pair, plan)
        last[name] = previous
    plan_coefficients(last, pair, plan)


def _pair_loader(x: Item, y: Item) -> Callable[[], Assembled | Streamed]:
    return lambda: paired(one(x), one(y))


def _plan_missing_param(name: str, side: str, pair: StepPair, plan: StepPlan) -> None:
    gradients = pair.gradients_a if side == "a" else pair.gradients_b
    items = tuple(gradients.local_items(name)) or _some(gradients.consumed(name))
    slot = window_slot(Kind.LOCAL_GRAD, name, "grad")
    one: Literal["a", "b"] = "a" if side == "a" else "b"
    if not gradients.consumed(name) and any(gradients.consumed(other) for other in gradients.names):
        plan.one_sided.append(OneSided(one, slot, None, items, NOT_CONSUMED, counts=False))
        return  # what is left of it shows where the next window starts
    text = f"{name} has a gradient only in {side}"
    plan.one_sided.append(OneSided(one, slot, None, items, text, diverges=True))


def _plan_start(name: str, pair: StepPair, plan: StepPlan) -> None:
    """Leftovers in ``.grad``: an absent one equals zeros, as zero_grad(set_to_none) leaves it."""
    a, b = pair.gradients_a.start_items(name), pair.gradients_b.start_items(name)
    if not a and not b:
        return
    slot = window_slot(Kind.LOCAL_GRAD, name, "start")

    def load() -> Assembled | Streamed:
        x, y = (one(i[0]) if i else None for i in (a, b))
        shape = x.shape if x else y.shape if y else ()
        return paired(x or zeros(shape), y or zeros(shape))

    earlier = ((None, window_slot(Kind.CLIPPED_GRAD, name, "grad")),)
    plan.comparisons.append(Comparison(slot, None, load, a, b, (), earlier))


def _plan_local(name: str, pair: StepPair, plan: StepPlan, states: dict[str, list[Ref]]) -> None:
    a, b = (tuple(g.local_items(name)) for g in (pair.gradients_a, pair.gradients_b))
    outs, ins = consumers(name, pair)
    slot = window_slot(Kind.LOCAL_GRAD, name, "grad")
    parents = ((None, ROWS), *((*outs, *ins) or weight_refs(pair)))
    if not a or not b:
        _plan_gap(slot, a, b, parents, plan)
        return

    def load() -> Assembled | Streamed:
        x = pair.gradients_a.scaled_local(name, lambda part: 1.0)
        y = pair.gradients_b.scaled_local(name, part_scale(pair))
        if x is None or y is None:
            raise NotComparable("local gradients were recorded only as window sums")
        return paired(x, y)

    users = dict.fromkeys(ref[1].name for ref in outs)
    read = dict.fromkeys(ref for user in users for ref in read_by_gradient(user, states))
    plan.comparisons.append(
        Comparison(slot, None, load, a, b, parents, tuple(read), magnitude_of=(*outs, *ins))
    )


def _plan_hooked(name: str, pair: StepPair, plan: StepPlan) -> Slot:
    """Compare what tensor hooks of the program left, where there are any; return what is reduced then."""
    local = window_slot(Kind.LOCAL_GRAD, name, "grad")
    a, b = pair.gradients_a, pair.gradients_b
    if not (a.hooked_items(name) or b.hooked_items(name)):
        return local
    slot = local._replace(slot="hooked")

    def load() -> Assembled | Streamed:
        x, y = a.scaled_hooked(name, lambda part: 1.0), b.scaled_hooked(name, part_scale(pair))
        if x is None or y is None:
            raise NotComparable("local gradients were recorded only as window sums")
        return paired(x, y)

    items_a, items_b = tuple(a.hooked_parts(name)), tuple(b.hooked_parts(name))
    parents = ((None, local), *weight_refs(pair))
    outs, ins = consumers(name, pair)
    rung = own_rung(slot, pair)
    plan.comparisons.append(
        Comparison(slot, None, load, items_a, items_b, parents, magnitude_of=(*outs, *ins), rung=rung)
    )
    return slot


def _plan_gap(
    slot: Slot,
    a: tuple[Item, ...],
    b: tuple[Item, ...],
    parents: tuple[Ref, ...],
    plan: StepPlan,
    *,
    counts: bool = True,
) -> None:
    """Note that at most one run recorded a boundary; nothing to note where neither did."""
    if a or b:
        side: Literal["a", "b"] = "a" if a else "b"
        text = f"recorded only in {side}"
        plan.one_sided.append(OneSided(side, slot, None, a or b, text, parents=parents, counts=counts))


def part_scale(pair: StepPair) -> Callable[[Part], float]:
    """Return ρ of each part of ``b``: the weight of its tokens over their weight in ``a``."""
    if pair.scale.observed:
        return lambda part: pair.scale.by_part.get(part) or 1.0
    known = pair.same_scheme and not pair.whole_on_ranks
    fitted = 1.0 if known else fitted_scale(pair) or 1.0
    return lambda part: fitted


def _plan_rung(kind: Kind, name: str, previous: Slot, pair: StepPair, plan: StepPlan) -> Slot:
    """Compare a rung that at least one run has; return the slot that the next rung depends on."""
    a, b = pair.gradients_a.rung(kind, name), pair.gradients_b.rung(kind, name)
    if a is None and b is None:
        return previous
    slot = window_slot(kind, name, "grad")
    if pair.evaluations or pair.overflowed:
        text = "the optimizer evaluated the model several times, each time with a gradient of its own"
        if pair.overflowed:
            text = "gradients overflowed under the loss scale, so that no factor can be measured on them"
        items = (*_some(a), *_some(b))
        plan.one_sided.append(OneSided("both", slot, None, items, text, counts=False))
        return previous
    lacking = pair.gradients_a if a is None else pair.gradients_b if b is None else None
    if lacking is not None and not lacking.has_rung(kind) and _is_set(name, lacking):
        one_side: Literal["a", "b"] = "b" if a is None else "a"
        text = "the other run sets this gradient itself: what it is made of is not seen there"
        plan.one_sided.append(OneSided(one_side, slot, None, (*_some(a), *_some(b)), text, counts=False))
        return previous
    parents: list[Ref] = [(None, previous), *weight_refs(pair)]
    if previous.kind == Kind.LOCAL_GRAD:
        parents.append((None, previous._replace(slot="start")))
        parents += _early_clips(pair)
    for side, item, other in (("a", a, pair.gradients_b), ("b", b, pair.gradients_a)):
        if item is not None and other.rung(kind, name) is None and _left_out(kind, name, other):
            text = f"{name} has this rung only in {side}"
            one: Literal["a", "b"] = "a" if side == "a" else "b"
            plan.one_sided.append(
                OneSided(one, slot, None, (item,), text, diverges=True, parents=tuple(parents))
            )
            return slot
    plan.comparisons.append(
        Comparison(
            slot, None, _canonical_loader(kind, name, pair), _some(a), _some(b), tuple(parents),
            magnitude_of=((None, previous),),
            copies_a=pair.gradients_a.rung_copies(kind, name),
            copies_b=pair.gradients_b.rung_copies(kind, name),
            rung=own_rung(slot, pair),
        )
    )  # fmt: skip
    return slot


def _is_set(name: str, gradients: Gradients) -> bool:
    """Tell whether a gradient that is consumed came from no backward pass: the program assigned it."""
    return gradients.consumed(name) is not None and not gradients.local_items(name)


def _is_owned(name: str, gradients: Gradients) -> bool:
    """Tell whether an optimizer of a run updates a parameter, and was given gradients of others."""
    groups = (i.entry.meta.members for _, items in gradients.view.find(Kind.SCHEDULE) for i in items)
    return any(name in members for members in groups) and any(map(gradients.consumed, gradients.names))


def _left_out(kind: Kind, name: str, gradients: Gradients) -> bool:
    """Tell whether a run should have a rung that this parameter lacks: others have it, or ranks disagree."""
    return gradients.has_rung(kind) or bool(odd_ranks(gradients.unclipped_copies(name)))


def _some(item: Item | None) -> tuple[Item, ...]:
    return () if item is None else (item,)


def _canonical_loader(kind: Kind, name: str, pair: StepPair) -> Callable[[], Assembled | Streamed]:
    def load() -> Assembled | Streamed:
        if pair.by_program and kind != Kind.CLIPPED_GRAD:
            return _up_to_a_factor(kind, name, pair)
        x = pair.gradients_a.canonical(kind, name)
        y = pair.gradients_b.canonical(kind, name, factor=_shared_factor(kind, pair))
        if x is None or y is None:
            raise NotComparable("the factor from this rung to the gradient before clipping is not measurable")
        return paired(x, y)

    return load


def _up_to_a_factor(kind: Kind, name: str, pair: StepPair) -> Assembled | Streamed:
    x, y = (g.last_seen(kind, name) for g in (pair.gradients_a, pair.gradients_b))
    factor = pair.fitted_factor(kind)
    if x is None or y is None or factor is None:
        raise NotComparable("no factor between the runs' gradients is measurable")
    return paired(x, y.scaled(factor))


def _shared_factor(kind: Kind, pair: StepPair) -> float | None:
    """Return a's factor to come where the rung as recorded has a's scale already, else None.

    So a factor that differs between runs shows at the stage that applies it, not at every rung before.
    """
    if kind != Kind.CLIPPED_GRAD and pair.is_unscaled(kind):
        return 1.0
    raw = pair.raw_factor.get(kind)
    if raw is None or not math.isclose(raw, 1.0, rel_tol=WEIGHT_TOLERANCE):
        return None
    return pair.gradients_a.factor_from(kind)


def _early_clips(pair: StepPair) -> list[Ref]:
    refs: list[Ref] = []
    for view in (pair.a, pair.b):
        for event in early_events(view):
            slot = window_slot(Kind.CLIPPED_GRAD, CLIP, "coefficient", event.call)
            refs.append((event.microbatch, slot))
    return list(dict.fromkeys(refs))


def _plan_clipped(name: str, previous: Slot, pair: StepPair, plan: StepPlan) -> None:
    """Compare the gradient before clipping as it is, then what the optimizer consumes."""
    a, b = pair.gradients_a, pair.gradients_b
    parents: list[Ref] = [(None, previous), *weight_refs(pair)]
    if previous.kind == Kind.LOCAL_GRAD:
        parents += [(None, previous._replace(slot="start")), *_early_clips(pair)]
    before = window_slot(Kind.CLIPPED_GRAD, name, "before")
    if a.before_clip(name) or b.before_clip(name):
        items = _some(a.unclipped(name)), _some(b.unclipped(name))
        if sum(bool(final_events(g.view)) for g in (a, b)) == 1:
            # where only one run is seen to clip, the other's gradient may have been clipped by its own code
            parents.append((None, window_slot(Kind.CLIPPED_GRAD, CLIP, "total_norm")))
        load = _canonical_loader(Kind.CLIPPED_GRAD, name, pair)
        plan.comparisons.append(
            Comparison(
                before, None, load, *items, parents=tuple(parents), magnitude_of=((None, previous),),
                copies_a=a.unclipped_copies(name), copies_b=b.unclipped_copies(name),
                rung=own_rung(before, pair),
            )
        )  # fmt: skip
        parents = [(None, before)]
    x, y = a.consumed(name), b.consumed(name)
    slot = window_slot(Kind.CLIPPED_GRAD, name, "grad")
    if x is None or y is None:
        lacking = b if x else a
        if lacking.local_items(name) and _is_owned(name, lacking):
            side: Literal["a", "b"] = "a" if x else "b"
            text = f"only the optimizer of {side} is given a gradient of {name}"
            held = (*_some(x), *_some(y))
            entry = OneSided(side, slot, None, held, text, True, tuple(parents), own=True)
            plan.one_sided.append(entry)
            return
        counts = not lacking.by_program
        _plan_gap(slot, _some(x), _some(y), tuple(parents), plan, counts=counts)
        return
    magnitude = parents[0]
    by_hand = any(g.by_hand is not None for g in (a, b))  # whose coefficient nobody recorded
    events = range(0 if by_hand else max(len(final_events(v)) for v in (pair.a, pair.b)))
    parents += [(None, window_slot(Kind.CLIPPED_GRAD, CLIP, "coefficient", n)) for n in events]
    plan.comparisons.append(
        Comparison(
            slot, None, _pair_loader(x, y), (x,), (y,), tuple(parents), magnitude_of=(magnitude,),
            copies_a=a.consumed_copies(name), copies_b=b.consumed_copies(name),
            noise=AMPLIFIED if pair.evaluations else 0.0, rung=own_rung(slot, pair),
        )
    )  # fmt: skip
