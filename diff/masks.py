"""Which ends of rows a mask hides and the loss ignores, whatever they hold."""

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
