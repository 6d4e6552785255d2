"""The second sequence of each row: what a decoder is given, or the labels that it makes its inputs of.

An encoder-decoder pads its sources and its targets each to their own longest row, so that the two have
lengths of their own, in every part of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from tensortrace.diff.catalog import Part, StepView
from tensortrace.diff.extent import extent_of
from tensortrace.diff.masks import mask_of_tokens, run, tokens_of
from tensortrace.tracer.types import Kind

Inputs = Mapping[Part, dict[str, np.ndarray]]
"""What the root was given in each part, rows first."""


class Answers(NamedTuple):
    """The second sequences of one part: padded ``length``, and where each row's valid positions stop.

    0 is a row of which no label counts. ``names`` are the inputs [rows, length, …] that follow it, and
    ``has_loss`` tells whether the loss's labels do.
    """

    length: int
    stops: tuple[int, ...]
    names: frozenset[str]
    has_loss: bool
    note: str = ""

    def span(self, row: int) -> tuple[int, int]:
        """Return a row's valid positions [start, stop); a row of nothing but padding keeps its length."""
        return 0, self.stops[row] or self.length


OfParts = dict[Part, Answers]


def find_answers(
    views: tuple[StepView, StepView], phase: str, inputs: tuple[Inputs, Inputs]
) -> Iterator[tuple[OfParts, OfParts]]:
    """Yield the second sequences of both runs, as they may be meant; nothing where a run has none.

    Where the loss's labels follow them they stop at the last label that counts: what either run ignores is
    padding at the ends of both, and where labels of padding count, the token that fills them. Else they stop
    at the token that fills the sequences themselves. Where all are padded alike none is cut.
    """
    names = _followers(inputs)
    if names is None:
        return
    labels = [_labels(view, phase, side, own) for view, side, own in zip(views, inputs, names, strict=True)]
    if _padded_alike(inputs, names):
        left, right = (
            {part: _whole(tensors, own)._replace(has_loss=all(labels)) for part, tensors in side.items()}
            for side, own in zip(inputs, names, strict=True)
        )
        yield left, right
        return
    if all(labels):
        ignored = {index for side in labels for _, index in side.values()}
        fill = _fill((matrix for side in labels for matrix, _ in side.values()), ignored)
        for padding in (ignored, ignored | {fill}) if fill is not None else (ignored,):
            left, right = (
                {
                    part: _until_last_label(side[part], own, matrix, padding)
                    for part, (matrix, _) in found.items()
                }
                for side, own, found in zip(inputs, names, labels, strict=True)
            )
            yield left, right
    fill = _fill((t[own[0]] for side, own in zip(inputs, names, strict=True) for t in side.values()), set())
    if fill is not None:
        left, right = (
            {part: _until_fill(t, own, fill)._replace(has_loss=all(labels)) for part, t in side.items()}
            for side, own in zip(inputs, names, strict=True)
        )
        yield left, right


def whole_answers(inputs: tuple[Inputs, Inputs]) -> tuple[OfParts, OfParts] | None:
    """Return the second sequences of both runs with their padding; None where no size needs them.

    That is where there are none, where all are of one length, or where all lack one position of the first:
    then what follows them is read by the first.
    """
    names = _followers(inputs)
    sides = [(side, own) for side, own in zip(inputs, names or (), strict=False)]
    fewer = {_positions(t) - t[own[0]].shape[1] for side, own in sides for t in side.values()}
    if names is None or _padded_alike(inputs, names) or fewer == {1}:
        return None
    left, right = ({part: _whole(tensors, own) for part, tensors in side.items()} for side, own in sides)
    return left, right


def hidden_sources(inputs: Inputs) -> dict[Part, np.ndarray]:
    """Return the positions [rows, positions] of the first sequence that a mask of either polarity hides."""
    found: dict[Part, np.ndarray] = {}
    for part, tensors in inputs.items():
        tokens = tokens_of(tensors)
        if tokens is None:
            continue
        flipped = {
            name: value if value is tokens or value.shape != tokens.shape else value == 0
            for name, value in tensors.items()
        }
        mask = mask_of_tokens(tensors)
        mask = mask_of_tokens(flipped) if mask is None else mask
        if mask is not None:
            found[part] = np.asarray(mask == 0)
    return found


def _followers(inputs: tuple[Inputs, Inputs]) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return for both runs the names of the inputs that follow the second sequence, its tokens first.

    Its tokens are the first matrix of whole numbers that has another length than the first sequence somewhere
    in either run, and that is no mask.
    """
    if not all(inputs) or any(tokens_of(tensors) is None for side in inputs for tensors in side.values()):
        return None
    own = [_of_other_length(side) for side in inputs]
    chosen = [names[0] if names else None for names in own]
    left, right = chosen[0] or chosen[1], chosen[1] or chosen[0]
    if left is None or right is None:
        return None
    found = []
    for side, name in zip(inputs, (left, right), strict=True):
        if any(name not in t or not _is_sequence(t, t[name]) for t in side.values()):
            return None
        lengths = {part: tensors[name].shape[1] for part, tensors in side.items()}
        alike = [
            other
            for other in next(iter(side.values()))
            if other != name
            and all(_has_length(t, other, lengths[part]) for part, t in side.items())
            and any(not _has_length(t, other, _positions(t)) for t in side.values())
        ]
        found.append((name, *alike))
    return found[0], found[1]


def _padded_alike(inputs: tuple[Inputs, Inputs], names: tuple[tuple[str, ...], tuple[str, ...]]) -> bool:
    """Tell whether all second sequences are of one length: then they are compared with their padding."""
    sides = zip(inputs, names, strict=True)
    return len({tensors[own[0]].shape[1] for side, own in sides for tensors in side.values()}) == 1


def _of_other_length(side: Inputs) -> list[str]:
    return [
        name
        for name in next(iter(side.values()))
        if all(name in tensors and _is_sequence(tensors, tensors[name]) for tensors in side.values())
        and any(tensors[name].shape[1] != _positions(tensors) for tensors in side.values())
        and any((tensors[name] > 1).any() for tensors in side.values())
    ]


def _is_sequence(tensors: dict[str, np.ndarray], value: np.ndarray) -> bool:
    tokens = tokens_of(tensors)
    assert tokens is not None
    return value.dtype.kind in "iu" and value.ndim == 2 and len(value) == len(tokens) and value.size > 0


def _has_length(tensors: dict[str, np.ndarray], name: str, length: int) -> bool:
    rows = len(next(v for v in (tokens_of(tensors),) if v is not None))
    return name in tensors and tensors[name].ndim > 1 and tensors[name].shape[:2] == (rows, length)


def _positions(tensors: dict[str, np.ndarray]) -> int:
    tokens = tokens_of(tensors)
    return 0 if tokens is None else tokens.shape[1]


def _labels(
    view: StepView, phase: str, inputs: Inputs, names: tuple[str, ...]
) -> dict[Part, tuple[np.ndarray, int]]:
    """Return per part the labels [rows, length or one fewer] of its loss, and which it ignores.

    Nothing unless every part has such a loss.
    """
    found: dict[Part, tuple[np.ndarray, int]] = {}
    for slot, items in view.find(Kind.LOSS, phase=phase):
        for item in items:
            index, part = item.entry.meta.ignore_index, item.part
            if slot.slot != "target" or part is None or part not in inputs or part in found:
                continue
            if index is None or not item.source.stored(item.entry):
                continue
            extent = extent_of(inputs[part])
            length = inputs[part][names[0]].shape[1]
            size = int(np.prod(item.entry.local_shape))
            if size in (extent.rows * length, extent.rows * (length - 1)):
                found[part] = extent.by_row(item.read().reshape(-1)), index
    return found if found.keys() == inputs.keys() else {}


def _whole(tensors: dict[str, np.ndarray], names: tuple[str, ...]) -> Answers:
    rows, length = tensors[names[0]].shape
    return Answers(length, (length,) * rows, frozenset(names), has_loss=False)


def _until_last_label(
    tensors: dict[str, np.ndarray], names: tuple[str, ...], labels: np.ndarray, ignored: set[int]
) -> Answers:
    """Return sequences that stop at the last label that counts; of labels shifted by one, with that label."""
    length = tensors[names[0]].shape[1]
    shift = length - labels.shape[1]
    padded = np.isin(labels, sorted(ignored))
    ends = [len(row) - run(row[::-1]) for row in padded]
    return Answers(length, tuple(end + shift if end else 0 for end in ends), frozenset(names), has_loss=True)


def _fill(sequences: Iterable[np.ndarray], others: set[int]) -> int | None:
    """Return the token, none of ``others``, that rows end in repeatedly, or if negative at all."""
    counts: Counter[int] = Counter()
    for rows in sequences:
        last = rows[:, -1]
        repeated = last == rows[:, -2] if rows.shape[1] > 1 else np.zeros(len(rows), dtype=bool)
        counts.update(int(token) for token in last[repeated | (last < 0)])
    found = [token for token, _ in counts.most_common() if token not in others]
    return found[0] if found else None


def _until_fill(tensors: dict[str, np.ndarray], names: tuple[str, ...], fill: int) -> Answers:
    """Return sequences that stop where the fill begins."""
    tokens = tensors[names[0]]
    stops = tuple(len(row) - run(row[::-1] == fill) for row in tokens)
    note = f"padding of the second sequences is assumed to be token {fill} at the ends of rows"
    return Answers(tokens.shape[1], stops, frozenset(names), has_loss=False, note=note)
