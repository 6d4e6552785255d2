"""The rules of activations and their gradients: shape and value at the first microbatch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tensortrace.diff.infer.found import Body
from tensortrace.diff.infer.grid import PART
from tensortrace.diff.infer.runs import Recorded, Slot
from tensortrace.diff.infer.values import Candidate, Joined, ways_to_join
from tensortrace.tracer.types import ROOT, Entry, Kind


@dataclass(frozen=True)
class Reference:
    """The reference's pass over the rows that one cell of the other run saw in its first microbatch."""

    own: Recorded
    entries: Mapping[Slot, Entry]
    rows: np.ndarray
    count: int
    positions: int | None = None

    def readings(self, slot: Slot, shapes: Sequence[tuple[int, ...]] = ()) -> list[np.ndarray]:
        """Return a tensor cut to the rows, in every way that its shape lets rows be found in it.

        Rows are the first dimension or the second, or flattened with the positions, before them or behind.
        ``shapes`` are those of the parts, which decide where two dimensions are as long as there are rows.
        Empty where the tensor was not recorded.
        """
        if slot not in self.entries:
            return []
        value = self.own.read(self.entries[slot])
        if len(self.rows) == self.count and bool((self.rows == np.arange(self.count)).all()):
            return [value]
        dims = [dim for dim in range(min(value.ndim, 2)) if value.shape[dim] == self.count]
        fewer = [d for d in dims if shapes and all(len(s) > d and s[d] == len(self.rows) for s in shapes)]
        if dims:
            return [np.take(value, self.rows, axis=dim) for dim in (fewer or dims)]
        if self.positions and value.ndim and value.shape[0] == self.count * self.positions:
            rest = value.shape[1:]
            first = value.reshape(self.count, self.positions, *rest)[self.rows]
            behind = value.reshape(self.positions, self.count, *rest)[:, self.rows]
            return [cut.reshape(-1, *rest) for cut in (first, behind)]
        return [value]


def find_reference(whole: Sequence[Recorded], cell: Sequence[Recorded]) -> tuple[int, Reference] | None:
    """Return the cell's first microbatch and the reference's pass over its rows, by the root's inputs."""
    for own in cell:
        for microbatch in sorted(own.passes):
            if (ids := ids_of(own, microbatch)) is None:
                continue
            for other in whole:
                for number in sorted(other.passes):
                    theirs = ids_of(other, number)
                    rows = None if theirs is None else rows_in(ids, theirs)
                    if rows is not None and theirs is not None:
                        return microbatch, Reference(
                            other, other.passes[number], rows, len(theirs), *theirs.shape[1:2]
                        )
    return None


def ways(
    parts: Sequence[tuple[Recorded, Entry]], slot: Slot, reference: Reference, candidates: Sequence[Candidate]
) -> list[Joined]:
    """Return how the parts of a boundary make the reference's tensor; empty where in no known way."""
    values = [own.read(entry) for own, entry in parts]
    for whole in reference.readings(slot, [value.shape for value in values]):
        found = ways_to_join(values, whole, candidates, scaled=slot[0] == Kind.ACTIVATION_GRAD)
        if found:
            return found
    return []


def way_by_shape(
    parts: Sequence[tuple[Recorded, Entry]],
    slot: Slot,
    reference: Reference,
    own: Candidate | None,
    candidates: Sequence[Candidate],
) -> Joined | None:
    """Return the one way in which shapes let parts make the reference's tensor, None where none or several.

    ``own`` is how the module's own parameter is split, which its output follows.
    """
    shapes = [entry.local_shape for _, entry in parts]
    whole = next(iter(reference.readings(slot, shapes)), None)
    if whole is None or any(len(shape) != whole.ndim for shape in shapes):
        return None
    copies = len({entry.digest for _, entry in parts}) == 1
    if copies or all(shape == whole.shape for shape in shapes):
        return Joined("same", 0.0) if copies and shapes[0] == whole.shape else None
    last = whole.ndim - 1
    if own and slot[2] == "out" and own.size == whole.shape[last]:
        return Joined("split", 0.0, last, own.term) if not own.term.permutes else None
    dims = [
        dim
        for dim in range(whole.ndim)
        if all(s[:dim] + s[dim + 1 :] == whole.shape[:dim] + whole.shape[dim + 1 :] for s in shapes)
        and sum(shape[dim] for shape in shapes) == whole.shape[dim]
    ]
    if dims:
        return Joined("split", 0.0, dims[0]) if len(dims) == 1 else None
    fitting = {
        (dim, c.term)
        for dim in range(whole.ndim)
        for c in candidates
        if c.size == whole.shape[dim] and [len(v) for v in c.vectors] == [shape[dim] for shape in shapes]
    }
    if len(fitting) == 1 and not (found := fitting.pop())[1].permutes:
        return Joined("split", 0.0, *found)
    return None


def body_of(way: Joined, ndim: int, *, split_axis: bool) -> Body:
    """Return what a rule says of tensors that are joined so."""
    names = ["b", "s", "h"][:ndim] if ndim <= 3 else [f"d{dim}" for dim in range(ndim)]
    if way.how in ("same", "partial"):
        return Body(" ".join([*names, *([f"{way.how}:{PART}"] if split_axis else [])]))
    if way.term is None:
        names[way.dim] += f"[{PART}]"
        return Body(" ".join(names))
    names = _other_names(names, way.dim, way.term.text)
    whole = [*names[: way.dim], way.term.whole, *names[way.dim + 1 :]]
    names[way.dim] = way.term.text
    turned = " ".join(whole) if way.term.permutes else None
    added = [f"partial:{PART}"] if way.how == "added" else []
    return Body(" ".join([*names, *added]), None, way.term.sizes, way.term.valid, turned)


def _other_names(names: Sequence[str], dim: int, term: str) -> list[str]:
    """Return names of dimensions of which none but that of ``dim`` is one that its term has."""
    taken = set(re.findall(r"[a-z]+[0-9]*", re.sub(r"\[[^\]]*\]", "", term)))
    free = (name for name in "bshdefg" if name not in taken and name not in names)
    return [next(free) if name in taken and at != dim else name for at, name in enumerate(names)]


def ids_of(own: Recorded, microbatch: int) -> np.ndarray | None:
    """Return what the root was first given."""
    for (kind, name, _), entry in own.passes[microbatch].items():
        if kind == Kind.INPUT and name == ROOT and entry.local_shape:
            return own.read(entry)
    return None


def rows_in(ids: np.ndarray, theirs: np.ndarray) -> np.ndarray | None:
    """Return which rows of ``theirs`` these are, None where some are none of them."""
    if ids.shape[1:] != theirs.shape[1:] or ids.dtype != theirs.dtype:
        return None
    at = {row.tobytes(): number for number, row in reversed(list(enumerate(theirs)))}
    found = [at.get(row.tobytes()) for row in ids]
    return None if None in found else np.array(found, dtype=np.int64)
