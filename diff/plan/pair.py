"""One step of both runs, and what all planners derive from it: once, when the first of them asks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from tensortrace.diff.catalog import Part, StepView
from tensortrace.diff.coefficient import scaled_by_hand
from tensortrace.diff.effective import (
    Stages,
    TermWeights,
    effective_terms,
    effective_tokens,
    effective_weights,
    noise_of_weights,
)
from tensortrace.diff.factors import Factors, scalar_factor
from tensortrace.diff.gradients import Gradients
from tensortrace.diff.handclip import read_gradients
from tensortrace.diff.objective import has_unknown_loss
from tensortrace.diff.overflow import both_skipped
from tensortrace.diff.pairing import Pairing, pair
from tensortrace.diff.plan.evaluations import further_evaluations
from tensortrace.diff.reducing import is_plain, is_ratio, is_same
from tensortrace.diff.rows import Batch, read_batches, with_answers
from tensortrace.diff.scale import (
    WEIGHT_TOLERANCE,
    RowScale,
    Term,
    TokenWeights,
    common_scale,
    row_scale,
    terms_of,
    token_weights,
)
from tensortrace.diff.stream import one
from tensortrace.tracer.types import Kind


@dataclass(frozen=True)
class StepPair:
    """One step of both runs with the step before it, and what all planners derive from them once."""

    a: StepView
    b: StepView
    before_a: StepView
    before_b: StepView

    @cached_property
    def batches(self) -> tuple[Batch, Batch]:
        """Rows of both runs in training passes."""
        return with_answers(read_batches(self.a, self.b, "train"), self.a, self.b, "train")

    @property
    def batch_a(self) -> Batch:
        """Rows of ``a`` in training passes."""
        return self.batches[0]

    @property
    def batch_b(self) -> Batch:
        """Rows of ``b`` in training passes."""
        return self.batches[1]

    @cached_property
    def pairing(self) -> Pairing:
        """Which row of ``b`` is which row of ``a`` in training passes."""
        return pair(self.batch_a, self.batch_b)

    @cached_property
    def eval_pairing(self) -> Pairing:
        """Which row of ``b`` is which row of ``a`` in eval passes."""
        return pair(*with_answers(read_batches(self.a, self.b, "eval"), self.a, self.b, "eval"))

    @cached_property
    def weights_a(self) -> TokenWeights:
        """Token weights of ``a``."""
        return token_weights(self.a)

    @cached_property
    def weights_b(self) -> TokenWeights:
        """Token weights of ``b``."""
        return token_weights(self.b)

    @cached_property
    def scale(self) -> RowScale:
        """Weight of a token in ``b`` over its weight in ``a``."""
        if self.whole_on_ranks:  # a row's gradient comes from all ranks' losses
            return RowScale({}, {}, observed=False)
        plain = row_scale(self.pairing, self.weights_a, self.weights_b)
        if plain.observed or not self.terms:
            return plain
        return common_scale([row_scale(self.pairing, a, b) for a, b in self.terms.values()])

    @cached_property
    def terms(self) -> dict[Term, tuple[TokenWeights, TokenWeights]]:
        """Token weights of each term of the objective that both runs have, where there are several terms.

        A run may lack one of the other's only where it computes a term that is not recognised.
        """
        of_a, of_b = terms_of(self.a), terms_of(self.b)
        unexplained = (of_a - of_b and not has_unknown_loss(self.b, self.a)) or (
            of_b - of_a and not has_unknown_loss(self.a, self.b)
        )
        if len(of_a | of_b) < 2 or unexplained:
            return {}
        common = sorted(of_a & of_b)
        return {term: (token_weights(self.a, term), token_weights(self.b, term)) for term in common}

    @property
    def broken(self) -> bool:
        """Tell whether one run alone weighs tokens by what isn't finite."""
        return bool(self.weights_a.broken) != bool(self.weights_b.broken)

    @cached_property
    def weighed_inside(self) -> Literal["a", "b", ""]:
        """The run that gives its one loss the weights of terms, where the other multiplies by them.

        Then what each term weighs and what its loss is agree in their product only. Runs of one scheme alone.
        """
        names = {name for view in (self.a, self.b) for name, _ in terms_of(view)}
        sides = [w.weight for w in (self.weights_a, self.weights_b)]
        if (
            len(names) != 1
            or not self.same_scheme
            or self.whole_on_ranks
            or self.broken
            or sides[0].keys() != sides[1].keys()
        ):
            return ""
        single = [bool(side) and all(side.values()) for side in sides]
        if single[0] == single[1] or any(v is not None for v in sides[single[0]].values()):
            return ""
        return "a" if single[0] else "b"

    @cached_property
    def effective_terms(self) -> TermWeights | None:
        """What the tokens of each matched row weigh in the gradient of both runs, term by term."""
        alike = self.same_scheme and not self.whole_on_ranks
        return effective_terms(self.pairing, self.terms, Stages(*self._factors, alike, self.is_of_loss))

    @property
    def gradients_a(self) -> Gradients:
        """The gradient rungs of ``a``."""
        return self._gradients[0]

    @property
    def gradients_b(self) -> Gradients:
        """The gradient rungs of ``b``."""
        return self._gradients[1]

    @cached_property
    def _gradients(self) -> tuple[Gradients, Gradients]:
        a, b = read_gradients(self.a, self.b), read_gradients(self.b, self.a)
        if self.overflowed or self.evaluations or a.by_program or b.by_program:
            return a, b
        tokens = sum(self.weights_a.count.values())
        found = scaled_by_hand(a, b, same_scheme=self.same_scheme, tokens=tokens)
        return (a, b) if found is None else (replace(a, shared=found.a), replace(b, shared=found.b))

    @property
    def _factors(self) -> tuple[Factors | None, Factors | None]:
        """Both runs' factors from local gradients; none where gradients overflowed.

        They tell no factor then, and the loss scales under which they did may differ.
        """
        unknown = self.overflowed or self.whole_on_ranks
        return (None, None) if unknown else (self.gradients_a.factors, self.gradients_b.factors)

    @property
    def _stages(self) -> Stages:
        alike = self.same_scheme and not self.overflowed and not self.whole_on_ranks
        return Stages(*self._factors, alike, self.is_of_loss)

    @cached_property
    def whole_on_ranks(self) -> Literal["a", "b", ""]:
        """The run of which each rank computes the loss of all that the ranks of the other have together.

        Contrastive losses over gathered rows may be computed whole on every rank, and averaged.
        """
        counted = ({s.name for s, _ in v.find(Kind.LOSS) if s.slot == "count"} for v in (self.a, self.b))
        if not set.intersection(*counted):
            return ""
        found: list[dict[int, int]] = []
        for weights in (self.weights_a, self.weights_b):
            of_ranks: dict[int, int] = {}
            for part, count in weights.count.items():
                of_ranks[part.rank] = of_ranks.get(part.rank, 0) + count
            found.append(of_ranks)
        sides: tuple[Literal["a", "b"], ...] = ("a", "b")
        for side, mine, other in zip(sides, found, found[::-1], strict=True):
            whole = sum(other.values())
            if len(mine) > 1 and whole and sum(mine.values()) != whole and set(mine.values()) == {whole}:
                return side
        return ""

    @cached_property
    def noise_of_weights(self) -> float:
        """The relative error that effective weights may have."""
        return noise_of_weights(*self._factors)

    @cached_property
    def effective_weights(self) -> tuple[np.ndarray, np.ndarray] | None:
        """What a token of each matched row weighs in the gradient of both runs; None where not observed."""
        return effective_weights(self.pairing, self.weights_a, self.weights_b, self._stages)

    @cached_property
    def effective_tokens(self) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
        """What every token of each matched row weighs, where both runs tell it token by token."""
        return effective_tokens(self.pairing, self.weights_a, self.weights_b, self._stages)

    def is_of_loss(self, factor: float) -> bool:
        """Tell whether a factor common to all weights is the loss's, though the runs' schemes differ.

        It is where both runs reduce gradients as in the step before, in which the weights agreed, or where
        both add up or average over ranks and the factor is no ratio of numbers of ranks or microbatches.
        """
        if self._reduce_as_before:
            return True
        counts = [len({part.rank for part in batch.extents}) for batch in self.batches]
        counts += [len(factors.by_rank) for factors in self._factors if factors]
        counts += [view.last_microbatch() + 1 for view in (self.a, self.b)]
        scaled = any(s.slot == "scale" for v in (self.a, self.b) for s, _ in v.find(Kind.SCHEDULE))
        return not scaled and all(map(is_plain, self._factors)) and not is_ratio(factor, counts)

    @cached_property
    def _reduce_as_before(self) -> bool:
        before = StepPair(self.before_a, self.before_b, self.before_a, self.before_b)
        if not all(map(is_same, self._factors, before._factors)):
            return False
        stages = Stages(*before._factors, same_scheme=False, is_of_loss=lambda _: True)
        weights = effective_weights(before.pairing, before.weights_a, before.weights_b, stages)
        noise = before.noise_of_weights + WEIGHT_TOLERANCE
        return weights is not None and np.allclose(*weights, rtol=noise, atol=0.0)

    @cached_property
    def same_scheme(self) -> bool:
        """Tell whether both runs split the batch alike and have the same gradient rungs."""
        same = self.batch_a.extents.keys() == self.batch_b.extents.keys()
        if not (self.batch_a.extents or self.batch_b.extents):
            same = _parts_of_gradients(self.a) == _parts_of_gradients(self.b)  # no pass was recorded
        return same and _rungs(self.a) == _rungs(self.b)

    @cached_property
    def raw_factor(self) -> dict[Kind, float | None]:
        """Factor from a's gradients to b's at a rung as recorded, None where one run lacks the rung."""
        found: dict[Kind, float | None] = {}
        for kind in (Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD):
            names = self.gradients_a.names
            sides = ((self.gradients_a.rung(kind, n), self.gradients_b.rung(kind, n)) for n in names)
            found[kind] = scalar_factor((one(x), one(y)) for x, y in sides if x and y)
        return found

    def is_unscaled(self, kind: Kind) -> bool:
        """Tell whether b's rung as recorded is a's gradient before clipping, where a lacks the rung.

        What b makes of it afterwards is then another stage's, such as clipping by code of its own. Asked only
        where it makes anything of it.
        """
        if kind not in self._unscaled:
            a, b, factor = self.gradients_a, self.gradients_b, None
            own = b.factor_from(kind) or 1.0
            if not a.has_rung(kind) and not math.isclose(own, 1.0, rel_tol=WEIGHT_TOLERANCE):
                pairs = ((a.canonical(kind, n), b.rung(kind, n)) for n in a.names)
                factor = scalar_factor((x, one(y)) for x, y in pairs if x is not None and y is not None)
            same = factor is not None and math.isclose(factor, 1.0, rel_tol=WEIGHT_TOLERANCE)
            self._unscaled[kind] = same
        return self._unscaled[kind]

    @cached_property
    def _unscaled(self) -> dict[Kind, bool]:
        return {}

    @cached_property
    def evaluations(self) -> frozenset[int]:
        """The microbatches that an optimizer evaluated within its update, after the first."""
        return further_evaluations(self.a) | further_evaluations(self.b)

    @cached_property
    def overflowed(self) -> bool:
        """Whether both runs left an update out because gradients overflowed under the loss scale."""
        return both_skipped(self.a, self.b)

    def fitted_factor(self, kind: Kind) -> float | None:
        """Return one factor from b's gradients at a rung to a's, where a run updates parameters itself.

        What scales its gradients after the last rung is not seen there: it shows in the update.
        """
        names = self.gradients_a.names
        sides = ((self.gradients_a.last_seen(kind, n), self.gradients_b.last_seen(kind, n)) for n in names)
        return scalar_factor((y, x) for x, y in sides if x is not None and y is not None)

    @property
    def by_program(self) -> bool:
        """Tell whether either run updates its parameters itself, so that no optimizer consumed a gradient."""
        return self.gradients_a.by_program or self.gradients_b.by_program

    def group(self, part: Part) -> int | None:
        """Return the microbatch under which a part is compared; None where the splits differ."""
        return part.number if part.phase == "train" and self._same_split else None

    @cached_property
    def _same_split(self) -> bool:
        return self.pairing.same_split()


def _rungs(view: StepView) -> set[Kind]:
    rungs = {Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD}
    return {slot.kind for slot in view.items if slot.kind in rungs}


def _parts_of_gradients(view: StepView) -> set[tuple[int, int | None]]:
    found = (i for s, items in view.find(Kind.LOCAL_GRAD) if s.slot == "grad" for i in items)
    return {(item.cell, item.entry.microbatch) for item in found}
