"""Wrong scale: tokens that weigh unequally, and factors that equal a known quantity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tensortrace.diff.catalog import Part
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.plan.comparison import replica
from tensortrace.diff.rows import Batch
from tensortrace.diff.scale import CLOSE
from tensortrace.tracer.types import Kind

_TENSORS = {
    Kind.ACTIVATION, Kind.ACTIVATION_GRAD,
    Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD,
}  # fmt: skip
_LOSSES = ("weight", "sum", "value")
_NEAR = 1e-3


class _Weights(NamedTuple):
    """What tokens weigh in the gradients of both runs, their parts in ``b``, those parts' valid tokens."""

    a: np.ndarray
    b: np.ndarray
    parts: tuple[Part, ...]
    counts: dict[Part, int]


def _weights(case: Case) -> _Weights | None:
    """Return the weights of the origin's loss over the whole batch, by row or by token; None of others.

    Where an objective has several terms, each with its own weights, they are those of the origin's term.
    """
    pair, slot = case.pair, case.origin.node.slot
    owners = [row.part for _, row in pair.pairing.pairs]
    if slot.slot != "weight":
        return None
    if pair.effective_weights is not None:
        return _Weights(*pair.effective_weights, tuple(owners), pair.weights_b.count)
    term, counts = (slot.name, slot.call), pair.weights_b.count
    by_token = pair.effective_tokens
    if by_token is None and pair.effective_terms is not None and term in pair.effective_terms:
        by_token, counts = pair.effective_terms[term], pair.terms[term][1].count
    if by_token is None or not by_token[0]:
        return None
    a, b = by_token
    parts = tuple(part for part, tokens in zip(owners, a, strict=True) for _ in range(len(tokens)))
    return _Weights(np.concatenate(a), np.concatenate(b), parts, counts)


def token_ratio(case: Case) -> Iterator[Proposal]:
    """Propose a mean of local means: a token weighs 1 / (parts × valid tokens of its own part).

    A part is a microbatch of a rank, a rank's whole window, or a microbatch of all ranks.
    """
    found = _weights(case)
    if found is None or any(not found.counts.get(part) for part in found.parts):
        return
    groups: tuple[Callable[[Part], object], ...] = (
        lambda part: part, lambda part: part.rank, lambda part: part.number
    )  # fmt: skip
    tried: list[np.ndarray] = []
    for group in groups:
        totals: dict[object, int] = {}
        for part, count in found.counts.items():
            totals[group(part)] = totals.get(group(part), 0) + count
        tokens = np.array([totals[group(part)] for part in found.parts], dtype=np.float64)
        if not any(np.array_equal(tokens, other) for other in tried):
            tried.append(tokens)
            yield from _of_groups(found, tokens)


def _of_groups(found: _Weights, tokens: np.ndarray) -> Iterator[Proposal]:
    """Propose that each token weighs one over the given number of valid tokens."""
    weighs = (found.a != 0) & (found.b != 0)
    if not weighs.any() or np.ptp(tokens[weighs]) == 0:
        return
    shape = np.where(weighs, 1.0 / tokens, 0.0)
    if np.ptp(found.a[weighs]) > CLOSE * np.abs(found.a[weighs]).max():
        yield from _of_own_weights(found, shape, weighs)
    mistaken = shape * float(np.median(found.b[weighs] / shape[weighs]))
    of_parts = {p: w for p, w, counted in zip(found.parts, found.b, weighs, strict=True) if counted}
    known = dict.fromkeys(f"1/{1 / w:.6g}" for w in np.unique(np.round(found.a[weighs], 12)))
    reference = ", ".join(list(known)[:3])
    told = _weights_text(of_parts, found.counts)
    text = f"mean of local means: {told}; in the reference every token weighs {reference}"
    spread = float(found.b[weighs].max() / found.b[weighs].min())
    most, least, total = max(tokens[weighs]), min(tokens[weighs]), sum(found.counts.values())
    equals = f"{most:g}/{least:g}, the ratio of the parts' valid tokens (of {total} in all)"
    yield Proposal("scale.token_ratio", text, [mistaken], [found.b], [found.a], spread, equals)


def _of_own_weights(found: _Weights, shape: np.ndarray, weighs: np.ndarray) -> Iterator[Proposal]:
    """Propose the same of tokens that have weights of their own: advantages, classes."""
    own = found.a * shape
    mistaken = own * float(np.median(found.b[weighs] / own[weighs]))
    factors = found.b / np.where(weighs, found.a, 1.0)
    ratios = {p: f for p, f, counted in zip(found.parts, factors, weighs, strict=True) if counted}
    told = ", ".join(
        f"those of rank {part.rank} microbatch {part.number} ({found.counts[part]} tokens) {ratio:.6g} times"
        for part, ratio in sorted(ratios.items())[:8]
    )
    text = f"mean of local means: tokens weigh what they do in the reference, {told}"
    spread = max(ratios.values()) / min(ratios.values())
    equals = "the ratio of the parts' valid tokens"
    yield Proposal("scale.token_ratio", text, [mistaken], [found.b], [found.a], spread, equals)


def _weights_text(found: Mapping[Part, float], counts: Mapping[Part, int]) -> str:
    """Tell what a token of each part weighs in the gradient that is clipped."""
    several = len({part.number for part in found}) > 1
    lines = []
    for part, weight in sorted(found.items())[:8]:
        where = f"rank {part.rank} microbatch {part.number}" if several else f"rank {part.rank}"
        lines.append(f"each of the {counts[part]} tokens of {where} weighs 1/{1 / weight:.6g}")
    more = len(found) - 8
    return ", ".join(lines) + (f", … {more} more parts" if more > 0 else "")


def common_factor(case: Case) -> Iterable[Proposal]:
    """Propose one factor over all tensors: the world size, the accumulation count, a loss scale."""
    slot, arrays = case.origin.node.slot, case.arrays
    weights = _weights(case)
    if weights is not None:
        arrays = ((weights.a, weights.b),)  # of the whole batch, not of one microbatch
    tensor = slot.kind in _TENSORS or (slot.kind == Kind.PARAM and slot.slot == "start")
    if not arrays or not (slot.slot in _LOSSES or tensor) or slot.name == "(clip)":
        return ()
    if slot.kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD):
        arrays = arrays[:1]  # modules fail one by one, gradients of parameters together
    left, right = zip(*arrays, strict=True)
    size = sum(float(np.vdot(a, a)) for a in left)
    if not size or not math.isfinite(size):
        return ()
    factor = sum(float(np.vdot(a, b)) for a, b in arrays) / size
    if not math.isfinite(factor) or abs(factor - 1) < 1e-9:
        return ()
    if tensor and min(abs(factor), abs(factor + 1)) < _NEAR:
        return ()  # zero and the opposite sign have causes of their own
    what = "every token's weight" if slot.slot == "weight" else f"the {slot.kind} of {_count(len(left))}"
    what = f"after tensor hooks, {what}" if slot.slot == "hooked" else what
    digits = 9 if abs(factor - 1) < 1e-5 else 6
    text = f"{what} is {factor:.{digits}g} times {case.origin.against or 'the reference'}"
    return _readings(factor, text, left, right, case)


def of_some_parts(case: Case) -> Iterator[Proposal]:
    """Propose one factor over the tokens of some ranks or microbatches; all others weigh what they should."""
    weights = case.pair.effective_weights
    if case.origin.node.slot.slot != "weight" or weights is None:
        return
    a, b = weights
    parts = [row.part for _, row in case.pair.pairing.pairs]
    if len(parts) != len(a) or not a.all():
        return
    odd = ~np.isclose(b / a, 1.0, rtol=min(_NEAR, 2 * case.floor), atol=0.0)
    held = sorted({part for part, wrong in zip(parts, odd, strict=True) if wrong})
    if (
        not held
        or odd.all()
        or any(part in held for part, wrong in zip(parts, odd, strict=True) if not wrong)
    ):
        return
    factor = float(np.median((b / a)[odd]))
    digits = 9 if abs(factor - 1) < 1e-5 else 6
    whose = f"the tokens of {_named(held, parts)} of b"
    text = f"{whose} weigh {factor:.{digits}g} times the reference, all others as much"
    known = _quantities(case)
    near = _near(factor, known, case)
    for code, value, words in near[:1]:
        mistaken = np.where(odd, a * value, a)
        yield Proposal(code, f"{text}: {words}", [mistaken], [b], [a], factor, words, tried=len(known))
    mistaken = np.where(odd, a * factor, a)
    yield Proposal("scale.other", text, [mistaken], [b], [a], factor, simplicity=2, fitted=1)


def _named(held: Sequence[Part], parts: Sequence[Part]) -> str:
    """Tell some parts by rank or by microbatch where that tells them apart from all others, else by both."""
    others = set(parts) - set(held)
    for what, numbers, rest in (
        ("rank", {p.rank for p in held}, {p.rank for p in others}),
        ("microbatch", {p.number for p in held}, {p.number for p in others}),
    ):
        if not numbers & rest:
            return f"{what} {', '.join(map(str, sorted(numbers)))}"
    shown = (f"rank {p.rank} microbatch {p.number}" for p in held[:4])
    return ", ".join(shown) + (f" and {len(held) - 4} more parts" if len(held) > 4 else "")


def _readings(
    factor: float, text: str, left: Sequence[np.ndarray], right: Sequence[np.ndarray], case: Case
) -> Iterator[Proposal]:
    """Yield the known quantities near a factor, each tested by itself, then the factor as it was measured.

    One number is always some factor of another: there the measured one explains nothing.
    """
    known = _quantities(case)
    near = _near(factor, known, case)
    for value in dict.fromkeys(value for _, value, _ in near):
        code, _, words = next(k for k in near if k[1] == value)
        also = tuple(f"it also equals {w} ({c})" for c, _, w in near if c != code)
        alike = {c: w for c, _, w in reversed(near) if c != code}  # which of them it is, nothing tells
        mistaken = [a * value for a in left]
        yield Proposal(
            code, f"{text}, {' and '.join((words, *alike.values()))}", mistaken, right, left, factor, words,
            also, tried=len(known),
        )  # fmt: skip
    mistaken = [a * factor for a in left]
    yield Proposal("scale.other", text, mistaken, right, left, factor, simplicity=2, fitted=1)


def _near(factor: float, known: Sequence[tuple[str, float, str]], case: Case) -> list[tuple[str, float, str]]:
    """Return the known quantities that a factor equals.

    A loss is divided by the number of microbatches where it is computed, ranks are averaged behind it.
    """
    near = [k for k in known if math.isclose(factor, k[1], rel_tol=_NEAR) and k[1] != 1]
    if case.origin.node.slot.kind == Kind.LOSS:
        near.sort(key=lambda k: k[0] != "scale.accumulation")
    return near


def _count(tensors: int) -> str:
    return f"{tensors} tensors" if tensors > 1 else "1 tensor"


def _quantities(case: Case) -> list[tuple[str, float, str]]:
    """Return (code, value, words) for every factor that a distributed step usually has."""
    known: list[tuple[str, float, str]] = []
    sides = (
        ("b", case.world_b, case.microbatches_b),
        ("a", len({p.rank for p in case.pair.batch_a.extents}), case.pair.a.last_microbatch() + 1),
    )
    for side, world, microbatches in sides:
        for code, count, words in (
            ("scale.world_size", world, f"the world size of {side}"),
            ("scale.accumulation", microbatches, f"the number of microbatches of {side}"),
            ("scale.other", world * microbatches, f"world size × microbatches of {side}"),
        ):
            if code == "scale.other" and 1 in (world, microbatches):
                continue  # the product is the other number
            known.append((code, float(count), f"{words} ({count})"))
            known.append((code, 1 / count if count else 0.0, f"1 / {words} (1/{count})"))
    for side, world, catalog in (("b", sides[0][1], case.b), ("a", sides[1][1], case.a)):
        ranks = len(catalog.ranks)
        for count, words in (
            (ranks // max(world, 1), f"the ranks of {side} that share rows"),
            (ranks, f"the ranks of {side}"),
        ):
            known.append(("scale.world_size", float(count), f"{words} ({count})"))
            known.append(("scale.world_size", 1 / count if count else 0.0, f"1 / {words} (1/{count})"))
    inside = case.origin.node.slot.kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD)
    for side, weights, batch in () if inside else (
        ("b", case.pair.weights_b, case.pair.batch_b), ("a", case.pair.weights_a, case.pair.batch_a),
    ):  # fmt: skip
        valid, held = sum(weights.count.values()), _positions(batch)
        if 0 < valid < held:
            words = f"valid tokens of {side} over all its positions ({valid}/{held}): padding is counted"
            known.append(("scale.other", valid / held, words))
            known.append(("scale.other", held / valid, f"the inverse of {words}"))
    for side, view in (("b", case.pair.b), ("a", case.pair.a)):
        for slot, items in view.find(Kind.SCHEDULE):
            if slot.slot == "scale":
                value = float(replica(items).read())
                known.append(("scale.loss_scale", value, f"the loss scale of {side} ({value:g})"))
                known.append(("scale.loss_scale", 1 / value, f"1 / the loss scale of {side} (1/{value:g})"))
    return known


def _positions(batch: Batch) -> int:
    """Return how many tokens a step's batches hold, padding included; 0 where rows have no positions.

    Of rows that have a second sequence, of which the loss is, they are that one's.
    """
    return sum(extent.rows * (extent.answers or extent.positions or 0) for extent in batch.extents.values())
