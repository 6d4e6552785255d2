"""What a divergent boundary was computed from that no comparison saw: where an origin out of view may lie."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tensortrace.diff.catalog import Catalog
from tensortrace.diff.causality import Node
from tensortrace.diff.execute import Execution
from tensortrace.diff.kinds import PASSES, STATES
from tensortrace.diff.logical import NOT_STORED
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.plan.samples import ROWS
from tensortrace.tracer.selection import Selection
from tensortrace.tracer.types import INIT_STEP, LADDER, ROOT, Kind, Promise

_Chain = tuple[Kind, ...]

_NEEDS: dict[Kind, tuple[_Chain, ...]] = {
    Kind.ACTIVATION: ((Kind.ACTIVATION, Kind.INPUT),),
    Kind.LOSS: ((Kind.ACTIVATION,),),
    Kind.ACTIVATION_GRAD: ((Kind.ACTIVATION_GRAD, Kind.LOSS), (Kind.ACTIVATION,)),
    Kind.LOCAL_GRAD: ((Kind.ACTIVATION_GRAD, Kind.LOSS), (Kind.ACTIVATION,)),
    Kind.REDUCED_GRAD: ((Kind.LOCAL_GRAD,),),
    Kind.UNSCALED_GRAD: ((Kind.REDUCED_GRAD, Kind.LOCAL_GRAD),),
    Kind.CLIPPED_GRAD: ((Kind.UNSCALED_GRAD, Kind.REDUCED_GRAD, Kind.LOCAL_GRAD),),
    Kind.OPTIMIZER_STATE: ((Kind.CLIPPED_GRAD,), (Kind.SCHEDULE,)),
    Kind.PARAM: ((Kind.OPTIMIZER_STATE,), (Kind.CLIPPED_GRAD,), (Kind.SCHEDULE,)),
    Kind.BUFFER: ((Kind.ACTIVATION,),),
}
"""What a boundary of a kind is computed from within a step: of each chain the nearest that was compared tells
for the rest of it."""

_SHOWN = 4


@dataclass(frozen=True)
class Unseen:
    """What was not compared, one sentence each, and the options that would bring it into view."""

    texts: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()


def unseen(outcome: Outcome, execution: Execution, a: Catalog, b: Catalog) -> Unseen:
    """Return what an origin was computed from that was not compared; nothing where it is an origin in view.

    An update that its own recorded inputs do not explain is in view whatever came before.
    """
    node = outcome.node
    judgement = outcome.judgement
    if node.step == INIT_STEP or node.slot.kind in (Kind.INPUT, Kind.SCHEDULE):
        return Unseen()
    if judgement is not None and judgement.reason.startswith("beyond what its own inputs explain"):
        return Unseen()
    found = [
        *_of_kinds(node, execution, a, b),
        *_of_steps(outcome, a, b),
        *_of_names(node, execution, a, b),
        *_of_gaps(node, execution),
        *_of_this_diff(outcome, execution),
    ]
    texts = dict.fromkeys(text for text, _ in found)
    remedies = dict.fromkeys(remedy for _, remedy in found if remedy)
    return Unseen(tuple(texts), tuple(remedies))


def unrecorded(outcome: Outcome, execution: Execution, a: Catalog, b: Catalog) -> bool:
    """Tell whether what was computed from was deselected at record, or is state that could not be compared.

    Then nothing measures what a boundary inherits.
    """
    node = outcome.node
    if node.step == INIT_STEP or node.slot.kind in (Kind.INPUT, Kind.SCHEDULE):
        return False
    lost = _not_compared(execution)
    known = [(p.slot.kind, lost[p]) for p in execution.graph.parents(node) if p in lost]
    if any(kind in STATES or reason.startswith(NOT_STORED) for kind, reason in known):
        return True
    deselected = (
        _of_kinds(node, execution, a, b),
        _of_steps(outcome, a, b),
        _of_names(node, execution, a, b),
    )
    return any(True for found in deselected for _ in found)


_Found = tuple[str, str]


def _of_kinds(node: Node, execution: Execution, a: Catalog, b: Catalog) -> Iterator[_Found]:
    """Yield kinds that were not recorded because --kinds left them out."""
    chains = list(_NEEDS.get(node.slot.kind, ())) if node.slot.slot != "weight" else []
    if node.slot.kind == Kind.ACTIVATION and node.slot.slot.startswith("out") and _owns(node.slot.name, a, b):
        chains.append((Kind.PARAM,))
    known = set(execution.graph.parents(node)) - _not_compared(execution).keys()
    compared = {p.slot.kind for p in known if p.slot != ROWS}
    lacking: dict[Kind, set[str]] = {}
    for chain in chains:
        for kind in chain:
            if kind in compared:
                break
            sides = {side for side, catalog in (("a", a), ("b", b)) if _left_out(kind, catalog)}
            if sides:
                lacking[kind] = sides
    if lacking:
        kinds = ", ".join(kind.value for kind in lacking)
        told = " and ".join(sorted(set().union(*lacking.values())))
        recorded = {k for c in (a, b) for k in promise_of(c).kinds}
        wanted = ",".join(k.value for k in LADDER if k in recorded or k in lacking)
        yield f"{kinds}: not recorded in {told} (--kinds)", f"record with --kinds {wanted}"


def _left_out(kind: Kind, catalog: Catalog) -> bool:
    kinds = promise_of(catalog).kinds
    return bool(kinds) and kind not in kinds and kind.value not in absent_of(catalog)


def _owns(module: str, a: Catalog, b: Catalog) -> bool:
    """Tell whether a module may own parameters: as far as their names are known, it does."""
    names = known_parameters(a) | known_parameters(b)
    return not names or any((name.rpartition(".")[0] or ROOT) == module for name in names)


def _of_steps(outcome: Outcome, a: Catalog, b: Catalog) -> Iterator[_Found]:
    """Yield the state before the first step compared, where recordings begin later than the runs."""
    node, pair = outcome.node, outcome.pair
    if pair is None or (pair.before_a.items and pair.before_b.items):
        return
    names = [*known_parameters(a), *(n for n in known_parameters(b) if n not in known_parameters(a))]
    if node.slot.kind == Kind.ACTIVATION and node.slot.slot.startswith("out"):
        names = [n for n in names if (n.rpartition(".")[0] or ROOT) == node.slot.name]
    elif node.slot.kind in STATES:
        names = [node.slot.name]
    else:
        return
    if names:
        text = f"the state before step {node.step}: not compared ({_listed(names)})"
        yield text, f"record the step before step {node.step} as well (--steps)"


def _of_names(node: Node, execution: Execution, a: Catalog, b: Catalog) -> Iterator[_Found]:
    """Yield modules around the boundary that --include or --exclude left out of a recording."""
    if node.slot.kind not in PASSES or node.slot.slot == "weight":
        return
    for side, catalog in (("a", a), ("b", b)):
        promise = promise_of(catalog)
        if not (promise.include or promise.exclude):
            continue
        modules = _modules_left_out(node, execution, a, b, promise)
        if modules is None:
            continue
        globs = [f"--include {g}" for g in promise.include] + [f"--exclude {g}" for g in promise.exclude]
        known = _listed(modules) or "modules whose names no recording tells"
        near = _nearest(node, execution)
        yield (
            f"{known}: not recorded in {side} ({' '.join(globs)}){near}",
            _remedy(promise, modules),
        )


def _remedy(promise: Promise, modules: Sequence[str]) -> str:
    """Return the options that record modules which globs left out."""
    without = [g for g in promise.exclude if not modules or any(fnmatchcase(m, g) for m in modules)]
    if without:
        return "record without " + " ".join(f"--exclude {shlex.quote(g)}" for g in without)
    wanted = " ".join(f"--include {shlex.quote(m)}" for m in modules[:_SHOWN])
    return f"record with {wanted} as well" if wanted else "record with wider globs"


def _modules_left_out(
    node: Node, execution: Execution, a: Catalog, b: Catalog, promise: Promise
) -> list[str] | None:
    """Return the modules left out that lie between a boundary and what it is known to come from.

    None where none lies there. Modules are known by their parameters, which the optimizer lists in the order
    in which they were made; where that does not tell, all that were left out are returned.
    """
    selection = Selection(promise)
    names = [*known_parameters(a), *(n for n in known_parameters(b) if n not in known_parameters(a))]
    owners = list(dict.fromkeys(name.rpartition(".")[0] or ROOT for name in names))
    left_out = [m for m in owners if not selection.wants(node.slot.kind, m, step=node.step)]
    if node.slot.kind == Kind.LOCAL_GRAD:
        own = node.slot.name.rpartition(".")[0] or ROOT
        return [own] if not selection.wants(Kind.ACTIVATION, own, step=node.step) else None
    if node.slot.kind == Kind.ACTIVATION and node.slot.slot.startswith("out"):
        own_parameters = [n for n in names if (n.rpartition(".")[0] or ROOT) == node.slot.name]
        lost = [n for n in own_parameters if not selection.wants(Kind.PARAM, n, step=node.step)]
        return lost or None
    if not owners:
        return []
    if not left_out:
        return None
    near = [p.slot.name for p in execution.graph.parents(node) if p.slot.kind in PASSES]
    places = sorted(i for n in (node.slot.name, *near) for i in _places(n, owners))
    between = left_out
    if near and len(places) > 1:
        between = [m for m in left_out if places[0] < owners.index(m) < places[-1]]
    return between or None


def _places(module: str, owners: Sequence[str]) -> list[int]:
    inside = [i for i, o in enumerate(owners) if o == module or o.startswith(f"{module}.")]
    return [inside[0], inside[-1]] if inside else []


def _nearest(node: Node, execution: Execution) -> str:
    near = [p.slot for p in execution.graph.parents(node) if p.slot.kind in PASSES and p.slot != ROWS]
    agreeing = [s for s in dict.fromkeys(near)][:_SHOWN]
    return (
        f"; nearest that was: {', '.join(f'{s.kind} {s.name} {s.slot}' for s in agreeing)}"
        if agreeing
        else ""
    )


def _of_gaps(node: Node, execution: Execution) -> Iterator[_Found]:
    """Yield direct parents that one run lacks or that could not be compared."""
    reasons = _not_compared(execution)
    own = [p for p in execution.graph.parents(node) if p in reasons]
    for parent in own[:_SHOWN]:
        slot = parent.slot
        yield f"{slot.kind} {slot.name} {slot.slot}: not compared, {reasons[parent]}", ""


def _not_compared(execution: Execution) -> dict[Node, str]:
    gaps = {node: entry.reason for node, entry in execution.gaps if not entry.diverges}
    return gaps | dict(execution.not_comparable)


def _of_this_diff(outcome: Outcome, execution: Execution) -> Iterator[_Found]:
    """Yield where the difference comes from among what --kinds or --include of the diff left out."""
    todo, seen = [outcome.node], {outcome.node}
    while todo:
        node = todo.pop()
        parents = [p for p in execution.graph.parents(node) if p in execution.apart and p not in seen]
        todo += parents
        seen.update(parents)
    if len(seen) > 1:
        node = min(seen - {outcome.node}, key=execution.graph.order_key)
        at = "init" if node.step == INIT_STEP else f"step {node.step}"
        yield (
            f"{node.slot.kind} {node.slot.name} {node.slot.slot} of {at}: diverges, and was left out here",
            "compare without --kinds and --include",
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def promise_of(catalog: Catalog) -> Promise:
    """Return what a recording selected; everything where nothing is known of it."""
    manifest = next((r.manifest for r in catalog.trace.ranks if r.manifest), None)
    return manifest.promise if manifest else Promise()


def absent_of(catalog: Catalog) -> frozenset[str]:
    """Return the kinds that every rank says its run does not have."""
    declared = [frozenset(r.manifest.absent) for r in catalog.trace.ranks if r.manifest]
    return frozenset.intersection(*declared) if declared else frozenset()


def known_parameters(catalog: Catalog) -> dict[str, None]:
    """Return the names of a run's parameters in order, as optimizers and clips list them, recorded or not."""
    listed: dict[str, None] = {}
    recorded: dict[str, None] = {}
    for source in catalog.trace.ranks:
        for entry in source.entries:
            if entry.kind in (Kind.SCHEDULE, Kind.CLIPPED_GRAD) and entry.meta.members:
                listed |= dict.fromkeys(entry.meta.members)
            elif entry.kind in (Kind.PARAM, Kind.LOCAL_GRAD):
                recorded[entry.name] = None
    return listed | recorded
