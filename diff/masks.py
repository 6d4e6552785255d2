"""What tells the positions of a batch: its tokens, and which of them a mask hides."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def hidden_ends(
    inputs: Mapping[str, np.ndarray], tokens: np.ndarray, ignored: np.ndarray
) -> np.ndarray | None:
    """Return the last positions of rows that every mask hides and the loss ignores; None where none is known.

    ``ignored`` are the positions [rows, positions] that the loss ignores. A mask is a matrix of two values
    beside the tokens: which of them hides is told by the loss, which wants no hidden position. Where both
    values or neither are wanted, the matrix says nothing about what may be left out.
    """
    wanted = ~ignored
    if not wanted.any():
        return None
    kept = np.zeros(tokens.shape, dtype=bool)
    told = False
    for value in inputs.values():
        if value is tokens or value.shape != tokens.shape or not ((value == 0) | (value == 1)).all():
            continue
        keeps = [flag for flag in (0, 1) if (value[wanted] == flag).all()]
        if len(keeps) != 1:
            return None
        kept |= value == keeps[0]
        told = True
    unwanted = ignored & ~kept
    ends = to_the_end(unwanted)
    return ends if told and ends.any() else None


def tokens_of(tensors: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return token ids [rows, positions], the first integer matrix; of float inputs, their mask."""
    for value in tensors.values():
        if value.ndim == 2 and value.dtype.kind in "iu":
            return value
    mask = mask_of_features(tensors)
    return None if mask is None else mask.astype(np.int64)


def mask_of_features(tensors: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return a matrix of zeros and ones for the positions of features [rows, positions, …]."""
    shapes = {value.shape[:2] for value in tensors.values() if value.ndim > 2}
    for value in tensors.values():
        if value.ndim == 2 and value.shape in shapes and ((value == 0) | (value == 1)).all() and value.any():
            return value
    return None


def mask_of_tokens(tensors: dict[str, np.ndarray]) -> np.ndarray | None:
    """Return a matrix of zeros and ones beside the tokens; its zeros are ends of rows that hold one token."""
    tokens = tokens_of(tensors)
    if tokens is None:
        return None
    for value in tensors.values():
        if value is tokens or value.shape != tokens.shape or not ((value == 0) | (value == 1)).all():
            continue
        left_out = value == 0
        ends = [run(row) + run(row[::-1]) == row.sum() for row in left_out if not row.all()]
        if left_out.any() and ends and all(ends) and len(np.unique(tokens[left_out])) == 1:
            return value
    return None


def in_one_form(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return both runs' attention mask as what each keeps; None where they are not masks of two forms.

    A mask is boolean, of either polarity, or is added to scores: 0 where it keeps and hugely negative where
    it hides, by how much is each implementation's choice. What keeps in a boolean mask is told by the other
    run's: of the two meanings the nearer one.
    """
    left, right = _kept(a), _kept(b)
    if left is None or right is None or a.shape != b.shape:
        return None
    if a.dtype.kind == b.dtype.kind == "b":
        return None
    if a.dtype.kind == "b" and 2 * np.count_nonzero(left != right) > left.size:
        left = ~left
    if b.dtype.kind == "b" and 2 * np.count_nonzero(left != right) > left.size:
        right = ~right
    return left, right


def has_padding(mask: np.ndarray, rows: int) -> list[bool]:
    """Return which rows an attention mask [rows, …, positions] hides ends of; [] of what is no such mask.

    Of a boolean mask either value may hide: the one that stands at ends of rows and never begins them.
    """
    kept = _kept(mask)
    if kept is None or mask.ndim < 2 or len(mask) != rows:
        return []
    seen = kept.reshape(rows, -1, mask.shape[-1])
    meanings = [np.asarray(~seen.any(axis=1)), np.asarray(seen.all(axis=1))]
    for hidden in meanings if mask.dtype.kind == "b" else meanings[:1]:
        ends = all(run(row[::-1]) == np.count_nonzero(row) for row in hidden)
        if ends and hidden.any() and not hidden[:, 0].any():
            return [bool(row.any()) for row in hidden]
    return []


_HIDES = -1e3
"""What is added to a score to hide it is at most this: smaller ones are biases."""


def _kept(mask: np.ndarray) -> np.ndarray | None:
    """Return where a mask is true, or 0 where it is added to scores; None of what is neither."""
    if mask.dtype.kind == "b":
        return mask
    if mask.dtype.kind != "f" or not mask.size:
        return None
    kept = mask == 0
    return kept if (kept | (mask <= _HIDES)).all() and not kept.all() else None


def to_the_end(flags: np.ndarray, axis: int = 1) -> np.ndarray:
    """Return where values are true and stay so to the end of an axis, that of positions [rows, positions]."""
    ends: np.ndarray = np.flip(np.logical_and.accumulate(np.flip(flags, axis), axis=axis), axis)
    return ends


def run(flags: np.ndarray) -> int:
    """Return the length of the leading run of true values."""
    return int(len(flags) if flags.all() else np.argmin(flags))
