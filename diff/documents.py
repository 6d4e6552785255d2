"""Where packed rows divide into documents: positions that begin again, or cumulative lengths."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from tensortrace.diff.masks import to_the_end


class Documents(NamedTuple):
    """``begins`` [rows, positions] is true where a document begins; ``told_by`` names what says so.

    What tells it is no part of a document's identity: it differs by packing.
    """

    begins: np.ndarray
    told_by: frozenset[str]

    def divide(self, row: int, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the documents in the valid positions [start, stop) of a row, in order."""
        inside = [int(at) for at in np.flatnonzero(self.begins[row, start:stop]) + start if at > start]
        return list(pairwise([start, *inside, stop]))


def find_documents(inputs: Mapping[str, np.ndarray], tokens: np.ndarray) -> Documents | None:
    """Return where documents begin in a batch's rows, None where nothing that the root was given tells it."""
    begins, told_by = np.zeros(tokens.shape, dtype=bool), set()
    for name, value in inputs.items():
        if value.dtype.kind not in "iu" or value is tokens:
            continue
        if value.shape == tokens.shape and _counts(value):
            begins |= value == 0
            told_by.add(name)
        elif value.ndim == 1 and len(tokens) == 1 and _adds_up(value, tokens.shape[1]):
            begins[0, value[value < tokens.shape[1]]] = True
            told_by.add(name)
    return Documents(begins, frozenset(told_by)) if told_by else None


def find_numbers(inputs: Mapping[str, np.ndarray], documents: Documents) -> frozenset[str]:
    """Return the inputs that number the documents of each row, and say nothing else.

    Such a number is the same all through a document and another in the next one; only documents of one token
    that end a row, as padding looks, may share theirs.
    """
    begins = documents.begins.copy()
    begins[:, 0] = True
    singles = to_the_end(begins)
    found = set()
    for name, value in inputs.items():
        if value.dtype.kind not in "iu" or value.shape != begins.shape or name in documents.told_by:
            continue
        grows = value[:, 1:] != value[:, :-1]
        within, between = ~begins[:, 1:], begins[:, 1:] & ~singles[:, :-1]
        if not (grows & within).any() and (grows | ~between).all() and not value[:, 0].any():
            found.add(name)
    return frozenset(found)


def _counts(value: np.ndarray) -> bool:
    """Tell whether every row counts up from 0 and begins again at 0."""
    if not value.size or value[:, 0].any() or not value.max():
        return False
    return bool(((value[:, 1:] == value[:, :-1] + 1) | (value[:, 1:] == 0)).all())


def _adds_up(value: np.ndarray, length: int) -> bool:
    """Tell whether these are the cumulative lengths of documents in a row of ``length``."""
    if len(value) < 2 or value[0] != 0 or not 1 < value[-1] <= length:
        return False
    return bool((np.diff(value.astype(np.int64)) > 0).all())
