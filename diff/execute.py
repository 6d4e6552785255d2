"""Executes a step's plan in causal order: loads, measures, judges, and gives each divergence its role."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from tensortrace.diff.ahead import Ahead, is_equal, is_loaded
from tensortrace.diff.assemble import Assembled, NotComparable
from tensortrace.diff.catalog import Slot
from tensortrace.diff.causality import Graph, Node
from tensortrace.diff.compare import describe
from tensortrace.diff.estimating import measure_loaded
from tensortrace.diff.expect.ledger import Ledger, judge_declared
from tensortrace.diff.expect.rules import Rule
from tensortrace.diff.holders import compute_eps, disagree, disagreement, without_layout
from tensortrace.diff.inherit import Known
from tensortrace.diff.judging import Judge
from tensortrace.diff.kinds import GRADIENTS, STATES
from tensortrace.diff.levels import lacking, most_unseen, refuted, same_digests
from tensortrace.diff.logical import Unkept, Unplaceable
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.overflow import where_finite
from tensortrace.diff.plan.comparison import Comparison, OneSided, StepPlan, is_early, is_late
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.result import Judgement, Metrics
from tensortrace.diff.stream import Streamed, block_of, whole
from tensortrace.diff.tolerance import Error, Measured, judge_exact, judge_model, measure_peak
from tensortrace.tracer.types import Kind

_LOOKED_INTO = frozenset({Kind.ACTIVATION, Kind.ACTIVATION_GRAD})
"""Kinds of which more is noted than how far the two sides are apart."""

_INHERITED = "what it was computed from was not recorded: differences up to"


@dataclass
class Execution:
    """The state of a diff while steps are executed one after another.

    ``apart`` are divergent boundaries that are compared but not told, and come from none that is told.
    ``unrecorded`` tells whether what a boundary was computed from was not recorded. ``equal`` are those whose
    bits are. ``watch`` is given every comparison that was judged by its values. ``forced`` tells of a
    boundary that b was given a's value of, once its own was recorded: what follows inherits nothing of it,
    and ``own`` keeps its error.
    """

    judge: Judge = field(default_factory=Judge)
    outcomes: list[Outcome] = field(default_factory=list)
    not_comparable: list[tuple[Node, str]] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    bitwise_equal: int = 0
    equal: list[Node] = field(default_factory=list)
    judged: list[tuple[Node, Judgement]] = field(default_factory=list)
    gaps: list[tuple[Node, OneSided]] = field(default_factory=list)
    states: dict[Slot, Node] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    apart: dict[Node, None] = field(default_factory=dict)
    unrecorded: Callable[[Outcome], bool] = lambda _: False
    forced: Callable[[Node], bool] = lambda _: False
    own: dict[Node, Error] = field(default_factory=dict)
    progress: Callable[[int, int], None] = lambda done, boundaries: None
    watch: Callable[[Node, Comparison, StepPair, Judgement], None] = lambda *_: None
    executor: Executor | None = None
    workers: int = 0
    ahead: Ahead = field(default_factory=lambda: Ahead(None, 0, ()))

    @property
    def known(self) -> Known:
        """What is known of the boundaries compared so far."""
        return self.judge.known

    @property
    def graph(self) -> Graph:
        """The causal graph over all boundaries planned so far."""
        return self.known.graph

    @property
    def errors(self) -> dict[Node, Error]:
        """The error of each boundary compared so far."""
        return self.known.errors

    def run(self, plan: StepPlan, previous: int | None, pair: StepPair) -> None:
        """Execute one step's plan; ``previous`` is the step before it in a's numbers, None for the first."""
        work: dict[Node, Comparison | OneSided] = {}
        entries: list[Comparison | OneSided] = [*plan.comparisons, *plan.one_sided]
        for entry in entries:
            node = Node(plan.step, entry.microbatch, entry.slot)
            parents = [Node(plan.step, microbatch, slot) for microbatch, slot in entry.parents]
            if previous is not None:
                parents += [self._before(previous, microbatch, slot) for microbatch, slot in entry.earlier]
            self.graph.add(node, parents)
            if isinstance(entry, Comparison) and entry.follows:
                leads = (Node(plan.step, microbatch, slot) for microbatch, slot in entry.follows)
                self.graph.add_leads(node, leads)
            if entry.slot.phase == "eval" and is_early(entry, pair):
                self.graph.add_early(node)
            elif entry.slot.phase == "eval" and is_late(entry, pair):
                self.graph.add_late(node)
            work[node] = entry
        self.states.update({node.slot: node for node in work if node.slot.kind in STATES})
        eps = max(compute_eps(pair.a), compute_eps(pair.b))
        order = [node for node in self.graph.ordered(plan.step) if node in work and node not in self.errors]
        loaded = [e for node in order if isinstance(e := work[node], Comparison) and is_loaded(e)]
        with Ahead(self.executor, self.workers, loaded) as self.ahead:
            for number, node in enumerate(order):
                self.progress(number, len(order))
                self.errors.update({p: self.own[p] for p in self._before_forcing(node)})
                (self._execute if plan.shown(node.slot) else self._execute_apart)(node, work[node], pair, eps)
                for forced in (node, *self._before_forcing(node)):
                    self._force(forced)

    def _before_forcing(self, node: Node) -> list[Node]:
        """Return what was read before another value took its place.

        A parameter that the program writes between steps was made of its own update, as was a reduced
        gradient of the ranks' own.
        """
        slot = node.slot
        made = slot.kind == Kind.REDUCED_GRAD or (slot.kind == Kind.PARAM and slot.slot == "start")
        return [p for p in self.graph.parents(node) if p in self.own] if made else []

    def _force(self, node: Node) -> None:
        if node in self.errors and self.forced(node):
            self.own[node] = self.errors[node]
            self.errors[node] = Error(norm=self.errors[node].norm)

    def _execute_apart(self, node: Node, entry: Comparison | OneSided, pair: StepPair, eps: float) -> None:
        """Compare a boundary for what is computed from it, and tell nothing of it."""
        told: tuple[list[Any], ...] = (
            self.outcomes, self.judged, self.not_comparable, self.gaps, self.equal,
        )  # fmt: skip
        lengths = [len(found) for found in told]
        compared, equal = dict(self.compared), self.bitwise_equal
        self._execute(node, entry, pair, eps)
        declared = [outcome for outcome in self.outcomes[lengths[0] :] if outcome.role == "declared"]
        for found, length in zip(told, lengths, strict=True):
            del found[length:]
        self.outcomes += declared
        self.compared, self.bitwise_equal = compared, equal
        if self.errors[node].diverges and not declared and not self._follows(node):
            self.apart[node] = None

    def _before(self, previous: int, microbatch: int | None, slot: Slot) -> Node:
        """Return the node of the step before; of a state that it left alone, that of the last change."""
        node = Node(previous, microbatch, slot)
        return self.states.get(slot, node) if slot.kind in STATES and node not in self.graph else node

    def _execute(self, node: Node, entry: Comparison | OneSided, pair: StepPair, eps: float) -> None:
        rule = self.ledger.rule_of(node.step, entry)
        if isinstance(entry, OneSided):
            if rule is not None:
                self._tell_declared(node, entry, rule, pair, entry.reason)
            elif entry.diverges:
                role = self._role(node, own=entry.own)
                self._tell_unbounded(Outcome(node, entry, role, None, None, entry.reason, None, pair))
            else:
                self.gaps.append((node, entry))
                self.known.note_unjudged(node)
            return
        if error := without_layout(entry):
            self.not_comparable.append((node, str(error)))
            self.known.note_unjudged(node)
            return
        disagreeing = [
            disagree(*held) for held in ((entry.copies_a, entry.items_a), (entry.copies_b, entry.items_b))
        ]
        if disagreeing[0] != disagreeing[1]:
            self._tell_disagreement(node, entry, pair, "a" if disagreeing[0] else "b")
            return
        if is_equal(entry):
            self._count(node, equal=True)
            self.known.note_equal(node, entry)
            return
        if reason := lacking(entry):
            self._without_values(node, entry, pair, eps, reason)
            return
        overflowed = entry.slot.kind in GRADIENTS and pair.overflowed
        try:
            loaded = self.ahead.take(entry)
            if overflowed or entry.slot.kind in _LOOKED_INTO:
                loaded = whole(loaded)
            self._compare(node, entry, where_finite(loaded) if overflowed else loaded, pair, eps, rule)
        except (NotComparable, Unplaceable) as failed:
            if overflowed:
                text = f"overflowed under the loss scale in a step that both runs skipped: {failed}"
                gap = OneSided("both", entry.slot, entry.microbatch, entry.items_b, text, counts=False)
                self.gaps.append((node, gap))
            elif rule is not None and rule.any_difference:
                self._tell_declared(node, entry, rule, pair, str(failed))
                return
            else:
                self.not_comparable.append((node, str(failed)))
            if isinstance(failed, Unkept):
                self.known.note_unstored(node, entry)
            else:
                self.known.note_unjudged(node)

    def _without_values(
        self, node: Node, entry: Comparison, pair: StepPair, run_eps: float, reason: str
    ) -> None:
        """Judge a boundary whose values were not stored: by digests, or refuted by statistics."""
        if same_digests(entry, same_scheme=pair.same_scheme):
            self._count(node, equal=True)
            self.known.note_equal(node, entry)
            return
        self.not_comparable.append((node, reason))
        self.known.note_unstored(node, entry)
        metrics, eps = refuted(entry), self.judge.eps(node, entry, run_eps)
        if metrics is None or not eps or self.judge.exact:
            return
        measured = Measured(metrics, 0.0, max(self.known.terms(node, entry, (), pair), entry.terms))
        noise = self.judge.noise(node, entry)
        judgement = judge_model(measured, eps, self.known.of_parents(node), noise=noise)
        outcome = Outcome(node, entry, self._role(node, own=False), metrics, judgement, "", pair=pair)
        unseen = measured.error <= most_unseen(node.step, eps) and self.unrecorded(outcome)
        if judgement.ratio <= 1 or unseen:
            return
        self.not_comparable.pop()
        self._count(node, equal=False)
        self.judged.append((node, judgement))
        text = f"at least, by its statistics alone: {describe(metrics, judgement)}"
        self._tell_unbounded(dataclasses.replace(outcome, text=text))

    def _tell_declared(
        self, node: Node, entry: Comparison | OneSided, rule: Rule, pair: StepPair, text: str
    ) -> None:
        """Tell a declared difference of which no number is known: what one run alone has, or other shapes."""
        self.ledger.tally(rule).declared += 1
        self._tell_unbounded(Outcome(node, entry, "declared", None, None, text, None, pair, rule=rule))

    def _tell_disagreement(
        self, node: Node, entry: Comparison, pair: StepPair, side: Literal["a", "b"]
    ) -> None:
        odd, text = disagreement(entry, side)
        judgement = judge_exact(Metrics(elements=0, equal=False, rel_l2=math.inf))
        role = self._role(node, own=False)
        own = odd if side == "b" else ()
        told = Outcome(node, entry, role, None, judgement, text, None, pair, own, disagrees=side)
        self._tell_unbounded(told)

    def _count(self, node: Node, *, equal: bool) -> None:
        self.compared[node.slot.kind] = self.compared.get(node.slot.kind, 0) + 1
        self.bitwise_equal += equal
        if equal:
            self.equal.append(node)

    def _compare(
        self, node: Node, entry: Comparison, loaded: Assembled | Streamed, pair: StepPair, run_eps: float,
        rule: Rule | None = None,
    ) -> None:  # fmt: skip
        if loaded.a.shape != loaded.b.shape:
            shapes = f"{list(loaded.a.shape)} in a, {list(loaded.b.shape)} in b"
            raise NotComparable(f"global shapes differ: {shapes}")
        eps = self.judge.eps(node, entry, run_eps)
        measured, loaded, quick = self.judge.measure(node, entry, loaded, pair, eps)
        metrics = measured.metrics
        self._count(node, equal=metrics.equal)
        noted = measured
        if entry.terms and metrics.norm_a and not metrics.equal and not metrics.estimated:
            # what follows computes with the result, not with its terms
            noted = dataclasses.replace(measured, peak=measure_peak(loaded.blocks(), metrics, 0.0), terms=0.0)
        self.known.note(node, noted, loaded)
        if node.slot.kind == Kind.LOCAL_GRAD and node.slot.slot == "grad":
            self.known.note_gradient(node, measured, loaded, eps)
        judgement, origin = self.judge.judge(node, entry, measured, eps, pair)
        seen = entry.rung if not metrics.estimated else None
        broken = seen() if seen and self.judge.is_blind(node, judgement, measured, eps) else None
        if broken is not None:
            loaded, metrics, judgement, origin = broken.loaded, broken.metrics, broken.judgement, "own"
        if origin == "unknown" and not entry.exact and not self.judge.exact:
            judgement = self.judge.but_for_silent(node, entry, loaded, measured, judgement, eps)
        if judgement.ratio > 1:
            loaded = whole(loaded)
        if judgement.ratio > 1 and origin == "unknown" and entry.quiet and isinstance(loaded, Assembled):
            judgement = self.judge.without_noise(node, entry, loaded, eps) or judgement
        if judgement.ratio > 1 and origin == "unknown" and node.slot.kind == Kind.LOCAL_GRAD and eps:
            judgement = self.judge.in_order(node, entry, loaded.a.shape, measured, judgement, eps, pair)
        self.judged.append((node, judgement))
        self.watch(node, entry, pair, judgement)
        if judgement.ratio <= 1:
            return
        error = self.errors[node]
        rel = math.inf if entry.exact else error.rel  # how far ids or settings are apart bounds nothing
        self.errors[node] = dataclasses.replace(error, rel=rel, diverges=True).as_factor()
        if quick and broken is None:
            metrics = measure_loaded(loaded, eps)  # to be told, extremes included
        role = self._role(node, own=origin == "own")
        bounded = origin == "inputs" or (bool(eps) and self.known.is_bounded(node))
        if role == "receiver" and origin != "inputs" and self._beyond(node, measured, eps):
            role = "further"
        text = describe(metrics, judgement) + (f"; beside {broken.against}" if broken else "")
        if rule is not None:
            agreeing = [e for e in self.known.inherits(node, measured.size) if not e.diverges]
            noise = self.judge.noise(node, entry)
            declared = judge_declared(rule, loaded, measured, eps, agreeing, noise=noise)
            role, judgement, text, rule = self.ledger.settle(rule, (role, judgement, text), declared)
        if role == "origin" and origin != "own" and self._may_be_inherited(node, entry, pair, measured, eps):
            self.errors[node] = error
            return
        large = isinstance(loaded, Streamed) and not metrics.estimated
        window = block_of(metrics.max_abs_at or (), loaded.shape) if large else None
        kept: Assembled | None = None
        if role == "origin" or (role == "further" and self._may_lead(rule)):  # others are many: let go
            kept = loaded.window(window or 0) if isinstance(loaded, Streamed) else loaded
        self._tell(
            Outcome(
                node, entry, role, metrics, judgement, text, kept, pair, shape=loaded.shape, window=window,
                rule=rule, bounded=bounded, against=broken.against if broken else "",
            )
        )  # fmt: skip

    def _may_be_inherited(
        self, node: Node, entry: Comparison, pair: StepPair, measured: Measured, eps: float
    ) -> bool:
        """Tell whether a difference is small enough to come from what was not recorded; list it then.

        Nothing measures what such a boundary inherits: of the first step's it is what modules in between
        may make of round-off, later what an optimizer makes of that.
        """
        most = most_unseen(node.step, eps)
        outcome = Outcome(node, entry, "origin", measured.metrics, None, "", pair=pair)
        if entry.exact or self.judge.exact or measured.error > most or not self.unrecorded(outcome):
            return False
        reason = f"{_INHERITED} {most:.2g} were not judged"
        self.gaps.append(
            (node, OneSided("both", entry.slot, entry.microbatch, entry.items_b, reason, counts=False))
        )
        self.judged[-1] = (node, replace(self.judged[-1][1], power_coherent=most, power_incoherent=most))
        return True

    def _may_lead(self, rule: Rule | None) -> bool:
        """Tell whether a further origin may be the first that was not declared, or needs its cause."""
        return rule is not None or (bool(self.ledger.rules) and all(o.expected for o in self._origins()))

    def _origins(self) -> Iterable[Outcome]:
        return (o for o in self.outcomes if o.role != "receiver")

    def _beyond(self, node: Node, measured: Measured, eps: float) -> bool:
        """Tell whether a divergence exceeds what its diverging inputs may be amplified to."""
        if self._led(node):
            return False
        parents = self.known.inherits(node, measured.size)
        return bool(eps) and self.known.is_bounded(node) and judge_model(measured, eps, parents).ratio > 1

    def _role(self, node: Node, *, own: bool) -> str:
        return "receiver" if not own and self._follows(node) else "origin"

    def _follows(self, node: Node) -> bool:
        """Tell whether a boundary was computed from one that diverges and is told, or comes from such."""
        parents = (p for p in self.graph.parents(node) if p not in self.apart)
        return self._led(node) or any(p in self.errors and self.errors[p].diverges for p in parents)

    def _led(self, node: Node) -> bool:
        """Tell whether a boundary that one follows as a whole diverges, and is told."""
        leads = (p for p in self.graph.leads(node) if p not in self.apart)
        return any(p in self.errors and self.errors[p].diverges for p in leads)

    def _tell(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def _tell_unbounded(self, outcome: Outcome) -> None:
        """Tell a divergence of no known size: nothing bounds what is computed from it."""
        self._tell(outcome)
        self.errors[outcome.node] = Error(math.inf, math.inf, diverges=True)

    def diverged(self, kinds: Iterable[Kind]) -> bool:
        """Tell whether any boundary of these kinds has diverged so far, and not as was declared."""
        wanted = set(kinds)
        return any(o.node.slot.kind in wanted and not o.expected for o in self.outcomes)
