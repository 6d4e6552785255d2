"""What each dimension of a row-aligned tensor is, told from its sizes in the parts of both runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from tensortrace.diff.catalog import Item, Part
from tensortrace.diff.extent import Extent
from tensortrace.diff.pairing import Pairing
from tensortrace.diff.rows import Row

Label = Literal["rows", "positions", "others", "flat", "grouped", "stacked", ""]
"""What a dimension of a row-aligned tensor is: samples, positions, both flattened, or neither.

``grouped`` is samples flattened with something else: every sample owns as many consecutive entries;
``stacked`` is whole batches one after the other, as after a concatenation. ``others`` are positions of the
other one of a row's two sequences, beside those of the first: in maps of attention between them.
"""


def label_dims(
    cases: Sequence[tuple[tuple[int, ...], Extent]], *, row_bound: bool = False
) -> tuple[Label, ...] | None:
    """Say what each dimension is, from its size in every part of both runs; None where no reading fits.

    A dimension is ``rows`` (once, the first or second) if its size is the number of rows in every part,
    ``positions`` (at most twice: attention maps) if it is the padded length in every part, ``flat`` if it is
    their product. Where all parts are padded alike and several dimensions have that size, features cannot be
    told from positions: none is cut, so that padding is compared too rather than features left out.
    The first dimension is ``grouped`` if it is the same multiple of the number of rows in parts of different
    numbers of rows, or where ``row_bound`` says that the tensor holds one entry per token (a loss's target).
    """
    if len({len(shape) for shape, _ in cases}) != 1:
        return None
    labels: list[Label] = []
    for dim in range(len(cases[0][0])):
        label = _label(dim, cases, labels)
        if dim == 0 and not label and _is_grouped(cases, row_bound=row_bound):
            label = "grouped"
        if label is None:
            return None
        labels.append(label)
    if "others" in labels and "positions" not in labels:
        return None
    padded_alike = len({extent.positions for _, extent in cases}) == 1
    if padded_alike and labels.count("positions") > 1:
        return tuple("" if label == "positions" else label for label in labels)
    return tuple(labels)


def _label(
    dim: int, cases: Sequence[tuple[tuple[int, ...], Extent]], before: Sequence[Label]
) -> Label | None:
    sizes = [(shape[dim], extent) for shape, extent in cases]
    unlabelled = not {"rows", "flat", "grouped"} & set(before)
    turned = all(e.time_major for _, e in sizes)
    if turned and dim == 0 and all(size == e.positions for size, e in sizes):
        return "positions"
    if unlabelled and dim < 2 and all(size == e.rows for size, e in sizes):
        return "rows"
    if dim == 0 and all(e.packed and e.rows == 1 and size == e.positions for size, e in sizes):
        return "flat"  # the tokens of the one row: they follow its documents, not their places in the row
    if before.count("positions") < 2 and all(size == e.positions for size, e in sizes):
        return "positions"
    if unlabelled and dim == 0 and all(e.positions and size == e.rows * e.positions for size, e in sizes):
        return "flat"
    if len({size for size, _ in sizes}) == 1:
        return ""
    return "others" if all(size == e.answers for size, e in sizes) else None


def _is_grouped(cases: Sequence[tuple[tuple[int, ...], Extent]], *, row_bound: bool) -> bool:
    if any(not e.rows or shape[0] % e.rows or shape[0] <= e.rows for shape, e in cases):
        return False
    same = len({shape[0] // e.rows for shape, e in cases}) == 1
    return same and (row_bound or len({e.rows for _, e in cases}) > 1)


def read_dims(
    of_a: dict[Part, Item], of_b: dict[Part, Item], pairing: Pairing, *, row_bound: bool
) -> tuple[tuple[Label, ...] | None, Pairing]:
    """Return what the dimensions are, and the rows and positions by which they are.

    They are the batch's, or those of a second sequence of each row, or either less the last position: a
    causal loss shifts by one.
    """
    second = pairing.of_answers()
    found = [(_labels_by(of_a, of_b, pairing, row_bound=row_bound), pairing)]
    for other in (second, one_position_fewer(pairing), second and one_position_fewer(second)):
        if has_rows(found[-1][0]):
            return found[-1]
        if other is not None:
            found.append((_labels_by(of_a, of_b, other, row_bound=False), other))
    if has_rows(found[-1][0]):
        return found[-1]
    if second is not None and found[0][0] is None:
        return found[1]
    return found[0]


def _labels_by(
    of_a: dict[Part, Item], of_b: dict[Part, Item], pairing: Pairing, *, row_bound: bool
) -> tuple[Label, ...] | None:
    sides = ((of_a, pairing.extents_a), (of_b, pairing.extents_b))
    cases = [
        (i.entry.local_shape, known[p]) for found, known in sides for p, i in found.items() if p in known
    ]
    return label_dims(cases, row_bound=row_bound)


def has_rows(labels: tuple[Label, ...] | None) -> bool:
    """Tell whether a tensor follows the rows."""
    return labels is not None and bool({"rows", "flat", "grouped"} & set(labels))


def one_position_fewer(pairing: Pairing) -> Pairing:
    """Return the pairing as it is for tensors that hold all positions of a row but its last."""

    def row(found: Row) -> Row:
        return found._replace(stop=max(found.start, found.stop - 1))

    return replace(
        pairing,
        pairs=tuple((row(x), row(y)) for x, y in pairing.pairs),
        extents_a={part: e.one_fewer() for part, e in pairing.extents_a.items()},
        extents_b={part: e.one_fewer() for part, e in pairing.extents_b.items()},
    )
