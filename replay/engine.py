"""The whole oracle replay: opens a trace, holds every step against its contracts, and states the outcome."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import Struct

from tensortrace.diff.catalog import Catalog, Slot, StepView
from tensortrace.diff.engine import carried, torn
from tensortrace.diff.plan.comparison import StepPlan, replica
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.plan.recompute import plan_recomputed
from tensortrace.diff.plan.weights import plan_weights
from tensortrace.diff.relaid import laid_out
from tensortrace.diff.weighing import only_weighing
from tensortrace.replay.clipping import clipping
from tensortrace.replay.continuity import continuity, recomputed, replicas
from tensortrace.replay.contract import EVALUATED, UNPLACED, Contracts, Gap, Step, microbatch_of
from tensortrace.replay.found import OracleCatalog, Replaying
from tensortrace.replay.gradients import gradients
from tensortrace.replay.losses import Weighed, losses, weighed
from tensortrace.replay.modules import Modules, ModuleWork, Versions, hold_modules
from tensortrace.replay.objective import NAMES, Name, Objective, infer
from tensortrace.replay.result import Replay
from tensortrace.replay.schedules import schedule
from tensortrace.replay.state import state_replay
from tensortrace.replay.updates import updates
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import INIT_STEP, Kind

Progress = Callable[[float, int], None]
"""Called with (steps done, steps in all)."""

SAMPLED = 3
"""Of how many steps the objective is inferred."""

GIVEN, MODULES = "it was given", "what modules compute: not executed again"
BEGAN = "what the run began with, which nothing computes"

REASONS: dict[Kind, str] = {
    Kind.INPUT: GIVEN,
    Kind.ACTIVATION: MODULES,
    Kind.ACTIVATION_GRAD: MODULES,
    Kind.LOCAL_GRAD: MODULES,
    Kind.LOSS: MODULES,
    Kind.BUFFER: "what a buffer holds follows from its module or the program",
    Kind.RNG: "the state of a generator",
    Kind.COLLECTIVE: "what a collective was given and gave: evidence for gradients",
    Kind.OPERATION: "an operation inside a module",
    Kind.OPERATION_GRAD: "an operation inside a module",
}
"""Why a kind has no contract."""

OTHER = "nothing that was recorded says what it should be"


class ReplayOptions(Struct, frozen=True):
    """What is known of the run beside its trace.

    ``objective`` is one of ``NAMES``, None to infer it; ``layout`` a layout file; ``modules`` says whether
    what modules compute is executed again.
    """

    objective: Name | None = None
    layout: Path | None = None
    modules: Literal["all", "none"] = "all"


def replay(
    path: Path | str, *, options: ReplayOptions | None = None, progress: Progress | None = None
) -> Replay:
    """Hold every boundary of one trace against what its recorded inputs give, in float64.

    Raises a TraceError where the trace cannot be read or holds nothing that can be replayed.
    """
    options = options or ReplayOptions()
    if options.objective not in (None, *NAMES):
        raise BadRequest(
            f"objective {options.objective!r} is not known", remedy=f"choose from {', '.join(NAMES)}"
        )
    with Trace.open(Path(path)) as opened:
        return replay_opened(opened, options=options, progress=progress, told=torn(opened))


def replay_opened(
    opened: Trace, *, options: ReplayOptions, progress: Progress | None = None, told: Sequence[str] = ()
) -> Replay:
    """Replay an opened trace, which may be a part of what was recorded; otherwise as ``replay``.

    ``told`` are notes that are said before all others.
    """
    trace, of_layout = laid_out(opened, options.layout)
    found = Replaying(Catalog(trace), OracleCatalog(trace), notes=[*told, *of_layout])
    modules = Modules.of(opened) if options.modules == "all" else None
    versions = Versions(found.catalog)
    steps = _steps(found)
    objective = _objective(options, steps)
    _replay_init(found)
    began: dict[Slot, tuple[int, int]] = {}
    for number, step in enumerate(steps):
        _replay_step(step, objective, began, found, versions, modules)
        _moved(step.view, began)
        if progress:
            progress(number + 1, len(steps))
    if not found.execution.compared and not found.gaps:
        raise BadRequest(f"{opened.path}: no step that could be replayed was recorded")
    return state_replay(found, objective, [step.view.step for step in steps])


def _steps(found: Replaying) -> list[Step]:
    """Return the steps that every rank recorded whole, each with the state before it."""
    catalog = found.catalog
    steps: list[Step] = []
    before = catalog.view(INIT_STEP)
    began = before if before.items else catalog.view(min(catalog.steps, default=INIT_STEP))
    found.unplaced = _unplaced(began)
    previous = INIT_STEP
    for number in catalog.steps:
        if catalog.cut_at(number):
            found.lost.append(f"step {number} was not recorded to its end by all ranks: not replayed")
            continue
        known = before if number == previous + 1 else StepView(INIT_STEP, {}, (), {})
        view, _ = only_weighing(catalog.view(number), catalog.view(number))
        steps.append(Step(view, known, not steps, found.unplaced))
        before, previous = carried(known, view), number
    if catalog.lossy:
        found.lost.append("boundaries were dropped or lost: what sums over the batch may lack parts of it")
    return steps


def _unplaced(view: StepView) -> frozenset[str]:
    """Return the parameters of which ranks hold different tensors that nothing declares copies."""
    return frozenset(
        slot.name
        for slot, items in view.find(Kind.PARAM)
        if len(items) > 1 and any(item.entry.shard is None for item in items)
        if len({item.entry.digest for item in items}) > 1
    )


def _objective(options: ReplayOptions, steps: list[Step]) -> Objective:
    return infer(steps[:SAMPLED], options.objective)


def _replay_init(found: Replaying) -> None:
    """Hold the copies of what the run began with against each other."""
    view = found.catalog.view(INIT_STEP)
    if not view.items:
        return
    step, contracts = Step(view, view, True, found.unplaced), Contracts()
    for slot, items in view.items.items():
        contracts.gap(slot, items, BEGAN)
    replicas(step, contracts)
    _hold(step, contracts, found)


def _replay_step(
    step: Step, objective: Objective, began: Mapping[Slot, tuple[int, int]], found: Replaying,
    versions: Versions, modules: Modules | None,
) -> None:  # fmt: skip
    contracts = Contracts()
    losses(step, contracts)
    if step.evaluations:
        _without_gradients(step, contracts)
    else:
        gradients(step, contracts)
        clipping(step, contracts)
    schedule(step, contracts, began)
    updates(step, contracts)
    continuity(step, contracts)
    replicas(step, contracts)
    weights = weighed(step, objective, contracts)
    work = hold_modules(step, modules, versions, found) if modules is not None else ModuleWork()
    contracts.gaps += work.gaps
    _hold(step, contracts, found, weights.refs | work.told, work.told)
    _weigh(step, weights, found)
    equal, odd = recomputed(step)
    found.recomputed += equal + len(odd)
    found.execution.bitwise_equal += equal


def _without_gradients(step: Step, contracts: Contracts) -> None:
    """Say of no gradient what it is of the window's passes: some evaluate the batch again."""
    for kind in (Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD):
        for slot, items in step.view.find(kind):
            if kind != Kind.LOCAL_GRAD or slot.slot == "start":
                contracts.gap(slot, items, EVALUATED)


def _hold(
    step: Step,
    contracts: Contracts,
    found: Replaying,
    weights: frozenset[tuple[int | None, Slot]] = frozenset(),
    done: AbstractSet[tuple[int | None, Slot]] = frozenset(),
) -> None:
    """Compare what is there with what the contracts say, and note what they say nothing of."""
    contracts.without(step.unplaced, UNPLACED)
    kept = contracts.together()
    expected = step.with_expected(kept, found.oracle.expected.get(step.view.step))
    found.oracle.expected[step.view.step] = expected
    plan = StepPlan(step.view.step, [c.comparison() for c in kept], list(contracts.odd))
    pair = StepPair(expected, step.view, step.before, step.before)
    plan_recomputed(pair, plan)
    found.execution.run(plan, None, pair)
    found.notes += contracts.notes
    told = contracts.told | weights
    replayed = {(c.microbatch, c.slot) for c in kept} | {(o.microbatch, o.slot) for o in contracts.odd} | done
    for gap in dict.fromkeys(contracts.gaps):
        if (gap.microbatch, gap.slot) not in replayed:
            found.gaps.append((step.view.step, gap))
    found.gaps += [(step.view.step, gap) for gap in _untold(step, told)]


def _untold(step: Step, told: set[tuple[int | None, Slot]]) -> Iterator[Gap]:
    """Yield the recorded boundaries of which no contract says anything."""
    for slot, items in step.view.items.items():
        for microbatch in dict.fromkeys(map(microbatch_of, items)):
            if (microbatch, slot) not in told:
                yield Gap(slot, microbatch, REASONS.get(slot.kind, OTHER))


def _weigh(step: Step, weights: Weighed, found: Replaying) -> None:
    """Hold what tokens weigh in the gradient against what they should."""
    found.said += weights.said
    if weights.view is None:
        return
    pair = StepPair(weights.view, step.view, step.before, step.before)
    plan = StepPlan(step.view.step)
    plan_weights(pair, plan)
    plan.comparisons = [
        replace(entry, text="by the objective", noise=max(entry.noise, weights.noise))
        for entry in plan.comparisons
    ]
    gaps, plan.one_sided = plan.one_sided, []
    found.execution.run(plan, None, pair)
    if not plan.comparisons:
        reason = gaps[0].reason if gaps else "the rows that tokens belong to are not known"
        found.gaps += [(step.view.step, Gap(slot, microbatch, reason)) for microbatch, slot in weights.refs]
    expected = found.oracle.expected[step.view.step]
    items = expected.items | {slot: weights.view.items[slot] for _, slot in weights.refs}
    found.oracle.expected[step.view.step] = replace(expected, items=items)


def _moved(view: StepView, began: dict[Slot, tuple[int, int]]) -> None:
    """Count one more window behind the first position of each scheduler."""
    for slot, (position, windows) in list(began.items()):
        began[slot] = position, windows + 1
    for slot, items in view.find(Kind.SCHEDULE):
        if slot.slot == "position" and slot not in began:
            began[slot] = int(np.ravel(replica(items).read())[0]), 1
