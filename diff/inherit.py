"""What is known of the boundaries that were compared, and what those computed from them inherit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item
from tensortrace.diff.causality import Graph, Node
from tensortrace.diff.compare import EPS, is_exact, measure_blocks, summed_error
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.diff.plan.condition import Reach, centred, terms_in_sum
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.silent import Aside, both_silent, silent_elements, without_silent
from tensortrace.diff.stream import Streamed
from tensortrace.diff.tolerance import Error, Measured, inherited, measure_peak
from tensortrace.tracer.types import Kind

ALIKE = 4.0
"""Times its error by which rows of an estimate may differ alike, whose sum nothing tells."""

_UPDATED = frozenset({Kind.OPTIMIZER_STATE, Kind.PARAM})
"""Kinds that are made of gradients, whatever these sum."""

LINEAR = 0.01
"""Relative error up to which what an operation makes of it is proportional to it, so that a bound holds."""


@dataclass
class Known:
    """Errors and sizes of the boundaries compared so far, over the causal graph.

    ``row_norms`` are norms of a typical row; ``centred`` says by how much a normalisation amplifies;
    ``silent`` are elements of parameters, by name, that have had no effect in any step so far; ``estimated``
    the norms of what is known by sketches.
    """

    graph: Graph = field(default_factory=Graph)
    errors: dict[Node, Error] = field(default_factory=dict)
    shapes: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    row_norms: dict[Node, float] = field(default_factory=dict)
    centred: dict[Node, float] = field(default_factory=dict)
    silent: dict[str, Aside | None] = field(default_factory=dict)
    estimated: dict[Node, float] = field(default_factory=dict)

    # --- what is noted ---------------------------------------------------------------------------

    def note_equal(self, node: Node, entry: Comparison) -> None:
        """Note a boundary whose bytes are equal, which nobody read."""
        first = entry.items_a[0].entry
        norm = first.stats.l2 if first.stats and first.stats.l2 is not None else 0.0
        self.errors[node] = Error(norm=norm)
        self.note_shape(node, first.local_shape, norm, lookup=is_exact(first.dtype))

    def note(self, node: Node, measured: Measured, loaded: Assembled | Streamed) -> None:
        """Note how far the two sides of a boundary are apart."""
        metrics = measured.metrics
        together = 0.0
        if node.slot.kind == Kind.ACTIVATION_GRAD and isinstance(loaded, Assembled) and not metrics.equal:
            together = summed_error(loaded.a, loaded.b) / measured.size if measured.size else 0.0
        if metrics.estimated:
            self.errors[node] = of_estimate(measured)
            self.estimated[node] = metrics.norm_a or 0.0
            self.note_shape(node, loaded.shape, metrics.norm_a or 0.0, lookup=False)
            return
        self.errors[node] = Error(
            measured.error, measured.peak, measured.size, together=together, coherent=measured.coherent
        )
        if node.slot.kind == Kind.PARAM:
            self._set_aside(node, measured, loaded)
        if node.slot.kind == Kind.ACTIVATION and isinstance(loaded, Assembled):
            self.centred[node] = centred(loaded.a)
        self.note_shape(node, loaded.shape, metrics.norm_a or 0.0, lookup=loaded.exact)

    def note_gradient(self, node: Node, measured: Measured, loaded: Assembled | Streamed, eps: float) -> None:
        """Note which elements of a parameter have no effect, as far as the gradients of a step tell."""
        name, now = node.slot.name, None
        if isinstance(loaded, Assembled):
            now = silent_elements(loaded.a, loaded.b, measured.size, eps)
        self.silent[name] = both_silent(self.silent.get(name, now), now)

    def _set_aside(self, node: Node, measured: Measured, loaded: Assembled | Streamed) -> None:
        aside = self.silent.get(node.slot.name)
        quiet = without_silent(loaded, aside) if isinstance(loaded, Assembled) else None
        if quiet is None or aside is None:
            return
        self.note_without(node, quiet, measured, aside.leak)

    def note_without(self, node: Node, quiet: Assembled, measured: Measured, leak: float = 0.0) -> None:
        """Note what of a boundary's error has an effect; so much of what was set aside may ``leak``."""
        metrics = measure_blocks(quiet.shape, quiet.blocks(), eps=EPS["float64"])
        own = Measured(metrics, measure_peak(quiet.blocks(), metrics, measured.terms), measured.terms)
        whole = self.errors[node]
        rel, peak = own.error + leak * whole.rel, own.peak + leak * whole.peak
        self.errors[node] = replace(whole, without=Error(rel, peak, whole.norm, coherent=rel))

    def note_unjudged(self, node: Node) -> None:
        """Let what a boundary that could not be judged was computed from speak for it to its children."""
        known = inherited(parents := self.of_parents(node))
        diverges = any(p.diverges for p in parents)
        self.errors[node] = Error(known.rel, known.peak, diverges=diverges, coherent=known.rel)

    def note_unstored(self, node: Node, entry: Comparison) -> None:
        """Note a boundary that cannot be judged because its values were not stored: statistics tell its size.

        So what a gradient sums stays known, of which little may be left.
        """
        self.note_unjudged(node)
        sizes = [_size(items) for items in (entry.items_a, entry.items_b)]
        norm = min((size for size in sizes if size), default=0.0)
        self.errors[node] = replace(self.errors[node], norm=norm)
        whole = next((items[0] for items in (entry.items_a, entry.items_b) if len(items) == 1), None)
        if whole is not None and norm:
            self.note_shape(node, whole.entry.local_shape, norm, lookup=False)

    def note_shape(self, node: Node, shape: tuple[int, ...], norm: float, *, lookup: bool) -> None:
        """Note how large a boundary is; ids (``lookup``) select rows."""
        self.shapes[node] = shape
        rows = math.prod(shape[:-1]) if len(shape) > 1 else 1
        # ids select rows: each contributes once
        self.row_norms[node] = 1.0 if lookup else norm / math.sqrt(max(rows, 1))

    # --- what is inherited -----------------------------------------------------------------------

    def of_parents(self, node: Node) -> list[Error]:
        """Return the errors of what a boundary was computed from, as they are."""
        return [self.errors[p] for p in self.graph.parents(node) if p in self.errors]

    def effective(self, node: Node, size: float) -> list[Error] | None:
        """Return what a boundary inherits but for what is silent; None where nothing is, or it may tell.

        Updates read their parameters whole, and evaluations what was averaged in training.
        """
        kinds = (Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD, Kind.LOSS)
        if node.slot.kind not in kinds or node.slot.phase == "eval":
            return None
        if all(error.without is None for error in self.of_parents(node)):
            return None
        return [error.without or error for error in self.inherits(node, size)]

    def inherits(self, node: Node, size: float) -> list[Error]:
        """Return what a boundary of norm ``size`` inherits of each thing that it was computed from."""
        known = [p for p in self.graph.parents(node) if p in self.errors]
        outs = [p for p in (node, *known) if p.slot.kind == Kind.ACTIVATION and p.slot.slot[:3] == "out"]
        result = self.shapes.get(outs[0], ()) if outs else ()
        found = []
        for parent in known:
            error = self.errors[parent]
            if node.slot.kind == Kind.LOCAL_GRAD:
                error = error.of_sum()
            if node.slot.kind in _UPDATED and (own := self.estimated.get(parent)):
                error = error.times(max(error.norm / own, 1.0))  # of the gradient itself, not of what it sums
            if not error.diverges and error.rel:
                reach = Reach(node, parent, result, self.shapes.get(parent, ()), size, error.norm)
                error = error.times(reach.factor(self.centred.get(parent, 1.0)))
            found.append(error)
        return found

    def is_bounded(self, node: Node) -> bool:
        """Tell whether what a boundary was computed from errs little enough to bound its own error."""
        return all(math.isfinite(e.rel) and e.rel <= LINEAR for e in self.of_parents(node))

    def has_values(self, node: Node) -> bool:
        """Tell whether the recorded tensor that a boundary was computed from was compared."""
        return any(p.slot.kind == Kind.ACTIVATION and p in self.errors for p in self.graph.parents(node))

    def worst_activation(self, node: Node) -> float:
        """Return the greatest relative error of the activations that a boundary was computed from."""
        known = (self.errors[p] for p in self.graph.parents(node) if p.slot.kind == Kind.ACTIVATION)
        return max((error.rel for error in known if not error.diverges), default=0.0)

    # --- what is summed --------------------------------------------------------------------------

    def length(self, node: Node) -> int:
        """Return how many terms an element sums, as far as the shapes of what it was computed from tell."""
        shapes = [self.shapes[p] for p in self.graph.parents(node) if self.shapes.get(p)]
        return terms_in_sum(node, shapes)

    def terms(self, node: Node, entry: Comparison, shape: tuple[int, ...], pair: StepPair) -> float:
        """Return the norm of the terms that a gradient sums, 0 where it is not known.

        What is left of one sums what the gradient summed that was consumed.
        """
        if entry.slot.kind == Kind.LOCAL_GRAD and entry.slot.slot == "start":
            left = (p for p in self.graph.parents(node) if p.slot.kind == Kind.CLIPPED_GRAD)
            return max((self.errors[p].norm for p in left if p in self.errors), default=0.0)
        nodes = [Node(node.step, m, s) for m, s in entry.magnitude_of]
        known = [n for n in nodes if n in self.errors]
        if not known:
            return 0.0
        if entry.slot.kind == Kind.LOCAL_GRAD:
            return self._product(known, shape)
        factor = 1.0
        factors = pair.gradients_a.factors
        if known[0].slot.kind == Kind.LOCAL_GRAD and factors:
            factor = max(abs(f) for f in factors.by_rank.values())
        return self.errors[known[0]].norm * factor

    def _product(self, known: Sequence[Node], shape: tuple[int, ...]) -> float:
        """Return the norm of what a parameter's gradient sums: its users' gradients times their inputs.

        A parameter that is added to an activation, or scales it, isn't multiplied by whole rows.
        """
        gradients = [n for n in known if n.slot.kind == Kind.ACTIVATION_GRAD]
        inputs = [n for n in known if n.slot.kind == Kind.ACTIVATION]
        widths = {self.shapes[n][-1:] for n in inputs if n in self.shapes}
        spread = any(_is_spread_over(shape, self.shapes[n]) for n in gradients if n in self.shapes)
        elementwise = len(shape) < 2 or (spread and shape[-2:-1] not in widths)
        longest = 1.0 if elementwise else max([1.0, *(self.row_norms.get(n, 0.0) for n in inputs)])
        norms = (self.errors[n].norm for n in gradients)
        return longest * math.sqrt(sum(norm * norm for norm in norms if math.isfinite(norm)))


def _size(items: Sequence[Item]) -> float:
    """Return the norm of a boundary by the statistics of its parts, 0 where one has none; no less than it is.

    Copies count as often as there are.
    """
    known = [held.stats for item in items for _, held in item.members]
    if any(stats is None or stats.l2 is None for stats in known):
        return 0.0
    return math.hypot(*(stats.l2 for stats in known if stats is not None and stats.l2 is not None))


def of_estimate(measured: Measured) -> Error:
    """Return what children inherit of a boundary that is known by its sketch: as much as it may differ by.

    One element may have all of the difference; summed over rows it may be ``ALIKE`` times what chance makes.
    """
    most = measured.error + measured.doubt
    peak = most * math.sqrt(max(measured.metrics.elements, 1))
    return Error(most, peak, measured.size, together=ALIKE * most, coherent=min(measured.coherent, most))


def _is_spread_over(parameter: tuple[int, ...], activation: tuple[int, ...]) -> bool:
    """Tell whether a parameter of this shape can be broadcast over an activation."""
    if not parameter or len(parameter) > len(activation) or parameter[-1] != activation[-1]:
        return False
    sizes = zip(reversed(parameter), reversed(activation), strict=False)
    return all(mine in (1, other) for mine, other in sizes)
