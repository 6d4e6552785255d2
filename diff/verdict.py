"""States the outcome: verdict, headline, origins in causal order, coverage, causes."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
from msgspec.structs import replace

from tensortrace.diff.catalog import Catalog, Part
from tensortrace.diff.causality import Node
from tensortrace.diff.declared import Settled, causes_of, downstream, expectations, settle
from tensortrace.diff.execute import Execution
from tensortrace.diff.kinds import GRADIENTS
from tensortrace.diff.levels import RECORD_IN_FULL, RECORD_THERE, levels_told
from tensortrace.diff.localise import localise
from tensortrace.diff.logical import NO_LAYOUT, NOT_STORED
from tensortrace.diff.operations import Looked, first_operation, where_to_look
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.owners import ranks_at_fault
from tensortrace.diff.plan.comparison import OneSided
from tensortrace.diff.result import (
    Cause,
    Coverage,
    Declared,
    Finding,
    Judged,
    Missing,
    Operation,
    Power,
    Result,
    Role,
    Side,
    StepLabel,
    Verdict,
    Where,
)
from tensortrace.diff.roots import loss_first, objective
from tensortrace.diff.uncalled import uncalled
from tensortrace.diff.unseen import Unseen, unseen
from tensortrace.tracer.layout import MANIFEST
from tensortrace.tracer.types import INIT_STEP, LADDER, Kind

MAX_ORIGINS, MAX_RECEIVERS, MAX_EXAMPLES, MAX_INPUTS = 200, 200, 3, 8


def state_result(
    execution: Execution,
    a: Catalog,
    b: Catalog,
    steps: Sequence[int],
    offset: int,
    policy: str,
    notes: Sequence[str],
    allow_missing: Sequence[str],
) -> Result:
    """Return the result of an executed diff."""
    settled = settle(execution, a, b, offset)
    origins = loss_first(_origins(settled))
    first_told = {
        id(o) for o in origins
    }  # to compare outcomes, field by field, takes long where they are many
    receivers = [o for o in settled.outcomes if o.role == "receiver" and id(o) not in first_told]
    stopped = any(note.startswith("stopped") for note in notes)
    coverage = _coverage(execution, a, b, steps, offset, allow_missing, stopped=stopped)
    causes, failed = causes_of(origins[0], execution, a, b, offset) if origins else ((), ())
    told = all(cause.code == "boundary.missing" for cause in causes)
    if origins and told and (call := uncalled(origins[0], execution, a, b)):
        origins = [call, *origins]
        causes, failed = causes_of(call, execution, a, b, offset)
    elif origins and (start := objective(origins[0], execution)):
        gradient = origins[0]
        origins, follow = _before_gradients(start, origins)
        receivers = [*follow, *receivers]
        found, failed = causes_of(start, execution, a, b, offset)
        causes = found or _of_gradients(gradient, causes)
    looked = first_operation(origins[0], execution, a, b, offset) if origins else Looked()
    verdict: Verdict = "divergent" if origins else "equivalent" if coverage.complete else "incomplete"
    findings = tuple(finding(o, "origin", execution) for o in origins[:MAX_ORIGINS])
    hidden = unseen(origins[0], execution, a, b) if origins else Unseen()
    inside = bool(origins) and not looked.covered and looked.operation is None and not hidden.texts
    look = where_to_look(origins[0], offset) if inside else None
    if findings:
        findings = (replace(findings[0], unseen=hidden.texts), *findings[1:])
    first = findings[0] if findings else None
    declared = _declared(settled, execution)
    return Result(
        verdict=verdict,
        headline=_headline(
            verdict, first, _explained(looked.operation, causes), coverage, declared, levels_told(a, b)
        ),
        a=side_of(a, steps),
        b=side_of(b, [s - offset for s in steps]),
        first_divergent=first,
        causes=tuple(causes),
        origins=findings,
        receivers=tuple(finding(o, "receiver", execution) for o in receivers[:MAX_RECEIVERS]),
        receivers_total=len(receivers),
        coverage=coverage,
        policy=policy,
        notes=(*notes, *settled.notes, *looked.notes, *failed),
        hints=(
            *_hints(first, coverage),
            *_to_see(hidden),
            *_to_store(first, coverage),
            *_to_look_inside(look),
        ),
        power=power_of(execution),
        step_offset=offset,
        declared=declared,
        operation=looked.operation,
        boundaries=tuple(Judged(where(node), judgement) for node, judgement in execution.judged),
    )


def _origins(settled: Settled) -> list[Outcome]:
    """Return the origins that were not declared, the headline first, then those that are doubtful.

    What lies beyond what declared differences explain is as good as any other.
    """
    origins = [o for o in settled.outcomes if o.role == "origin"]
    further = [o for o in settled.outcomes if o.role == "further"]
    if settled.declared:
        return [o for o in settled.outcomes if o.role in ("origin", "further")]
    return [*(origins or settled.outcomes[:1]), *(o for o in further if origins or o != settled.outcomes[0])]


def _of_gradients(origin: Outcome, causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """Return what a gradient tells of the term that it comes from, said of the gradient."""
    slot = origin.node.slot
    where = f"{slot.kind} {slot.name} {slot.slot}"
    return tuple(replace(c, text=c.text if slot.kind in c.text else f"{where}: {c.text}") for c in causes)


def _before_gradients(start: Outcome, origins: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """Return the origins with what backward starts from first, and those that are its gradients."""
    follow = [o for o in origins if o.node.step == start.node.step and o.node.slot.kind in GRADIENTS]
    left = {id(o) for o in follow}
    return [start, *(o for o in origins if id(o) not in left)], follow


def _declared(settled: Settled, execution: Execution) -> Declared | None:
    """Return what was declared and what follows from it; None where nothing was."""
    if not execution.ledger.rules:
        return None
    found = settled.declared
    follow = downstream(execution, settled.outcomes)
    return Declared(
        expectations(execution),
        tuple(finding(o, "declared", execution) for o in found[:MAX_ORIGINS]),
        len(found),
        len(follow),
        sum(not o.bounded for o in follow),
    )


def where(node: Node) -> Where:
    """Return a node as it is shown to people."""
    step: StepLabel = "init" if node.step == INIT_STEP else node.step
    slot = node.slot
    return Where(step, node.microbatch, slot.kind.value, slot.name, slot.slot, slot.call)


def finding(outcome: Outcome, role: Role, execution: Execution) -> Finding:
    """Return a divergence as it is told."""
    entry = outcome.comparison
    items = entry.items if isinstance(entry, OneSided) else entry.items_b
    only_a = isinstance(entry, OneSided) and entry.side == "a"
    items_a = entry.items_a if not isinstance(entry, OneSided) else items if only_a else ()
    source = next((i.entry.meta.source for i in items if i.entry.meta.source), None)
    text = f"{entry.text}: {outcome.text}" if not isinstance(entry, OneSided) and entry.text else outcome.text
    return Finding(
        where=where(outcome.node),
        role=role,
        ranks=outcome.ranks or ranks_at_fault(outcome, items),
        text=text,
        metrics=outcome.metrics,
        judgement=outcome.judgement,
        dtype_a=items_a[0].entry.dtype if items_a else None,
        dtype_b=items[0].entry.dtype if items and not only_a else None,
        shape=outcome.shape,
        source=source,
        inputs=_inputs(outcome, execution),
        evidence=_evidence(outcome),
        location=localise(outcome) if role == "origin" else None,
    )


def _inputs(outcome: Outcome, execution: Execution) -> tuple[str, ...]:
    """Return what the boundary was computed from, the worst first, with each input's own error."""
    parents = [
        (execution.errors[n], n) for n in execution.graph.parents(outcome.node) if n in execution.errors
    ]
    gaps = {node for node, _ in (*execution.not_comparable, *execution.gaps)}
    shown = sorted(parents, key=lambda e: (-e[0].rel, e[1].slot.name))[:MAX_INPUTS]
    return tuple(
        f"{n.slot.kind} {n.slot.name} {n.slot.slot}: "
        + ("was not compared" if n in gaps else "diverges" if e.diverges else f"agrees ({e.rel:.2g})")
        for e, n in shown
    )


def _evidence(outcome: Outcome) -> tuple[str, ...]:
    if outcome.window is not None:
        block = outcome.assembled.shape if outcome.assembled else ()
        return (f"causes were sought in the block of {list(block)} elements that holds the worst one",)
    if outcome.node.slot.slot != "weight" or outcome.pair is None:
        return ()
    lines = []
    for side, weights in (("a", outcome.pair.weights_a), ("b", outcome.pair.weights_b)):
        for part, weight in sorted({**weights.weight, **weights.broken}.items()):
            lines.append(
                f"{side}: rank {part.rank} microbatch {part.number}: {_weight(part, weight, weights.count)}"
            )
    return tuple(lines)


def _weight(part: Part, weight: float | None, counts: dict[Part, int]) -> str:
    tokens = f" ({counts[part]} valid tokens)" if part in counts else ""
    if weight is None:
        return f"no single token weight{tokens}"
    if not weight or not math.isfinite(weight):
        return f"each token weighs {weight:g}{tokens}"
    return f"each token weighs {weight:.6g} = 1/{1 / weight:.6g}{tokens}"


def side_of(catalog: Catalog, steps: Sequence[int]) -> Side:
    """Return a trace as the headline shows it."""
    trace = catalog.trace
    ended = sorted({(r.manifest.ended if r.manifest else None) or "did not finish" for r in trace.ranks})
    microbatches = catalog.view(steps[0]).last_microbatch() + 1 if steps else 0
    return Side(
        str(trace.path),
        len(trace.ranks),
        len(catalog.steps),
        microbatches,
        ", ".join(ended),
        tuple(trace.problems),
    )


def _headline(
    verdict: str,
    first: Finding | None,
    cause: str | None,
    coverage: Coverage,
    declared: Declared | None,
    levels: str,
) -> str:
    if verdict == "equivalent" and declared and declared.total:
        return (
            f"equivalent but for what was declared: {declared.total} boundaries differ as declared and "
            f"{declared.downstream} because of them ({declared.unjudged} of these not judged), no other"
        )
    if verdict == "equivalent":
        return f"equivalent: {coverage.compared} boundaries compared, {coverage.bitwise_equal} bitwise equal"
    if first is None and any(NO_LAYOUT in missing.reason for missing in coverage.missing):
        return (
            f"incomplete: ranks hold different parts of tensors, and {NO_LAYOUT}: see `trace layout --help`"
        )
    if first is None and any(NOT_STORED in missing.reason for missing in coverage.missing):
        return f"incomplete: nothing diverges in what was compared, but values were not stored: {levels}"
    if first is None:
        return "incomplete: nothing diverges in what was compared, but boundaries are missing"
    at = first.where
    window = f", microbatch {at.microbatch}" if at.microbatch is not None else ""
    place = f"step {at.step}{window}: {at.kind} {at.name} {at.slot}"
    out_of_view = "no origin in view; " if first.unseen else ""
    return f"divergent at {place}: {cause or f'unexplained; {out_of_view}{first.text}'}"


def _explained(operation: Operation | None, causes: Sequence[Cause]) -> str | None:
    """Return the operation at which the runs part and the first cause, as far as they are known."""
    found = [f"first divergent operation: {operation.text}"] if operation else []
    return "; ".join([*found, *(cause.text for cause in causes[:1])]) or None


def _to_store(first: Finding | None, coverage: Coverage) -> tuple[str, ...]:
    """Return how to have the values of a divergence that sketches, or less, were stored of."""
    estimated = first is not None and first.metrics is not None and first.metrics.estimated
    lost = first is not None and any(NOT_STORED in missing.reason for missing in coverage.missing)
    return (RECORD_THERE,) if estimated or lost else ()


def _to_look_inside(options: str | None) -> tuple[str, ...]:
    if options is None:
        return ()
    return (f"which operation it is, both runs tell when recorded with: trace record {options}",)


def power_of(execution: Execution) -> Power | None:
    """Return what the comparison could see; None where nothing was judged by a tolerance."""
    by_tolerance = [(n, j) for n, j in execution.judged if j.power_incoherent]
    judged = [(n, j) for n, j in by_tolerance if not j.cancelled]
    if not judged:
        return None
    node, weakest = max(judged, key=lambda e: e[1].power_incoherent or 0.0)
    coherent = [j.power_coherent for _, j in judged if j.power_coherent]
    incoherent = [j.power_incoherent for _, j in judged if j.power_incoherent]
    return Power(
        weakest.power_coherent,
        weakest.power_incoherent,
        where(node),
        float(np.median(coherent)) if coherent else None,
        float(np.median(incoherent)),
        len(by_tolerance) - len(judged),
    )


def _hints(first: Finding | None, coverage: Coverage) -> tuple[str, ...]:
    if first is None:
        lost = [m for m in coverage.missing if m.counts_as_incomplete and m.kind not in ("any", "step")]
        names = dict.fromkeys(place.name for m in lost for place in m.examples[:1])
        if any(NOT_STORED in m.reason for m in lost):
            return (RECORD_IN_FULL,)
        if not names or any(NO_LAYOUT in m.reason for m in lost):
            return ()
        globs = " ".join(f"--allow-missing {shlex.quote(name)}" for name in list(names)[:4])
        return (f"what need not be compared may be left out by name, as in {globs}",)
    if first.where.step == "init":
        return (
            "the runs start from different states: load the same checkpoint or seed in both, or record b "
            "with --init-from a, or both with --consistent-init 0 (docs/start.md)",
        )
    if first.where.kind == "input":
        return (
            "the runs were fed different rows: fix the sampler, or align steps with --align b:STEP=a:STEP",
        )
    return ()


def _to_see(hidden: Unseen) -> tuple[str, ...]:
    """Return how to bring into view what was not compared."""
    if not hidden.texts:
        return ()
    how = f": {'; '.join(hidden.remedies)}" if hidden.remedies else ""
    return (f"the first divergent boundary is the first in view, and the origin may lie before it{how}",)


def _coverage(
    execution: Execution,
    a: Catalog,
    b: Catalog,
    steps: Sequence[int],
    offset: int,
    allow_missing: Sequence[str],
    *,
    stopped: bool,
) -> Coverage:
    groups: dict[tuple[str, str, str, bool], list[Node]] = defaultdict(list)
    for node, entry in execution.gaps:
        if not entry.diverges:
            groups[(entry.side, node.slot.kind, entry.reason, _counts(node, entry, a, b))].append(node)
    computed = set(execution.compared) - {Kind.INPUT}
    for node, reason in execution.not_comparable:
        counts = not computed or _needs_met(node, a, b, offset)  # where nothing else was compared, all counts
        groups[("both", node.slot.kind, reason, counts)].append(node)
    missing = [
        Missing(
            side="a" if side == "a" else "b" if side == "b" else "both",
            kind=kind,
            reason=reason,
            count=len(nodes),
            examples=tuple(where(n) for n in nodes[:MAX_EXAMPLES]),
            counts_as_incomplete=counts and not all(_allowed(n, allow_missing) for n in nodes),
        )
        for (side, kind, reason, counts), nodes in groups.items()
    ]
    if not stopped:
        missing += _lost_steps(a, b, steps, offset)
    missing += lost_records(a, "a") + lost_records(b, "b")
    by_kind = {
        kind.value: execution.compared[kind] for kind in (*LADDER, Kind.BUFFER) if kind in execution.compared
    }
    compared = sum(by_kind.values())
    complete = not any(m.counts_as_incomplete for m in missing) and compared > 0
    return Coverage(compared, execution.bitwise_equal, by_kind, tuple(missing), complete)


def _allowed(node: Node, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(node.slot.name, glob) for glob in globs)


def _counts(node: Node, entry: OneSided, a: Catalog, b: Catalog) -> bool:
    """Tell whether a one-sided boundary was promised by the side that lacks it."""
    lacking = b if entry.side == "a" else a
    return entry.counts and lacking.promised(node.slot.kind, node.slot.name, node.step)


def _needs_met(node: Node, a: Catalog, b: Catalog, offset: int) -> bool:
    """Tell whether both runs promised what bringing a boundary to one order and scale takes."""
    needs = {node.slot.kind, Kind.INPUT}
    if node.slot.kind in GRADIENTS or node.slot.slot == "weight":
        needs |= {Kind.LOSS, Kind.LOCAL_GRAD, Kind.CLIPPED_GRAD}
    return all(
        c.promised(k, node.slot.name, s) for k in needs for c, s in ((a, node.step), (b, node.step - offset))
    )


def _lost_steps(a: Catalog, b: Catalog, steps: Sequence[int], offset: int) -> list[Missing]:
    found = []
    for side, catalog, shift in (("a", a, 0), ("b", b, offset)):
        extra = [s for s in catalog.steps if s + shift not in steps and s + shift > steps[0]]
        if extra:
            other = "b" if side == "a" else "a"
            reason = f"steps {extra[0]}-{extra[-1]} were recorded only in {side}; {other} has no such step"
            lacking = b if side == "a" else a
            counts = any(
                lacking.promised(Kind.PARAM, "", s + (-offset if side == "a" else offset)) for s in extra
            )
            found.append(Missing("a" if side == "a" else "b", "step", reason, len(extra), (), counts))
    return found


def lost_records(catalog: Catalog, side: str) -> list[Missing]:
    """Report what a rank promised and could not store, and ranks whose recording did not finish."""
    found = []
    label = "a" if side == "a" else "b"
    for source in catalog.trace.ranks:
        manifest = source.manifest
        if manifest and manifest.drops.count:
            reasons = ", ".join(f"{n} {why}" for why, n in manifest.drops.reasons.items())
            reason = f"rank {source.rank} dropped boundaries: {reasons}"
            found.append(Missing(label, "any", reason, manifest.drops.count, (), True))  # type: ignore[arg-type]
        if manifest and len(source.entries) < manifest.boundaries:
            count = manifest.boundaries - len(source.entries)
            reason = f"{count} of {manifest.boundaries} boundaries of rank {source.rank} are lost"
            found.append(Missing(label, "any", reason, count, (), True))  # type: ignore[arg-type]
        lost = sum(entry.blob is not None and not source.stored(entry) for entry in source.entries)
        if lost:
            reason = f"{lost} tensors of rank {source.rank} are lost: a segment is missing or cut off"
            found.append(Missing(label, "any", reason, lost, (), True))  # type: ignore[arg-type]
        ended = manifest.ended if manifest else None
        if ended != "finished":
            how = ended or "it was killed or still runs"
            reason = f"the recording of rank {source.rank} did not finish: {how}"
            found.append(Missing(label, "any", reason, 1, (), True))  # type: ignore[arg-type]
    expected = max(
        (r.manifest.world_size for r in catalog.trace.ranks if r.manifest), default=len(catalog.ranks)
    )
    if expected > len(catalog.ranks):
        absent = sorted(set(range(expected)) - set(catalog.ranks))
        reason = f"no recording of rank {', '.join(map(str, absent))} of {expected}"
        found.append(Missing(label, "any", reason, len(absent), (), True))  # type: ignore[arg-type]
    command = catalog.trace.manifest
    if command is None:  # another folder may have been lost with it, and how the command ended is not known
        reason = (
            f"{label} has no {MANIFEST}: which ranks its run had, and how it ended, is not known for sure"
        )
        found.append(Missing(label, "any", reason, 1, (), True))  # type: ignore[arg-type]
    elif not found and command.exit_code:
        reason = f"the command of {label} ended with exit code {command.exit_code}"
        found.append(Missing(label, "any", reason, 1, (), True))  # type: ignore[arg-type]
    return found
