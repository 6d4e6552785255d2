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
    ends = np.logical_and.accumulate(unwanted[:, ::-1], axis=1)[:, ::-1]
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


def run(flags: np.ndarray) -> int:
    """Return the length of the leading run of true values."""
    return int(len(flags) if flags.all() else np.argmin(flags))
