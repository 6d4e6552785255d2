"""Plans what the window owns beside gradients: schedule, optimizer state, parameters, buffers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import partial

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import is_exact
from tensortrace.diff.kinds import STATES
from tensortrace.diff.masters import COPIED, COPY
from tensortrace.diff.plan.clips import window_slot
from tensortrace.diff.plan.comparison import Comparison, OneSided, StepPlan, by_rank, replica
from tensortrace.diff.plan.consumers import Ref
from tensortrace.diff.plan.copies import copies_in, copying_error
from tensortrace.diff.plan.evaluations import AMPLIFIED, is_own_loss, size_of_list
from tensortrace.diff.plan.muon import noise_of_muon
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.plan.replays import Replays
from tensortrace.diff.plan.updates import without_noise
from tensortrace.diff.stream import Streamed, one, paired
from tensortrace.tracer.types import ROOT, Kind

BY_ITSELF = "the other run updates its parameters itself: no optimizer is seen, nor its last update"
OWN_LOSS = "it is the loss that each rank's closure returned: of its own part of the batch"


def plan_state(pair: StepPair, plan: StepPlan) -> None:
    """Add the comparisons of one step's schedule, optimizer state, parameters and buffers."""
    _plan_schedule(pair, plan)
    replays = Replays(pair)
    for slot in dict.fromkeys((*pair.a.items, *pair.b.items)):
        if slot.kind in STATES:
            _plan_slot(slot, pair, plan, replays)


def plan_init(a: StepView, b: StepView, plan: StepPlan) -> None:
    """Add the comparisons of the state before the first step."""
    for slot in dict.fromkeys((*a.items, *b.items)):
        if slot.kind not in STATES:
            continue
        x, y = a.items.get(slot, ()), b.items.get(slot, ())
        if slot.kind == Kind.PARAM and slot.slot == COPY:
            x, y = copies_in(slot, a, a), copies_in(slot, b, b)
        if x and y:
            plan.comparisons.append(_comparison(slot, x, y, ()))
        elif x or y:
            side = "a" if x else "b"
            plan.one_sided.append(
                OneSided(
                    "a" if x else "b",
                    slot,
                    None,
                    by_rank(x or y),
                    f"only {side} starts with it",
                    diverges=slot.kind == Kind.OPTIMIZER_STATE,
                )
            )


def _comparison(
    slot: Slot,
    a: tuple[Item, ...],
    b: tuple[Item, ...],
    parents: tuple[Ref, ...],
    earlier: tuple[Ref, ...] = (),
) -> Comparison:
    x, y = replica(a), replica(b)
    exact = all(is_exact(i.entry.dtype) for i in (x, y)) or slot.slot == "step"
    copies_a, copies_b = ((), ()) if slot.kind == Kind.BUFFER else (a, b)
    return Comparison(
        slot, None, partial(_load, x, y), (x,), (y,), parents, earlier, exact,
        copies_a=copies_a, copies_b=copies_b,
    )  # fmt: skip


def _load(x: Item, y: Item) -> Assembled | Streamed:
    return paired(one(x), one(y))


def _plan_slot(slot: Slot, pair: StepPair, plan: StepPlan, replays: Replays) -> None:
    a, b = pair.a.items.get(slot, ()), pair.b.items.get(slot, ())
    parents, earlier = _state_parents(slot, pair)
    if slot.kind == Kind.PARAM and slot.slot == "start":
        a = a or pair.before_a.items.get(slot._replace(slot="model"), ())
        b = b or pair.before_b.items.get(slot._replace(slot="model"), ())
    elif slot.kind == Kind.PARAM and slot.slot in (COPY, COPIED):
        a, b = copies_in(slot, pair.a, pair.before_a), copies_in(slot, pair.b, pair.before_b)
    if slot.kind == Kind.BUFFER:  # recorded only where it changed
        a = a or pair.before_a.items.get(slot, ())
        b = b or pair.before_b.items.get(slot, ())
    if not a or not b:
        side, lacking = ("a", pair.gradients_b) if a else ("b", pair.gradients_a)
        unseen = lacking.by_program and _is_unseen(slot, lacking.view)
        plan.one_sided.append(
            OneSided(
                "a" if a else "b",
                slot,
                None,
                by_rank(a or b),
                BY_ITSELF if unseen else f"recorded only in {side}",
                parents=parents,
                earlier=earlier,
                diverges=slot.kind != Kind.BUFFER and not unseen,
                counts=not unseen,
            )
        )
        return
    if slot.kind == Kind.OPTIMIZER_STATE and (is_own_loss(a, pair.a) or is_own_loss(b, pair.b)):
        plan.one_sided.append(
            OneSided("both", slot, None, (*by_rank(a), *by_rank(b)), OWN_LOSS, counts=False)
        )
        return
    plain = _comparison(slot, a, b, parents, earlier)
    if slot.kind == Kind.BUFFER:
        plain = replace(plain, copies_a=_alike(slot, a, pair, pair.a), copies_b=_alike(slot, b, pair, pair.b))
    if slot.slot in (COPY, COPIED):
        plan.comparisons.append(replace(plain, own=copying_error(slot, pair)))
        return
    of_update = slot.kind != Kind.BUFFER and slot.slot != "start"
    quiet = partial(without_noise, slot, pair) if of_update else None
    if pair.evaluations and of_update:
        evaluated = replace(plain, noise=AMPLIFIED, terms=size_of_list(slot, pair.a))
        plan.comparisons.append(replace(evaluated, parents=(*parents, *_summed(pair))))
        return
    noise = noise_of_muon(slot, pair) if of_update else 0.0
    plan.comparisons.append(replace(plain, own=replays.of(slot), quiet=quiet, noise=noise))


def _alike(slot: Slot, held: tuple[Item, ...], pair: StepPair, view: StepView) -> tuple[Item, ...]:
    """Return the ranks' items of a buffer if they have to be equal; () if not.

    A buffer may be each rank's own (running statistics of its rows); a parameter's copy is as the parameter.
    """
    for _, parameter in _averaged(slot.name, pair):
        if {i.ranks for i in held} == {i.ranks for i in view.items.get(parameter, ())}:
            return held
    return ()


def _summed(pair: StepPair) -> tuple[Ref, ...]:
    """Return every parameter's local gradients: an optimizer that evaluates the model may mix them all."""
    names = sorted({*pair.gradients_a.names, *pair.gradients_b.names})
    return tuple((None, window_slot(Kind.LOCAL_GRAD, name, "grad")) for name in names)


def _is_unseen(slot: Slot, view: StepView) -> bool:
    """Tell whether a run without optimizers can't show a state: an optimizer's, or that after its last step.

    What the program does to parameters is seen when it goes on, or ends and still has them.
    """
    if slot.kind == Kind.PARAM:
        return not any(s.slot == "model" for s, _ in view.find(Kind.PARAM))
    return slot.kind == Kind.OPTIMIZER_STATE


def _state_parents(slot: Slot, pair: StepPair) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
    name, call = slot.name, slot.call
    before: tuple[Ref, ...] = ((None, window_slot(Kind.PARAM, name, "model")),)
    states = sorted({s.slot for v in (pair.a, pair.b) for s in v.named(Kind.OPTIMIZER_STATE, name)})
    if slot.kind == Kind.BUFFER:
        return (*_inputs_of_owner(name, pair), *_averaged(name, pair)), ((None, slot),)
    if slot.slot in ("start", COPY):
        return (), (*before, *_averaged(name, pair))  # a program may write averages between steps
    if slot.slot == COPIED:
        return before, ()
    schedule = tuple((None, s) for s in _group_slots(name, call, pair))
    schedule += tuple((None, s) for s in _skips(schedule, pair))
    gradients = [(None, window_slot(kind, name, "grad")) for kind in _consumed(pair)]
    start = (None, window_slot(Kind.PARAM, name, "start"))
    if slot.kind == Kind.OPTIMIZER_STATE:
        own_before = ((None, slot._replace(call=0)),)
        others = () if slot.slot == "step" else (*gradients, start)
        return (*others, *schedule), own_before
    state = tuple((None, window_slot(Kind.OPTIMIZER_STATE, name, s, call)) for s in states)
    return (*gradients, start, *schedule, *state), before


def _consumed(pair: StepPair) -> tuple[Kind, ...]:
    """Return the rungs that an update reads: the last one, or any where a program updates by itself."""
    if pair.gradients_a.by_program or pair.gradients_b.by_program:
        return (Kind.CLIPPED_GRAD, Kind.UNSCALED_GRAD, Kind.REDUCED_GRAD, Kind.LOCAL_GRAD)
    return (Kind.CLIPPED_GRAD,)


def _group_slots(name: str, call: int, pair: StepPair) -> list[Slot]:
    """Return the hyperparameter slots of the groups that hold a parameter, in either run."""
    found: dict[Slot, None] = {}
    for view in (pair.a, pair.b):
        for slot in view.of_member(name):
            if slot.call == call:
                found[slot] = None
                found[slot._replace(slot="members")] = None
    return list(found)


def _averaged(name: str, pair: StepPair) -> tuple[Ref, ...]:
    """Return the parameter that a buffer of a copy of the model (a moving average) is made of, if any."""
    parts = name.split(".")
    for start in range(1, len(parts)):
        slot = window_slot(Kind.PARAM, ".".join(parts[start:]), "model")
        if slot in pair.a.items or slot in pair.b.items:
            return ((None, slot),)
    return ()


def _skips(groups: tuple[Ref, ...], pair: StepPair) -> list[Slot]:
    """Return the slots that tell whether the optimizers of these groups skipped their step."""
    optimizers = {slot.name.partition(".group.")[0] for _, slot in groups}
    views = (pair.a, pair.b)
    found = (s for v in views for s, _ in v.find(Kind.SCHEDULE) if s.slot == "skipped")
    return list(dict.fromkeys(s for s in found if s.name in optimizers))


def _inputs_of_owner(name: str, pair: StepPair) -> tuple[Ref, ...]:
    """Return what was given to the module that owns a buffer: running statistics are made of it."""
    owner = name.rpartition(".")[0] or ROOT
    found: dict[Ref, None] = {}
    for view in (pair.a, pair.b):
        for slot in view.named(Kind.ACTIVATION, owner):
            if slot.phase == "train" and slot.slot.startswith("in."):
                groups = {pair.group(i.part) for i in view.items[slot] if i.part is not None}
                found |= {(group, slot): None for group in groups}
    return tuple(found)


def _plan_schedule(pair: StepPair, plan: StepPlan) -> None:
    views = (pair.a, pair.b)
    plain = {s for v in views for s, items in v.find(Kind.SCHEDULE) if not items[0].entry.meta.members}
    for slot in sorted(plain):
        if slot.slot == "scale":
            continue  # the loss scale enters scale accounting, not the update formula
        a, b = (v.items.get(slot, ()) for v in views)
        earlier = ((None, slot),) if slot.slot == "position" else ()
        if a and b:
            plain_one = _exact(slot, replica(a), replica(b), (), earlier)
            plan.comparisons.append(replace(plain_one, copies_a=a, copies_b=b))
        else:  # a scheduler or scaler that one run does not have shows in the values it would set
            side = "a" if a else "b"
            plan.one_sided.append(
                OneSided("a" if a else "b", slot, None, by_rank(a or b), f"only {side} has it", counts=False)
            )
    _plan_groups(pair, plan)


def _exact(
    slot: Slot, x: Item, y: Item, parents: tuple[Ref, ...], earlier: tuple[Ref, ...] = (), text: str = ""
) -> Comparison:
    return Comparison(slot, None, partial(_load, x, y), (x,), (y,), parents, earlier, exact=True, text=text)


def _plan_groups(pair: StepPair, plan: StepPlan) -> None:
    """Compare hyperparameters per parameter, told per group of ``b`` and distinct pair of values.

    Every rank's own value counts, of either run: stages of a pipeline have groups of one name and other
    parameters.
    """
    values_a, values_b = _per_param(pair.a), _per_param(pair.b)
    positions = tuple((None, s) for s, _ in pair.a.find(Kind.SCHEDULE) if s.slot == "position")
    told: dict[tuple[Slot, str, str], list[tuple[str, Item, Item]]] = defaultdict(list)
    odd_in_a: set[tuple[Slot, str, str]] = set()
    for (name, hyper, call), held in values_b.items():
        found = values_a.get((name, hyper, call), [])
        digests_a, digests_b = ({item.entry.digest for _, item in values} for values in (found, held))
        wrong = [(slot, item) for slot, item in held if item.entry.digest not in digests_a]
        astray = [] if wrong else [item for _, item in found if item.entry.digest not in digests_b]
        for slot, item in (wrong or held[:1]) if found else ():
            same = next((x for _, x in found if x.entry.digest == item.entry.digest), found[0][1])
            for x in astray or [same]:
                key = (slot, x.entry.digest, item.entry.digest)
                told[key].append((name, x, item))
                odd_in_a.update([key] if astray else ())
    compared: set[Slot] = set()
    for key, members in sorted(told.items(), key=lambda e: (e[0][0], len({n for n, *_ in e[1]}))):
        slot, (_, x, y) = key[0], members[0]
        differs = x.entry.digest != y.entry.digest
        if slot in compared and not differs:
            continue  # the other value of a mixed group is already told
        compared.add(slot)
        owners = sorted({name for name, *_ in members})
        names = ", ".join(owners[:3]) + (", …" if len(owners) > 3 else "")
        in_a = key in odd_in_a
        ranks = sorted({(left if in_a else right).source.rank for _, left, right in members})
        run = pair.a if in_a else pair.b
        told_of = f" on rank {', '.join(map(str, ranks))}{' of a' if in_a else ''}"
        where = told_of if differs and set(ranks) < set(_ranks(run)) else ""
        text = f"{slot.slot} of {_parameters(len(owners))}{where} ({names})"
        parents = positions if slot.slot == "lr" or _moves(slot, x, y, pair) else ()
        plan.comparisons = [c for c in plan.comparisons if c.slot != slot] if differs else plan.comparisons
        plan.comparisons.append(_exact(slot, x, y, parents, text=text))
    if not (pair.gradients_a.by_program or pair.gradients_b.by_program):
        _plan_membership(values_a, values_b, plan)


def _moves(slot: Slot, x: Item, y: Item, pair: StepPair) -> bool:
    """Tell whether a hyperparameter is no longer what it was in the step before: a scheduler moves it."""
    sides = ((x, pair.before_a), (y, pair.before_b))
    return any(
        (before := view.items.get(slot, ())) and replica(before).entry.digest != item.entry.digest
        for item, view in sides
    )


def _parameters(count: int) -> str:
    return f"{count} parameter{'s' if count > 1 else ''}"


Values = dict[tuple[str, str, int], list[tuple[Slot, Item]]]
"""What each rank's optimizer read of a parameter's hyperparameter (parameter, hyperparameter, call)."""


def _per_param(view: StepView) -> Values:
    found: Values = defaultdict(list)
    for slot, items in view.find(Kind.SCHEDULE):
        for item in by_rank(items):
            for member in item.entry.meta.members:
                found[(member, slot.slot, slot.call)].append((slot, item))
    return dict(found)


def _ranks(view: StepView) -> set[int]:
    return {rank for _, items in view.find(Kind.SCHEDULE) for item in items for rank in item.ranks}


def _plan_membership(values_a: Values, values_b: Values, plan: StepPlan) -> None:
    """Report parameters that an optimizer updates in one run only."""
    members_a, members_b = ({(n, c) for n, _, c in v} for v in (values_a, values_b))
    for side, missing, values in (
        ("a", members_a - members_b, values_a),
        ("b", members_b - members_a, values_b),
    ):
        by_slot: dict[Slot, list[tuple[str, Item]]] = defaultdict(list)
        for name, call in sorted(missing):
            slot, item = next(v[0] for k, v in values.items() if (k[0], k[2]) == (name, call))
            by_slot[slot._replace(slot="members")].append((name, item))
        for slot, found in by_slot.items():
            names = ", ".join(n for n, _ in found[:3]) + (", …" if len(found) > 3 else "")
            text = f"{_parameters(len(found))} in an optimizer only in {side}: {names}"
            plan.one_sided.append(
                OneSided(
                    "a" if side == "a" else "b",
                    slot,
                    None,
                    (found[0][1],),
                    text,
                    diverges=True,
                    names=tuple(name for name, _ in found),
                )
            )
