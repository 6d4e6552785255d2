"""The whole diff: opens both traces, aligns steps, executes each step's plan, and states the outcome."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec import Struct

from tensortrace.diff.align import Alignment, align_steps
from tensortrace.diff.catalog import EVIDENCE_KINDS, Catalog, Slot, StepView
from tensortrace.diff.causality import Node
from tensortrace.diff.compare import EPS
from tensortrace.diff.examined import Examined, Nearest
from tensortrace.diff.excuses import excused
from tensortrace.diff.execute import Execution
from tensortrace.diff.expect.ledger import Ledger
from tensortrace.diff.expect.rules import read_rules
from tensortrace.diff.floors import Floor, floor_notes, floor_of
from tensortrace.diff.judging import Judge
from tensortrace.diff.kinds import STATES
from tensortrace.diff.logical import NO_LAYOUT
from tensortrace.diff.plan.comparison import StepPlan
from tensortrace.diff.plan.flat import relate_flat
from tensortrace.diff.plan.gradients import plan_gradients
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.plan.passes import plan_passes
from tensortrace.diff.plan.recompute import plan_recomputed
from tensortrace.diff.plan.samples import plan_lags, plan_rows
from tensortrace.diff.plan.state import plan_init, plan_state
from tensortrace.diff.relaid import laid_out
from tensortrace.diff.result import Result
from tensortrace.diff.starts import start_notes
from tensortrace.diff.unlabelled import Rules, resolve
from tensortrace.diff.unseen import unrecorded
from tensortrace.diff.verdict import state_result
from tensortrace.diff.weighing import only_weighing
from tensortrace.tracer.errors import BadRequest, DamagedTrace
from tensortrace.tracer.nearest import meant, nearest_to_glob
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.reader_check import torn_ends
from tensortrace.tracer.types import INIT_STEP, Kind

Progress = Callable[[float, int], None]
"""Called with (steps done, with what is done of the one at work; steps in all)."""


class CompareOptions(Struct, frozen=True):
    """What to compare and how to judge it.

    ``floor`` are traces of runs of a's own code. ``allow_missing``, ``include``, ``exclude`` are globs on
    canonical names; ``align`` is ``b:0=a:100``; ``verify`` reads every byte first, since equal digests need
    no reading. ``layout_a`` (which is the floors' too) and ``layout_b`` are layout files, in the place of
    recorded ones. ``expect`` declares differences: files of rules, or rules such as ``schedule * lr``.
    ``jobs`` is how many threads read and compare. What ``a`` recorded after step ``until`` is left out.
    """

    policy: Literal["error-model", "exact"] = "error-model"
    floor: tuple[Path, ...] = ()
    allow_missing: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    align: str | None = None
    verify: bool = False
    layout_a: Path | None = None
    layout_b: Path | None = None
    expect: tuple[str, ...] = ()
    jobs: int = 1
    until: int | None = None


def compare(
    a: Path | str, b: Path | str, *, options: CompareOptions | None = None, progress: Progress | None = None,
    executor: Executor | None = None, look: Callable[[Examined], None] | None = None,
    forced: Callable[[Node], bool] = lambda _: False,
) -> Result:  # fmt: skip
    """Compare two traces and name the first divergent boundary and its cause.

    ``options.jobs`` beyond the first read ahead on threads, or on a given ``executor`` of this process; what
    comes out is the same for any number. ``look`` is called with the finished comparison while the traces are
    still open. ``forced`` tells of which boundaries b was given a's values.

    >>> from tensortrace import diff
    >>> if not (result := diff.compare("a", "b")):
    ...     print(result.first_divergent.where)
    step 1, microbatch 0: activation hidden out
    >>> bool(diff.compare("a", "b", options=diff.CompareOptions(kinds=("input",))))
    True

    Raises a TraceError where a trace cannot be read or the request makes no sense.
    """
    options = options or CompareOptions()
    read_rules(options.expect)  # a wrong option is told before the work starts
    if options.verify:
        _verify(Path(a), Path(b), *options.floor)
    with Trace.open(Path(a)) as opened_a, Trace.open(Path(b)) as opened_b:
        broken = [*torn(opened_a), *torn(opened_b)]
        return compare_opened(
            opened_a, opened_b, options=options, progress=progress, executor=executor, look=look,
            forced=forced, told=broken,
        )  # fmt: skip


def compare_opened(
    opened_a: Trace, opened_b: Trace, *, options: CompareOptions, progress: Progress | None = None,
    executor: Executor | None = None, look: Callable[[Examined], None] | None = None,
    forced: Callable[[Node], bool] = lambda _: False, told: Sequence[str] = (),
) -> Result:  # fmt: skip
    """Compare two opened traces, which may be parts of what was recorded; otherwise as ``compare``.

    ``told`` are notes that are said before all others.
    """
    rules = read_rules(options.expect)
    with ExitStack() as stack:
        trace_a, notes_a = laid_out(opened_a, options.layout_a)
        trace_b, notes_b = laid_out(opened_b, options.layout_b)
        floors, of_floors = _floors(trace_a, options)
        judge = Judge(exact=options.policy == "exact", floors=floors)
        execution = Execution(judge, ledger=Ledger(rules), forced=forced)
        nearest = Nearest()
        if look is not None:
            execution.watch = nearest.keep
        if options.jobs > 1:
            execution.workers = options.jobs - 1
            execution.executor = executor or stack.enter_context(ThreadPoolExecutor(execution.workers))
        left, right = Catalog(trace_a, options.until), Catalog(trace_b)
        of_losses = Catalog.tie(left, right)
        execution.unrecorded = lambda outcome: unrecorded(outcome, execution, left, right)
        alignment = align_steps(left, right, options.align)
        notes = [*told, *alignment.notes]
        notes += [*start_notes(trace_a, trace_b), *notes_a, *notes_b, *of_losses]
        notes += _precision_notes(trace_a, trace_b)
        notes += _execute(execution, left, right, alignment, options, progress)
        notes += of_floors
        notes += floor_notes(judgement for _, judgement in execution.judged)
        narrowed = options.kinds or options.include or options.exclude
        if options.kinds and set(options.kinds) <= {Kind.OPERATION, Kind.OPERATION_GRAD}:
            raise BadRequest(
                "nothing to compare", found="--kinds with operations alone, which are no boundaries",
                remedy="diff without it: where a module diverges, the operations inside it are compared",
            )  # fmt: skip
        names = {node.slot.name for node in execution.errors}
        if not execution.compared and not execution.gaps and narrowed:
            likely = (meant(nearest_to_glob(glob, names)) for glob in options.include)
            raise BadRequest(
                "nothing to compare", found="no boundary that --kinds, --include and --exclude all select",
                remedy=next(filter(None, likely), "list the names with `trace show`"),
            )  # fmt: skip
        notes += _idle(options, names)
        result = state_result(
            execution,
            left,
            right,
            alignment.steps,
            alignment.offset,
            options_text(options),
            notes,
            options.allow_missing,
        )
        if look is not None:
            look(Examined(result, execution, left, right, tuple(alignment.steps), alignment.offset, nearest))
        return result


def torn(trace: Trace) -> list[str]:
    """Return what segments lack behind their last tensor, where what is lost is no tensor."""
    found = (problem for rank in trace.ranks for problem in torn_ends(rank))
    return [f"{problem}: damaged, though every tensor is there; see `trace check`" for problem in found]


def _precision_notes(a: Trace, b: Trace) -> list[str]:
    """Tell where the runs compute in other precisions: they are judged by the coarser one."""
    used = [
        {
            entry.meta.autocast or entry.dtype
            for rank in trace.ranks
            for entry in rank.entries
            if entry.kind is Kind.ACTIVATION and EPS.get(entry.dtype)
        }
        for trace in (a, b)
    ]
    if not all(used) or used[0] == used[1]:
        return []
    left, right = (", ".join(sorted(found)) for found in used)
    return [f"modules compute in {left} in a, in {right} in b: what differs is judged by the coarser"]


def _verify(*paths: Path) -> None:
    """Raise DamagedTrace for the first thing that is wrong with any of the traces."""
    for path in paths:
        for problem in check(path):
            raise DamagedTrace(problem, remedy="`trace check` lists everything that is damaged")


def options_text(options: CompareOptions) -> str:
    """Return the policy in words."""
    if options.floor:
        return f"floor of {len(options.floor)} run(s), error model where the floor is zero, less, or too thin"
    return options.policy


def _floors(a: Trace, options: CompareOptions) -> tuple[dict[Node, Floor], list[str]]:
    """Return what identical code differs by at each boundary over all floor runs, and notes.

    Raises BadRequest for a floor that began elsewhere, or was given other rows: it is no run of a's own code.
    """
    found: dict[Node, list[tuple[float, float, float]]] = {}
    notes = []
    for path in options.floor:
        with Trace.open(Path(path)) as opened:
            again, _ = laid_out(opened, options.layout_a)
            execution = Execution()
            left, right = Catalog(a), Catalog(again)
            _execute(execution, left, right, align_steps(left, right, None), options, None)
            _refuse_another(path, execution)
            notes += _beyond_noise(path.name, execution) if _command(a) != _command(opened) else []
            for node, error in execution.errors.items():
                found.setdefault(node, []).append((error.rel, error.peak, error.factor))
    return {node: floor for node, errors in found.items() if (floor := floor_of(errors))}, notes


def _command(trace: Trace) -> tuple[str, ...]:
    """Return the recorded command without what started the program; () where it is not known."""
    command = trace.manifest.command if trace.manifest else ()
    return next((command[n:] for n, word in enumerate(command) if word.endswith(".py")), command)


def _beyond_noise(name: str, execution: Execution) -> list[str]:
    """Tell of another command's floor that differs as programs do: all that it shows is taken for noise."""
    told = [o for o in execution.outcomes if o.role == "origin" and o.judgement is not None]
    if not told:
        return []
    first = min(told, key=lambda o: execution.graph.order_key(o.node))
    slot, error = first.node.slot, first.metrics.rel_l2 if first.metrics else None
    times = first.judgement.ratio if first.judgement else 0.0
    return [
        f"floor {name} differs from a by {error or 0.0:.2g} at {slot.kind} {slot.name} {slot.slot} of step "
        f"{first.node.step}, {times:.3g} times what correct programs may: is it a run of the same code?"
    ]


def _refuse_another(path: Path, execution: Execution) -> None:
    """Raise where a floor cannot be a run of the same code."""
    began = any(outcome.node.step == INIT_STEP for outcome in execution.outcomes)
    if began or execution.diverged([Kind.INPUT]) or not execution.compared:
        why = "starts from other parameters than a" if began else "was given other rows than a"
        raise BadRequest(
            f"--floor {path} is no run of a's own code",
            found=f"a trace that {why if execution.compared or began else 'shares no boundary with a'}",
            remedy="record a's own command once more",
        )


def _execute(
    execution: Execution,
    a: Catalog,
    b: Catalog,
    alignment: Alignment,
    options: CompareOptions,
    progress: Progress | None,
) -> list[str]:
    """Run all steps in order; return notes. Stops where inputs or the initial state differ."""
    notes: list[str] = []
    offset = alignment.offset
    state_a, state_b = a.view(alignment.before_a), b.view(alignment.before_b)
    previous: int | None = None
    rules = Rules(), Rules()
    if alignment.with_init(a, b):
        plan = StepPlan(INIT_STEP)
        start = resolve(StepPair(state_a, state_b, state_a, state_b), *rules)
        state_a, state_b = start.a, start.b
        plan_init(state_a, state_b, plan)
        execution.run(_selected(excused(plan, a, b, alignment, options.allow_missing), options), None, start)
        previous = INIT_STEP
        if not all(outcome.expected for outcome in execution.outcomes):
            return ["stopped at init: the runs do not start from the same state"]
        if any(NO_LAYOUT in reason for _, reason in execution.not_comparable):
            return [f"stopped at init: ranks hold parts of tensors and {NO_LAYOUT}"]
    first = alignment.steps[0]
    state_a, state_b = _just_before(a, first, state_a), _just_before(b, first - offset, state_b)
    for number, step in enumerate(alignment.steps):
        view_a, view_b = only_weighing(a.view(step), b.view(step - offset))
        if a.is_whole(step) and b.is_whole(step - offset):
            view_a, view_b = _with_unmoved(view_a, state_a), _with_unmoved(view_b, state_b)
        pair_ = resolve(StepPair(view_a, view_b, state_a, state_b), *rules)
        pair_ = _with_forced(pair_, execution, previous)
        plan = StepPlan(step)
        _plan_step(pair_, plan)
        if a.cut_at(step) or b.cut_at(step - offset):
            _keep(_WITHOUT_SUMS, plan, f"step {step} is not whole: what sums over the batch is not compared")
        elif a.lossy or b.lossy:
            _keep(_WITHOUT_SUMS, plan, "boundaries were dropped: what sums over the batch is not compared")
        else:
            plan_lags(pair_, plan)
        if progress:
            execution.progress = partial(_of_step, progress, number, len(alignment.steps))
        execution.run(
            _selected(excused(plan, a, b, alignment, options.allow_missing), options), previous, pair_
        )
        notes += plan.notes
        if progress:
            progress(number + 1, len(alignment.steps))
        if execution.diverged([Kind.INPUT]):
            notes.append(f"stopped at step {step}: the runs were given different inputs")
            break
        previous = step
        state_a, state_b = carried(state_a, pair_.a), carried(state_b, pair_.b)
    notes += [*rules[0].notes("a"), *rules[1].notes("b")]
    return list(dict.fromkeys(notes))


def _of_step(progress: Progress, number: int, steps: int, done: int, boundaries: int) -> None:
    """Tell how much is done, counting the boundaries of the step at work."""
    progress(number + done / boundaries, steps)


_WITHOUT_SUMS = frozenset(Kind) - {
    Kind.LOSS, Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD,
    Kind.CLIPPED_GRAD,
}  # fmt: skip
"""Kinds that can be compared where any part of a sum over the batch, or a token weight, may be lost."""


def _keep(kinds: Container[Kind], plan: StepPlan, note: str) -> None:
    plan.notes.append(note)
    plan.comparisons = [c for c in plan.comparisons if c.slot.kind in kinds]
    plan.one_sided = [o for o in plan.one_sided if o.slot.kind in kinds]


def _plan_step(pair_: StepPair, plan: StepPlan) -> None:
    plan.notes += [*pair_.batch_a.notes, *pair_.batch_b.notes]
    if pair_.pairing.by_order:
        plan.notes.append("some rows did not match by content and were paired by order")
    if pair_.overflowed:
        plan.notes.append(
            f"step {plan.step}: gradients overflowed under the loss scale and both runs skipped the update: "
            "only what is finite in both is compared"
        )
    plan_passes(pair_, plan)
    plan_rows(pair_, plan)
    plan_gradients(pair_, plan)
    plan_recomputed(pair_, plan)
    plan_state(pair_, plan)
    relate_flat(pair_, plan)


_COPY = "copy"
"""What the recorder says of a tensor of a copy of the model (docs/recording.md)."""


def _with_unmoved(view: StepView, before: StepView) -> StepView:
    """Return a step with the copies of the model that only some ranks moved as the other ranks left them.

    A rank records a copy in the windows that change it: without this, a copy that one rank no longer moves
    would go untold until it is used.
    """
    items = dict(view.items)
    for slot, moved in view.find(Kind.BUFFER):
        if moved[0].entry.meta.text == _COPY:
            ranks = {rank for item in moved for rank in item.ranks}
            items[slot] = moved + tuple(i for i in before.items.get(slot, ()) if ranks.isdisjoint(i.ranks))
    return replace(view, items=items)


def _with_forced(pair_: StepPair, execution: Execution, previous: int | None) -> StepPair:
    """Let b's window begin with a's parameters where it was given them."""
    given = {}
    for name in {slot.name for view in (pair_.a, pair_.before_a) for slot, _ in view.find(Kind.PARAM)}:
        model = Slot("window", Kind.PARAM, name, "model", 0)
        was = Node(pair_.a.step, None, model._replace(slot="start"))
        before = [] if previous is None else [Node(previous, None, model)]
        if any(map(execution.forced, (was, *before))) and (held := pair_.a.began_with(name, pair_.before_a)):
            given[name] = held
    return replace(pair_, b=replace(pair_.b, given=given)) if given else pair_


def _just_before(catalog: Catalog, step: int, state: StepView) -> StepView:
    """Return what a run recorded of the step before the first common one, where the other begins there."""
    return catalog.view(step - 1) if step - 1 in catalog.steps else state


def carried(before: StepView, view: StepView) -> StepView:
    """Return a step's state with what it did not record again taken from the step before it."""
    kept = {s: i for s, i in before.items.items() if s.kind in STATES}
    kept = {s: i for s, i in kept.items() if s.slot != "start"}
    return StepView(view.step, kept | dict(view.items), view.parts, view.by_event)


def _selected(plan: StepPlan, options: CompareOptions) -> StepPlan:
    def shown(slot: Slot) -> bool:
        if options.kinds and slot.kind not in options.kinds:
            return False
        included = not options.include or any(fnmatchcase(slot.name, glob) for glob in options.include)
        return included and not any(fnmatchcase(slot.name, glob) for glob in options.exclude)

    return StepPlan(
        plan.step,
        [c for c in plan.comparisons if c.slot.kind not in EVIDENCE_KINDS],
        [o for o in plan.one_sided if o.slot.kind not in EVIDENCE_KINDS],
        plan.notes,
        shown,
    )


def _idle(options: CompareOptions, names: set[str]) -> list[str]:
    """Return a note for each glob that fits no name: a slip of the pen must not hide."""
    told = (
        ("--include", options.include),
        ("--exclude", options.exclude),
        ("--allow-missing", options.allow_missing),
    )
    return [
        f"{option} {glob!r} fits no name of either run" + (f"; {likely}" if likely else "")
        for option, globs in told
        for glob in globs
        if not any(fnmatchcase(name, glob) for name in names)
        for likely in [meant(nearest_to_glob(glob, names))]
    ]
