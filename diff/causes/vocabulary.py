"""Vocabulary rows that no token names: padding that takes part in the softmax, or is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.catalog import Item, Part, Slot, StepView
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.logical import Source, Together
from tensortrace.diff.relaid import RelaidRank
from tensortrace.tracer.types import INIT_STEP, Entry, Kind

CODE = "vocab.padding"
_MASKED = -1e4
"""Scores below this take no part in a softmax: what masks fill in, in half precision too."""

_OF_PARAMETERS = frozenset(
    {Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD, Kind.PARAM}
)
_MOST = 1 << 22
_MOST_COUNTS = 512
"""How many sizes of the vocabulary are tried where nothing tells it."""


def in_the_loss(case: Case) -> Iterator[Proposal]:
    """Propose that a cross entropy of b goes over scores of padded vocabulary entries as well."""
    slot = case.origin.node.slot
    if slot.kind != Kind.LOSS or slot.slot not in ("sum", "value") or len(case.arrays) == 0:
        return
    a, b = (float(x) for x in case.arrays[0])
    found = [_Scores.of(part, item, slot, case) for part, item in _scored(case)]
    scores = [s for s in found if s is not None]
    if not scores or len(scores) != len(found) or not math.isfinite(b):
        return
    width, kept = scores[0].scores.shape[-1], scores[0].kept
    named = max(int(s.targets.max(initial=0)) for s in scores)
    whole = sum(s.log_sum(width) for s in scores)
    counts = [kept] if kept < width else range(named + 1, width)
    for count in counts:
        extra = whole - sum(s.log_sum(count) for s in scores)
        text = (
            f"the softmax of {slot.name} goes over all {width} scores of b, "
            f"of which the last {width - count} are padding of the vocabulary"
        )
        yield Proposal(
            CODE, text, [np.array(a + extra)], [np.array(b)], [np.array(a)], float(width - count),
            "padded vocabulary entries", simplicity=-1, tried=len(counts),
        )  # fmt: skip


class _Scores:
    """One part's scores at valid targets, padding included; ``kept`` are those that are of the vocabulary."""

    def __init__(self, scores: np.ndarray, targets: np.ndarray, kept: int) -> None:
        self.scores, self.targets, self.kept = scores, targets, kept

    @classmethod
    def of(cls, part: Part, item: Item, slot: Slot, case: Case) -> _Scores | None:
        """Return the scores that a part's loss was given; None where they do not belong to its targets."""
        found = case.pair.b.items.get(slot._replace(slot="target"), ())
        target = next((i for i in found if i.part == part), None)
        raw = _whole(item)
        if target is None or raw is None or raw.ndim < 2 or raw.size > _MOST:
            return None
        flat, targets = raw.reshape(-1, raw.shape[-1]), target.read().reshape(-1)
        if len(flat) != len(targets):
            return None
        ignored = target.entry.meta.ignore_index
        valid = targets != ignored if ignored is not None else np.ones(len(targets), bool)
        return cls(flat[valid].astype(np.float64), targets[valid], item.entry.local_shape[-1])

    def log_sum(self, count: int) -> float:
        """Return the logarithms of the softmax's denominators over the first scores, added up."""
        return float(np.sum(_log_sums(self.scores[:, :count])))


def _scored(case: Case) -> list[tuple[Part, Item]]:
    """Return by part of b the activation that its loss was given."""
    view, slot = case.pair.b, case.origin.node.slot
    losses = [i for s in ("value", "sum") for i in view.items.get(slot._replace(slot=s), ())]
    found: dict[Part, Item] = {}
    for loss in losses:
        for source, part in view.producers(loss):
            if source.kind == Kind.ACTIVATION and part == loss.part:
                items = (i for i in view.items.get(source, ()) if i.part == part)
                found.setdefault(part, next(items))
    return list(found.items())


def _whole(item: Item) -> np.ndarray | None:
    """Return a tensor with its padding: a rank's own, or what ranks hold of it side by side."""
    width = item.entry.local_shape[-1]
    if not isinstance(item.source, Together):
        return _recorded(item.source, item.entry)
    pieces = [_recorded(m.source, m.entry) for m in item.source.members]
    if pieces[0].shape[-1] >= width:
        return pieces[0]
    if len({p.shape[:-1] for p in pieces}) != 1:
        return None
    joined = np.concatenate(pieces, axis=-1)
    return joined if joined.shape[-1] >= width else None


def _recorded(source: Source, entry: Entry) -> np.ndarray:
    """Return what a rank recorded, where a layout file describes it as less than that."""
    return source.read_recorded(entry) if isinstance(source, RelaidRank) else source.read(entry)


def in_a_module(case: Case) -> Iterator[Proposal]:
    """Propose that a module of b which returns a loss for each token takes padded scores into its softmax."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.ACTIVATION or not slot.slot.startswith("out") or loaded is None or not loaded.owners:
        return
    for given in case.pair.b.named(Kind.ACTIVATION, slot.name):
        if not given.slot.startswith("in") or given.call != slot.call:
            continue
        rows = _rows_of_scores(given, loaded, case)
        if rows is None or rows[0].shape[0] != loaded.b.size:
            continue
        scores, kept = rows
        width = scores.shape[-1]
        named = _greatest_token(case.pair.b)
        counts = [kept] if kept < width else range(named + 1, width) if named >= 0 else []
        if len(counts) > _MOST_COUNTS:
            continue
        for count in counts:
            extra = (_log_sums(scores) - _log_sums(scores[:, :count])).reshape(loaded.b.shape)
            text = (
                f"the softmax in {slot.name} goes over all {width} scores of b, "
                f"of which the last {width - count} are padding of the vocabulary"
            )
            yield Proposal(
                CODE, text, [loaded.a + extra], [loaded.b], [loaded.a], float(width - count),
                "padded vocabulary entries", simplicity=-1, tried=len(counts),
            )  # fmt: skip


def _rows_of_scores(given: Slot, loaded: Assembled, case: Case) -> tuple[np.ndarray, int] | None:
    """Return b's scores [tokens, width] in the order of an origin's rows, and how many of them are real."""
    found: list[np.ndarray] = []
    kept = 0
    for owner, length in zip(loaded.owners, loaded.lengths, strict=True):
        item = next((i for i in case.pair.b.items[given] if i.part == owner.part), None)
        raw = _whole(item) if item is not None and len(item.entry.local_shape) == 3 else None
        if item is None or raw is None or raw.size > _MOST or raw.dtype.kind != "f":
            return None
        kept = item.entry.local_shape[-1]
        found.append(raw[owner.number, owner.start : owner.start + length].astype(np.float64))
    return np.concatenate(found), kept


def _log_sums(scores: np.ndarray) -> np.ndarray:
    """Return the logarithm of the softmax's denominator of each token."""
    top = scores.max(axis=1, keepdims=True, initial=-np.inf)
    return np.asarray(top[:, 0] + np.log(np.sum(np.exp(scores - top), axis=1)))


def in_the_scores(case: Case) -> Iterator[Proposal]:
    """Propose that scores which a masks away at the end of the vocabulary are left as they are in b."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.ACTIVATION or loaded is None or loaded.a.ndim < 2 or loaded.exact:
        return
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    masked = np.all((a <= _MASKED).reshape(-1, a.shape[-1]), axis=0)
    masked &= ~np.all((b <= _MASKED).reshape(-1, b.shape[-1]), axis=0)
    count = int(masked.sum())
    if not count or count == len(masked) or not masked[-count:].all():
        return
    text = f"the last {count} of {len(masked)} scores of {slot.name}, which a masks away, take part in b"
    yield Proposal(
        CODE, text, [np.where(masked, b, a)], [b], [a], float(count), "padded vocabulary entries",
        simplicity=-1,
    )  # fmt: skip


def trained(case: Case) -> Iterator[Proposal]:
    """Propose that rows of a table behind all token ids have gradients, or change, in b alone."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind not in _OF_PARAMETERS or slot.slot == "start" or loaded is None or loaded.a.ndim != 2:
        return
    if case.origin.node.step == INIT_STEP or loaded.a.size > _MOST:
        return
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    resting = _resting(case, a)
    named = _greatest_token(case.pair.b)
    if resting is None or not 0 <= named < len(a) - 1:
        return
    moved = np.any(a != b, axis=1)
    first = int(np.flatnonzero(moved & resting)[0]) if (moved & resting).any() else 0
    if first <= named or not resting[first:].all():
        return
    tail = np.arange(len(a)) >= first
    what = "change" if slot.kind == Kind.PARAM else "have gradients"
    text = (
        f"the last {len(a) - first} of {len(a)} rows of {slot.name}, which no token names, {what} in b: "
        "the reference leaves them alone"
    )
    yield Proposal(
        CODE, text, [np.where(tail[:, None], b, a)], [b], [a], float(len(a) - first),
        "padded vocabulary entries", simplicity=-1,
    )  # fmt: skip


def _resting(case: Case, a: np.ndarray) -> np.ndarray | None:
    """Return which rows of a table ``a`` leaves alone: no gradient, or the value of before the step."""
    if case.origin.node.slot.kind != Kind.PARAM:
        return np.asarray(~np.any(a != 0, axis=1))
    before = case.pair.before_a.items.get(case.origin.node.slot)
    old = before[0].read() if before else None
    return None if old is None or old.shape != a.shape else np.asarray(~np.any(old != a, axis=1))


def _greatest_token(view: StepView) -> int:
    """Return the greatest token id that a step's inputs and targets hold, -1 where there are none."""
    slots: Sequence[Slot] = [s for s in view.items if s.kind == Kind.INPUT or s.slot == "target"]
    found = [item for s in slots for item in view.items[s] if item.entry.dtype in ("int64", "int32")]
    return max((int(i.read().max(initial=-1)) for i in found if i.source.stored(i.entry)), default=-1)
