"""Executes a step's plan in causal order: loads, measures, judges, and gives each divergence its role."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensortrace.diff.assemble import Assembled, NotComparable
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.causality import Graph, Node
from tensortrace.diff.compare import EPS, measure
from tensortrace.diff.plan.comparison import Comparison, OneSided, StepPair, StepPlan, coarser_eps
from tensortrace.diff.result import Judgement, Metrics
from tensortrace.diff.scale import WEIGHT_TOLERANCE
from tensortrace.diff.tolerance import (
    Error,
    Measured,
    judge_exact,
    judge_floor,
    judge_model,
    judge_own,
    measure_peak,
)
from tensortrace.tracer.types import Kind

_REPLICAS = frozenset(
    {Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD, Kind.OPTIMIZER_STATE, Kind.PARAM}
)
_BYTES_SUFFICE = frozenset(
    {
        Kind.INPUT,
        Kind.ACTIVATION,
        Kind.SCHEDULE,
        Kind.BUFFER,
        *(_REPLICAS - {Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD}),
    }
)
_PASS_KINDS = frozenset({Kind.ACTIVATION, Kind.LOSS, Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD})

FloorErrors = Mapping[Node, tuple[float, ...]]


@dataclass(frozen=True)
class Outcome:
    """One executed comparison. ``assembled`` is kept only where it diverges."""

    node: Node
    comparison: Comparison | OneSided
    role: str | None
    metrics: Metrics | None
    judgement: Judgement | None
    text: str
    assembled: Assembled | None = None
    pair: StepPair | None = None


@dataclass
class Execution:
    """The state of a diff while steps are executed one after another."""

    exact: bool = False
    floors: FloorErrors = field(default_factory=dict)
    graph: Graph = field(default_factory=Graph)
    errors: dict[Node, Error] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    not_comparable: list[tuple[Node, str]] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    bitwise_equal: int = 0
    judged: list[tuple[Node, Judgement]] = field(default_factory=list)
    row_norms: dict[Node, float] = field(default_factory=dict)
    gaps: list[tuple[Node, OneSided]] = field(default_factory=list)

    def run(self, plan: StepPlan, previous: int | None, pair: StepPair) -> None:
        """Execute one step's plan; ``previous`` is the step before it in a's numbers, None for the first."""
        work: dict[Node, Comparison | OneSided] = {}
        entries: list[Comparison | OneSided] = [*plan.comparisons, *plan.one_sided]
        for entry in entries:
            node = Node(plan.step, entry.microbatch, entry.slot)
            parents = [Node(plan.step, microbatch, slot) for microbatch, slot in entry.parents]
            if previous is not None:
                parents += [Node(previous, microbatch, slot) for microbatch, slot in entry.earlier]
            self.graph.add(node, parents)
            work[node] = entry
        eps = max(_compute_eps(pair.a), _compute_eps(pair.b))
        for node in self.graph.ordered(plan.step):
            if node in work and node not in self.errors:
                self._execute(node, work[node], pair, eps)

    def _execute(self, node: Node, entry: Comparison | OneSided, pair: StepPair, eps: float) -> None:
        if isinstance(entry, OneSided):
            if entry.diverges:
                self._tell(
                    Outcome(node, entry, self._role(node, own=False), None, None, entry.reason, None, pair)
                )
                self.errors[node] = Error(math.inf, math.inf, diverges=True)
            else:
                self.gaps.append((node, entry))
            return
        odd = _odd_ranks(entry.slot, pair.b) if entry.slot.kind in _REPLICAS else ()
        if odd and not _odd_ranks(entry.slot, pair.a):
            ranks = ", ".join(map(str, odd))
            text = f"replicas disagree in b: rank {ranks} differs from rank {_first_rank(pair.b)}"
            judgement = judge_exact(Metrics(elements=0, equal=False, rel_l2=math.inf))
            self._tell(Outcome(node, entry, self._role(node, own=False), None, judgement, text, None, pair))
            self.errors[node] = Error(math.inf, math.inf, diverges=True)
            return
        if entry.same_bytes and entry.slot.kind in _BYTES_SUFFICE:
            self._note_equal(node, entry)
            return
        try:
            loaded = entry.load()
            self._compare(node, entry, loaded, pair, eps)
        except NotComparable as reason:
            self.not_comparable.append((node, str(reason)))

    def _note_equal(self, node: Node, entry: Comparison) -> None:
        stats = entry.items_a[0].entry.stats
        norm = stats.l2 if stats and stats.l2 is not None else 0.0
        shape = entry.items_a[0].entry.local_shape
        self._count(node, equal=True)
        self.errors[node] = Error(norm=norm)
        self.row_norms[node] = norm / math.sqrt(max(math.prod(shape[:-1]), 1))

    def _count(self, node: Node, *, equal: bool) -> None:
        self.compared[node.slot.kind] = self.compared.get(node.slot.kind, 0) + 1
        self.bitwise_equal += equal

    def _compare(
        self, node: Node, entry: Comparison, loaded: Assembled, pair: StepPair, run_eps: float
    ) -> None:
        a, b = loaded.a, loaded.b
        if a.shape != b.shape:
            raise NotComparable(f"global shapes differ: {list(a.shape)} in a, {list(b.shape)} in b")
        eps = self._eps(entry, run_eps)
        metrics = measure(a, b, eps=eps or EPS["float64"])
        if entry.exact and metrics.equal and a.dtype.kind in "iu":  # beyond 2^53 float64 cannot tell
            metrics = metrics if np.array_equal(a, b) else Metrics(metrics.elements, False, rel_l2=2.0**-53)
        terms = self._terms(node, entry, pair)
        measured = Measured(metrics, 0.0 if metrics.equal else measure_peak(a, b, terms), terms)
        self._count(node, equal=metrics.equal)
        self._remember(node, measured, a)
        judgement, own = self._judge(node, entry, measured, eps)
        self.judged.append((node, judgement))
        if judgement.ratio <= 1:
            return
        self.errors[node] = Error(
            self.errors[node].rel, self.errors[node].peak, self.errors[node].norm, diverges=True
        )
        role = self._role(node, own=own)
        if role == "receiver" and self._beyond(node, measured, eps):
            role = "further"
        kept = loaded if role == "origin" else None  # receivers are many: their tensors are let go
        self._tell(Outcome(node, entry, role, metrics, judgement, _describe(metrics, judgement), kept, pair))

    def _remember(self, node: Node, measured: Measured, a: np.ndarray) -> None:
        metrics = measured.metrics
        size = max(metrics.norm_a or 0.0, measured.terms)
        error = metrics.abs_l2 or 0.0
        rel = error / size if size else (0.0 if metrics.equal else math.inf)
        self.errors[node] = Error(rel, measured.peak, size)
        rows = math.prod(a.shape[:-1]) if a.ndim > 1 else 1
        self.row_norms[node] = (metrics.norm_a or 0.0) / math.sqrt(max(rows, 1))

    def _eps(self, entry: Comparison, run_eps: float) -> float:
        if entry.exact:
            return 0.0
        eps = coarser_eps((*entry.items_a, *entry.items_b))
        if entry.slot.kind in _PASS_KINDS and eps:
            return max(run_eps, eps)
        if (
            entry.slot.kind == Kind.CLIPPED_GRAD
        ):  # scalars are kept in float64, computed in the gradients' dtype
            return max(eps, EPS["float32"])
        return eps

    def _judge(self, node: Node, entry: Comparison, measured: Measured, eps: float) -> tuple[Judgement, bool]:
        """Return the judgement, and whether the error is the boundary's own whatever its parents did."""
        if self.exact or entry.exact or not eps:
            return judge_exact(measured.metrics), False
        floors = self.floors.get(node, ())
        if floors and max(floors) > 0:
            return judge_floor(measured, floors), False
        parents = [self.errors[p] for p in self.graph.parents(node) if p in self.errors]
        agreeing = [e for e in parents if not e.diverges]
        noise = WEIGHT_TOLERANCE if node.slot.slot == "weight" else 0.0
        plain = judge_model(measured, eps, agreeing, noise=noise)
        sides = entry.own() if entry.own else None
        if sides is None:
            return plain, False
        own = judge_own(*sides, eps)
        if own.ratio > 1:
            return own, True
        if any(e.diverges for e in parents):
            return plain, False
        return own, False

    def _beyond(self, node: Node, measured: Measured, eps: float) -> bool:
        """Tell whether a divergence exceeds what its diverging inputs may be amplified to."""
        parents = [self.errors[p] for p in self.graph.parents(node) if p in self.errors]
        if not eps or any(not math.isfinite(e.rel) or e.rel > 0.01 for e in parents):
            return False  # large errors are not linear: no bound holds
        return judge_model(measured, eps, parents).ratio > 1

    def _role(self, node: Node, *, own: bool) -> str:
        if own:
            return "origin"
        parents = (self.errors.get(p) for p in self.graph.parents(node))
        return "receiver" if any(e is not None and e.diverges for e in parents) else "origin"

    def _terms(self, node: Node, entry: Comparison, pair: StepPair) -> float:
        """Return the norm of the terms that a gradient sums, 0 where it is not known."""
        nodes = [Node(node.step, m, s) for m, s in entry.magnitude_of]
        known = [n for n in nodes if n in self.errors]
        if not known:
            return 0.0
        if entry.slot.kind == Kind.LOCAL_GRAD:
            return self._product(known, entry)
        factor = 1.0
        factors = pair.gradients_a.factors
        if known[0].slot.kind == Kind.LOCAL_GRAD and factors:
            factor = max(abs(f) for f in factors.by_rank.values())
        return self.errors[known[0]].norm * factor

    def _product(self, known: Sequence[Node], entry: Comparison) -> float:
        gradients = [self.errors[n].norm for n in known if n.slot.kind == Kind.ACTIVATION_GRAD]
        rows = [self.row_norms.get(n, 0.0) for n in known if n.slot.kind == Kind.ACTIVATION]
        matrix = len(entry.items_a[0].entry.local_shape) > 1
        longest = max(rows, default=1.0) if matrix else 1.0
        total = math.sqrt(sum(g * g for g in gradients if math.isfinite(g)))
        return total * max(longest, 1.0)

    def _tell(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def diverged(self, kinds: Iterable[Kind]) -> bool:
        """Tell whether any boundary of these kinds has diverged so far."""
        wanted = set(kinds)
        return any(o.node.slot.kind in wanted for o in self.outcomes)


def _compute_eps(view: StepView) -> float:
    """Return the spacing of the coarsest dtype in which the step's modules computed."""
    found = (coarser_eps(items) for _, items in view.find(Kind.ACTIVATION, phase="train"))
    return max(found, default=0.0)


def _odd_ranks(slot: Slot, view: StepView) -> tuple[int, ...]:
    """Return the ranks whose replica differs from the lowest rank's, at the last event of each rank."""
    last: dict[int, Item] = {}
    for item in view.items.get(slot, ()):
        shard = item.entry.shard
        if shard and any(p.kind != "replicate" for p in shard.placements):
            return ()
        if slot.kind != Kind.CLIPPED_GRAD or slot.slot != "grad" or item.entry.microbatch is None:
            last[item.source.rank] = item
    digests = {rank: item.entry.digest for rank, item in last.items()}
    if not digests:
        return ()
    reference = digests[min(digests)]
    return tuple(sorted(rank for rank, digest in digests.items() if digest != reference))


def _first_rank(view: StepView) -> int:
    return min((item.source.rank for items in view.items.values() for item in items), default=0)


def _describe(metrics: Metrics, judgement: Judgement) -> str:
    if metrics.nonfinite_a != metrics.nonfinite_b:
        return f"{metrics.nonfinite_b} non-finite elements in b, {metrics.nonfinite_a} in a"
    if metrics.elements == 1 and metrics.max_abs_a is not None:
        return f"{metrics.max_abs_b:.9g} in b, {metrics.max_abs_a:.9g} in a"
    return f"relative L2 error {metrics.rel_l2:.3g}; {judgement.reason}"
