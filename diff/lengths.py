"""How long the rows of features are, where a second input says it: what lies beyond is padding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

MASK = "(lengths)"
"""The name of the matrix that is made of lengths."""


def with_mask_of_lengths(tensors: dict[str, np.ndarray], *, time_major: bool) -> dict[str, np.ndarray]:
    """Return a part's inputs, first a mask of its features' valid positions where lengths tell it.

    Lengths are whole numbers, one for each row, beyond which the features are zero. The mask is
    [rows, positions], and features that have the positions last are given with them second; if
    ``time_major`` it is [positions, rows]. Without such inputs they are returned as they are.
    """
    for name, value in tensors.items():
        for lengths in tensors.values():
            for moved in _with_positions_second(value, time_major=time_major):
                mask = _mask(moved, lengths)
                if mask is not None:
                    turned = (mask.T, value) if time_major else (mask, moved)
                    return {MASK: turned[0], **tensors, name: turned[1]}
    return tensors


def _with_positions_second(value: np.ndarray, *, time_major: bool) -> Iterator[np.ndarray]:
    """Yield features with rows first and what may be the positions second."""
    if value.ndim < 3 or value.dtype.kind != "f":
        return
    if time_major:
        yield np.swapaxes(value, 0, 1)
        return
    yield value
    yield np.moveaxis(value, -1, 1)


def _mask(features: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    rows, positions = features.shape[:2]
    if lengths.dtype.kind not in "iu" or lengths.shape != (rows,) or not positions:
        return None
    if (lengths < 1).any() or (lengths > positions).any():
        return None
    mask: np.ndarray = np.arange(positions)[None] < lengths[:, None]
    return None if features[~mask].any() else mask.astype(np.int64)
