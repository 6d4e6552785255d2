"""What each rule met while the runs were compared, and whether a difference is as it was declared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Slot
from tensortrace.diff.coherence import measure_coherence
from tensortrace.diff.compare import EPS, measure_blocks
from tensortrace.diff.expect.rules import Rule
from tensortrace.diff.plan.comparison import Comparison, OneSided
from tensortrace.diff.result import Judgement, Metrics
from tensortrace.diff.stream import Streamed
from tensortrace.diff.tolerance import Error, Measured, judge_model, measure_peak
from tensortrace.tracer.nearest import nearest

EXACT = 1e-12
"""Relative error by which a setting may miss the declared factor: a few roundings in float64."""


@dataclass
class Tally:
    """How often a rule met what it speaks of: boundaries, those that differ as declared, or otherwise.

    ``receivers`` differ because what they were computed from does: no rule is asked for those.
    """

    met: int = 0
    declared: int = 0
    otherwise: int = 0
    receivers: int = 0


@dataclass
class Ledger:
    """The rules of one diff, and the tally of each. The first rule that speaks of a boundary counts."""

    rules: tuple[Rule, ...] = ()
    tallies: list[Tally] = field(default_factory=list)
    known: dict[Slot, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Open a tally for each rule."""
        self.tallies = [Tally() for _ in self.rules]

    def rule_of(self, step: int, entry: Comparison | OneSided) -> Rule | None:
        """Return the rule that speaks of a boundary, None where none does; it is counted as met."""
        if not self.rules:
            return None
        self.known[entry.slot] = None
        side = entry.side if isinstance(entry, OneSided) else None
        names = (entry.names if isinstance(entry, OneSided) else ()) or (entry.slot.name,)
        for rule, tally in zip(self.rules, self.tallies, strict=True):
            spoken_of = rule.only == side if side != "both" else rule.only is None
            if spoken_of and rule.selects(step, entry.slot, names):
                tally.met += 1
                return rule
        return None

    def tally(self, rule: Rule) -> Tally:
        """Return the tally of a rule."""
        return self.tallies[next(n for n, known in enumerate(self.rules) if known is rule)]

    def settle(
        self, rule: Rule, told: tuple[str, Judgement, str], declared: Judgement
    ) -> tuple[str, Judgement, str, Rule | None]:
        """Return role, judgement and text of a divergence, and the rule if it declares it.

        ``told`` is what they are without. A receiver stays one: its inputs' difference explains it. What
        depends on a cause keeps its role until causes are sought.
        """
        tally = self.tally(rule)
        role, judgement, text = told
        if role == "receiver":
            tally.receivers += 1
            return role, judgement, text, None
        if declared.ratio <= 1 and rule.cause is not None:
            return role, judgement, text, rule
        if declared.ratio <= 1:
            tally.declared += 1
            return "declared", declared, text, rule
        tally.otherwise += 1
        far = f"{declared.error:.3g} from it, allowed {declared.allowed:.3g}"
        return role, judgement, f"{text}; not as declared by {rule.title}: {far}", None

    def likely(self, rule: Rule) -> str:
        """Return what the author of a rule that met nothing may have meant, "" where nothing is near."""
        slots = [slot for slot in self.known if slot.kind in rule.kinds]
        for globs, values in (
            (rule.names, {slot.name for slot in slots}),
            (rule.slots, {slot.slot for slot in slots}),
        ):
            if near := [found for glob in globs if (found := nearest(glob, sorted(values)))]:
                return near[0] if near[0] not in globs else ""
        return ""


def judge_declared(
    rule: Rule, loaded: Assembled | Streamed, measured: Measured, eps: float,
    agreeing: Sequence[Error] = (), *, noise: float = 0.0,
) -> Judgement:  # fmt: skip
    """Judge a divergence by a rule: its ratio is at most 1 where the boundary differs as declared.

    What is left once the declared factor is taken out is judged by the error model, as ever.
    """
    why = f"declared by {rule.title}" + (f": {rule.reason}" if rule.reason else "")
    found = measured
    if rule.factor is not None:
        found = _apart_from(rule.factor, loaded, measured, eps)
    if rule.rel_l2 is not None:
        error = found.metrics.rel_l2 if found.metrics.rel_l2 is not None else math.inf
        return Judgement("declared", rule.rel_l2, error, error / rule.rel_l2, why)
    if rule.factor is None:
        return Judgement("declared", math.inf, found.error, 0.0, why)
    if not eps:
        error = found.metrics.rel_l2 or 0.0
        return Judgement("declared", EXACT, error, error / EXACT, why)
    plain = judge_model(found, eps, agreeing, noise=noise)
    return Judgement("declared", plain.allowed, plain.error, plain.ratio, why)


def _apart_from(factor: float, loaded: Assembled | Streamed, measured: Measured, eps: float) -> Measured:
    """Return how far ``b`` is from ``factor`` times ``a``."""

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return ((a * np.float64(factor), b) for a, b in loaded.blocks())

    terms = measured.terms * abs(factor)
    metrics: Metrics = measure_blocks(loaded.shape, blocks(), eps=eps or EPS["float64"])
    if metrics.equal:
        return Measured(metrics, 0.0, terms)
    coherence = measure_coherence(loaded.shape, blocks(), metrics.projection, eps)
    return Measured(metrics, measure_peak(blocks(), metrics, terms), terms, measured.length, coherence)
