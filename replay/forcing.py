"""Teacher forcing: runs a command live on recorded values, and tells every place that errs by itself."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from msgspec import Struct
from msgspec.structs import replace

from tensortrace.diff.catalog import Catalog
from tensortrace.diff.causality import Node
from tensortrace.diff.causes import name_causes
from tensortrace.diff.engine import CompareOptions, compare
from tensortrace.diff.examined import Examined
from tensortrace.diff.execute import Execution
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.result import Result
from tensortrace.diff.verdict import finding, where
from tensortrace.replay.forced import Faulty, Forced, NotForced, Verdict
from tensortrace.replay.places import MODULES, Place, Places, lacks_gradient
from tensortrace.tracer import launch
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.force.ledger import Given, read
from tensortrace.tracer.masking import mask_arguments
from tensortrace.tracer.progress import RankProgress
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.rules import RunLayout, read_text
from tensortrace.tracer.settings import Forced as Kinds
from tensortrace.tracer.settings import Forcing, Settings
from tensortrace.tracer.types import INIT_STEP, Kind, Promise

KINDS: tuple[Kinds, ...] = get_args(Kinds)
DEFAULT: tuple[Kinds, ...] = ("inputs", "activation_grads", "params")

NOT_KEPT = "not kept (-o keeps it)"

MAX_CAUSES, MAX_BOUNDARIES, MAX_NAMES = 24, 8, 3

Forcings = Mapping[tuple[int, Kind, str, str, int], str]
"""Why boundaries were not forced, by step, kind, name, slot and call; "" where they were on all ranks."""


class _Found(NamedTuple):
    """What errs by itself, and how many divergences follow from it.

    ``unlike`` counts modules that differ and computed with parameters which the recorded ones do not fit:
    what they would have made of those isn't known.
    """

    faulty: tuple[Faulty, ...]
    follow: int
    unlike: int


class ForceOptions(Struct, frozen=True):
    """What to force, and how.

    ``layout`` is the layout file of the live run. ``output`` is where its trace is kept, None for nowhere.
    ``jobs`` is how many threads compare.
    """

    kinds: tuple[Kinds, ...] = DEFAULT
    layout: Path | None = None
    output: Path | None = None
    jobs: int = 1


def force(
    path: Path, command: Sequence[str], *, environ: Mapping[str, str], options: ForceOptions | None = None,
    observe: Callable[[tuple[RankProgress, ...]], None] = lambda _: None,
    began: Callable[[], None] = lambda: None,
) -> Forced:  # fmt: skip
    """Run a command that is given what a trace holds, and hold each part's own results against the trace.

    ``began`` is called when all that could be refused was looked at, before the command starts.
    Raises a TraceError where the trace cannot be read or the command cannot run or trains nothing.
    """
    options = options or ForceOptions()
    with Trace.open(path) as trace:
        if not any(entry.step != INIT_STEP for rank in trace.ranks for entry in rank.entries):
            raise BadRequest(f"{path} holds no step to force")
        promise = trace.manifest.promise if trace.manifest else Promise()
    described = None if options.layout is None else read_text(options.layout)
    if described is not None and options.layout is not None:
        RunLayout.parse(described, options.layout)
    with tempfile.TemporaryDirectory(prefix="tensortrace-") as folder:
        live, ledger = options.output or Path(folder) / "live", Path(folder) / "ledger"
        ledger.mkdir()
        settings = Settings(
            root=str(live.absolute()), promise=Promise(steps=promise.steps),
            layout=None if options.layout is None else str(options.layout.absolute()),
            forcing=Forcing(trace=str(path.absolute()), ledger=str(ledger), kinds=options.kinds),
        )  # fmt: skip
        launch.check(command, live)
        began()
        outcome = launch.run(command, settings, environ=environ, observe=observe, described=described)
        if not outcome.ranks:
            raise BadRequest(
                f"the command trained nothing that could be forced (exit code {outcome.exit_code})",
                remedy="give the command that was recorded, or another that trains with PyTorch; where it "
                "failed, mend that first",
            )
        return _judged(path, live, list(read(ledger)), command, options)


def _judged(
    path: Path, live: Path, given: Sequence[Given], command: Sequence[str], options: ForceOptions
) -> Forced:
    forcings = _forcings(given)
    told: list[_Found] = []

    def look(found: Examined) -> None:
        told.append(_faulty(found.execution, found.a, found.b, found.offset, forcings))

    result = compare(
        path, live, options=CompareOptions(jobs=options.jobs), look=look,
        forced=lambda node: is_forced(node, forcings),
    )  # fmt: skip
    faulty, follow, unlike = told[0]
    forced = Counter(key[1].value for key, reason in forcings.items() if not reason)
    missing = tuple(m for m in result.coverage.missing if m.counts_as_incomplete)
    verdict: Verdict = "mismatch" if faulty else "incomplete" if missing or unlike or not forced else "agrees"
    return Forced(
        verdict=verdict,
        headline=_headline(verdict, faulty, forced, unlike, result),
        recorded=result.a,
        live=result.b if options.output else replace(result.b, path=NOT_KEPT),
        command=mask_arguments(command),
        kinds=options.kinds,
        forced=dict(forced),
        not_forced=_not_forced(forcings),
        faulty=faulty,
        compared=result.coverage.compared,
        bitwise_equal=result.coverage.bitwise_equal,
        follow=follow,
        missing=missing,
        notes=result.notes,
        power=result.power,
    )


def _forcings(given: Iterable[Given]) -> Forcings:
    found: dict[tuple[int, Kind, str, str, int], str] = {}
    for line in given:
        key = (line.step, line.kind, line.name, line.slot, line.call)
        found[key] = found.get(key, "") or line.reason
    return found


def is_forced(node: Node, forcings: Forcings) -> bool:
    """Tell whether what is computed of a boundary was computed of the recorded value.

    Parameters are forced when the next window opens, reduced gradients in the place of all that they were
    made of.
    """
    slot = node.slot
    if slot.kind in (Kind.PARAM, Kind.BUFFER):
        steps = (node.step,) if slot.slot == "start" or node.step == INIT_STEP else (node.step + 1,)
        return any(forcings.get((step, slot.kind, slot.name, "model", 0)) == "" for step in steps)
    over_ranks = slot.kind is Kind.REDUCED_GRAD or (slot.kind is Kind.LOCAL_GRAD and node.microbatch is None)
    if over_ranks:
        return forcings.get((node.step, Kind.REDUCED_GRAD, slot.name, "grad", 0)) == ""
    return slot.phase == "train" and forcings.get((node.step, *slot[1:])) == ""


def _faulty(execution: Execution, a: Catalog, b: Catalog, offset: int, forcings: Forcings) -> _Found:
    """Return each place that errs by itself, the first in causal order first, and what is not blamed."""
    places = Places(execution)
    outcomes = sorted(execution.outcomes, key=lambda o: execution.graph.order_key(o.node))
    own = [o for o in outcomes if o.role in ("origin", "further")] or outcomes[:1]
    own = _without_what_follows(own, execution, places)
    kept = {
        Place("module", places.owner(name))
        for (_, kind, name, *_), reason in forcings.items()
        if kind is Kind.PARAM and reason
    }
    unlike: set[Place] = set()
    groups: dict[Place, list[Outcome]] = defaultdict(list)
    for outcome in own:
        place = places.of(outcome)
        if place in kept:
            unlike.add(place)
            continue
        first = next((p for p in groups if p.part == place.part in ("update", "gradients")), place)
        groups[first].append(outcome)
    found = tuple(
        _of_place(place, group, execution, None if number >= MAX_CAUSES else (a, b, offset))
        for number, (place, group) in enumerate(groups.items())
    )
    return _Found(found, len(outcomes) - len(own), len(unlike))


def _without_what_follows(own: Sequence[Outcome], execution: Execution, places: Places) -> list[Outcome]:
    """Leave out what a gradient that never arrives brings about behind it: nothing bounds what follows.

    Parameters of a module that no gradient reaches have none either, and what sums over all gradients
    lacks theirs, in this step and later.
    """
    entries = [(o.node, o.comparison) for o in execution.outcomes if lacks_gradient(o)]
    cut = {(node.step, node.slot.name) for node, _ in entries if node.slot.kind is Kind.ACTIVATION_GRAD}
    cut |= {
        (node.step, node.slot.name)
        for node, gap in execution.gaps
        if node.slot.kind is Kind.ACTIVATION_GRAD and gap.side == "a"
    }
    since = min((node.step for node, _ in entries), default=None)
    found = []
    for outcome in own:
        slot, step = outcome.node.slot, outcome.node.step
        if slot.kind is Kind.LOCAL_GRAD and (step, places.owner(slot.name)) in cut:
            continue
        if since is not None and step >= since and slot.kind not in (*MODULES, Kind.LOSS, Kind.INPUT):
            continue
        found.append(outcome)
    return found


def _of_place(
    place: Place, group: list[Outcome], execution: Execution, runs: tuple[Catalog, Catalog, int] | None
) -> Faulty:
    alone = dataclasses.replace(execution, outcomes=group)  # what errs elsewhere explains nothing here
    causes = () if runs is None else name_causes(group[0], alone, *runs)[0]
    forward, backward = ([o for o in group if _is_backward(o) is way] for way in (False, True))
    ways = [way for way, found in (("forward", forward), ("backward", backward)) if found]
    return Faulty(
        part=place.part,
        name=place.name,
        forward=_greatest(forward),
        backward=_greatest(backward),
        wrong_in=tuple(ways) if place.part in ("module", "between", "loss") else (),
        steps=tuple(dict.fromkeys(where(o.node).step for o in group)),
        first=finding(group[0], "origin", execution),
        causes=causes,
        boundaries=tuple(where(o.node) for o in group[:MAX_BOUNDARIES]),
        count=len(group),
    )


def _is_backward(outcome: Outcome) -> bool:
    slot = outcome.node.slot
    return slot.kind in (Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD) or slot.slot in ("weight",)


def _greatest(group: Sequence[Outcome]) -> float | None:
    found = [o.metrics.rel_l2 for o in group if o.metrics is not None and o.metrics.rel_l2 is not None]
    return max(found, default=None)


def _not_forced(forcings: Forcings) -> tuple[NotForced, ...]:
    groups: dict[tuple[Kind, str], list[str]] = defaultdict(list)
    for (_, kind, name, slot, _), reason in forcings.items():
        if reason:
            groups[kind, reason].append(f"{name} {slot}")
    return tuple(
        NotForced(kind.value, reason, len(names), tuple(dict.fromkeys(names))[:MAX_NAMES])
        for (kind, reason), names in groups.items()
    )


def _headline(
    verdict: Verdict, faulty: Sequence[Faulty], forced: Mapping[str, int], unlike: int, result: Result
) -> str:
    covered = result.coverage
    compared = f"{covered.compared} boundaries compared, {covered.bitwise_equal} bitwise equal"
    if faulty:
        names = ", ".join(words(place) for place in faulty[:4])
        more = f" and {len(faulty) - 4} more" if len(faulty) > 4 else ""
        return f"mismatch: {len(faulty)} of the program's parts err by themselves: {names}{more}"
    if verdict == "agrees":
        return f"agrees: each part makes what was recorded of what was recorded; {compared}"
    if unlike:
        return (
            f"incomplete: {unlike} module{'' if unlike == 1 else 's'} cannot be judged, with parameters that "
            f"the recorded ones do not fit; {compared}"
        )
    why = "boundaries are missing" if forced else "nothing could be forced"
    return f"incomplete: nothing disagrees in what was compared, but {why}; {compared}"


def words(place: Faulty) -> str:
    """Return what a faulty place is called."""
    if place.part == "between":
        return f"{place.name} (its own code between modules)"
    if place.part == "module":
        return place.name
    return f"{place.part} of {place.name}" if place.part != "loss" else f"loss {place.name}"
