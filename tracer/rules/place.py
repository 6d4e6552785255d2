"""Where a local tensor lies in the global one, from a pattern, sizes and the rank's coordinate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import xxhash

from tensortrace.tracer.rules.pattern import Blocks, Leaf, Pattern, Product, Term, leaves

Copies = Literal["first", "all", "shared"]
"""What of blocks that all ranks of an axis hold beside blocks that it splits: the first rank alone has them,
so that parts don't overlap; every rank has them; or nothing but them is wanted."""


class Unfit(Exception):
    """A tensor that a pattern cannot describe; the text says what was found and what was expected."""


@dataclass(frozen=True)
class Grid:
    """The mesh by axis, and one rank's coordinate in it."""

    sizes: Mapping[str, int]
    where: Mapping[str, int]

    def runs(self, leaf: Leaf, size: int) -> list[range]:
        """Return which of a factor's ``size`` elements the rank holds, in order of the local elements."""
        held = [range(size)]
        for split in leaf.splits:
            n, i = self.sizes[split.axis], self.where[split.axis]
            total = sum(map(len, held))
            if split.how == "zigzag":
                if total % (2 * n):
                    raise Unfit(f"{leaf.name} has {total} elements, expected a multiple of {2 * n}")
                half = total // (2 * n)
                held = _cut(held, half * i, half) + _cut(held, half * (2 * n - 1 - i), half)
            else:
                chunk = -(-total // n)
                held = _cut(held, min(chunk * i, total), chunk)
        return held

    def count(self, leaf: Leaf, size: int) -> int:
        """Return how many of a factor's elements the rank holds."""
        return sum(map(len, self.runs(leaf, size)))

    def ways(self, leaf: Leaf) -> int:
        """Return into how many parts the factor is split."""
        return math.prod(self.sizes[split.axis] for split in leaf.splits)


def _cut(held: Sequence[range], start: int, length: int) -> list[range]:
    """Return ``length`` elements of several ranges, from the ``start``-th on."""
    found, stop = [], start + length
    for run in held:
        if part := run[max(start, 0) : max(stop, 0)]:
            found.append(part)
        start, stop = start - len(run), stop - len(run)
    return found


class Block(NamedTuple):
    """One block of a dimension: where it begins, and its factors with their strides in the dimension."""

    base: int
    factors: tuple[tuple[Leaf, int], ...]


@dataclass(frozen=True)
class Part:
    """A block of the local tensor in its place: what to take of it, and where that lies.

    ``index`` has one vector of local positions per local dimension; what is taken is then seen as
    ``expanded``, transposed by ``order`` and seen as ``shape``. ``held`` are the runs of global positions
    per global dimension. Where ``filled``, these are the global positions of what is taken, and the part is
    as large as the global tensor, with zeros elsewhere.
    """

    index: tuple[np.ndarray, ...]
    expanded: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    held: tuple[tuple[range, ...], ...]
    global_shape: tuple[int, ...]
    filled: tuple[np.ndarray, ...] = ()

    def take(self, array: np.ndarray) -> np.ndarray:
        """Return the part of a local tensor, in the order of the global one."""
        for dim, index in enumerate(self.index):
            if len(index) != array.shape[dim] or not _is_whole(index):
                array = array.take(index, axis=dim)
        if not self.filled:
            return array.reshape(self.expanded).transpose(self.order).reshape(self.shape)
        whole = np.zeros(self.global_shape, dtype=array.dtype)
        whole[np.ix_(*self.filled)] = array.transpose(self.order)
        return whole

    def picked(self) -> str:
        """Return a digest of what is taken and in which order."""
        digest = xxhash.xxh3_64(f"{self.expanded} {self.order} {self.shape}".encode())
        for index in (*self.index, *self.filled):
            digest.update(index.tobytes())
        return digest.hexdigest()

    def is_all(self, local_shape: tuple[int, ...]) -> bool:
        """Tell whether taking it changes nothing."""
        if self.filled:
            return False
        whole = all(len(i) == n and _is_whole(i) for i, n in zip(self.index, local_shape, strict=True))
        return whole and self.shape == local_shape and self.order == tuple(range(len(self.order)))


def _is_whole(index: np.ndarray) -> bool:
    return len(index) == 0 or bool(index[0] == 0 and (np.diff(index) == 1).all())


def solve(
    terms: Sequence[Term], local_shape: tuple[int, ...], sizes: Mapping[str, int], grid: Grid
) -> dict[str, int]:
    """Return the global size of every factor; raise Unfit where the shape cannot be of this pattern.

    At most one size per dimension may be unknown: it is what the local shape leaves for it, split evenly.
    """
    known = dict(sizes)
    for dim, (term, size) in enumerate(zip(terms, local_shape, strict=True)):
        unknown = list(dict.fromkeys(leaf.name for leaf in leaves(term) if leaf.name not in known))
        if len(unknown) > 1:
            names = ", ".join(unknown)
            raise Unfit(f"dimension {dim}: found no size of {names}, expected all but one in 'sizes'")
        if unknown:
            _deduce(term, size, known, grid, dim)
        if (made := _extent(term, known, grid)) != size:
            raise Unfit(f"dimension {dim}: found {size} elements, expected {made} on this rank")
    return known


def _deduce(term: Term, size: int, known: dict[str, int], grid: Grid, dim: int) -> None:
    """Find the one unknown size of a term that has ``size`` local elements."""
    if isinstance(term, Leaf):
        known[term.name] = size * grid.ways(term)
        return
    inner = term.factors if isinstance(term, Product) else term.blocks
    open_ = next(t for t in inner if any(leaf.name not in known for leaf in leaves(t)))
    rest = [_extent(t, known, grid) for t in inner if t is not open_]
    if isinstance(term, Product):
        others = math.prod(rest)
        if others == 0 or size % others:
            raise Unfit(f"dimension {dim}: found {size} elements, expected a multiple of {others}")
        _deduce(open_, size // others, known, grid, dim)
    else:
        if size < sum(rest):
            raise Unfit(f"dimension {dim}: found {size} elements, expected at least {sum(rest)}")
        _deduce(open_, size - sum(rest), known, grid, dim)


def _extent(term: Term, sizes: Mapping[str, int], grid: Grid) -> int:
    """Return the number of a term's elements on the rank."""
    if isinstance(term, Leaf):
        return grid.count(term, sizes[term.name])
    if isinstance(term, Product):
        return math.prod(_extent(factor, sizes, grid) for factor in term.factors)
    return sum(_extent(block, sizes, grid) for block in term.blocks)


def blocks_of(term: Term, sizes: Mapping[str, int], grid: Grid) -> list[Block]:
    """Return the blocks of one dimension, in order; a dimension without ``|`` has one."""
    if isinstance(term, Leaf):
        return [Block(0, ((term, 1),))]
    if isinstance(term, Blocks):
        found, base = [], 0
        for block in term.blocks:
            found += [Block(base + b.base, b.factors) for b in blocks_of(block, sizes, grid)]
            base += _extent(block, sizes, grid)
        return found
    made = [Block(0, ())]
    for factor in term.factors:
        inner = _extent(factor, sizes, grid)
        made = [
            Block(
                outer.base * inner + own.base,
                (*((leaf, stride * inner) for leaf, stride in outer.factors), *own.factors),
            )
            for outer in made
            for own in blocks_of(factor, sizes, grid)
        ]
    return made


Branch = tuple[Block, ...]


def branches(terms: Sequence[Term], sizes: Mapping[str, int], grid: Grid) -> Iterator[Branch]:
    """Yield the tensor's blocks: one block of every dimension in every combination."""
    yield from itertools.product(*(blocks_of(term, sizes, grid) for term in terms))


def names_of(branch: Branch) -> frozenset[str]:
    """Return the names of a block's factors, by which it finds its place in the global tensor."""
    return frozenset(leaf.name for block in branch for leaf, _ in block.factors)


@dataclass
class Placing:
    """Puts the blocks of a local tensor where a target pattern has them.

    ``sizes`` are of the local pattern's factors, ``valid`` how many elements of a padded factor the global
    tensor has.
    """

    terms: tuple[Term, ...]
    sizes: Mapping[str, int]
    valid: Mapping[str, int]
    grid: Grid
    partial: Container[str] = ()
    copies: Copies = "first"
    _nowhere: Grid = field(init=False)

    def __post_init__(self) -> None:
        self._nowhere = Grid({}, {})

    def parts(self, target: Pattern) -> list[Part]:
        """Return the parts of the local tensor that the target has.

        It is one part where every dimension of the target comes of one local dimension, else one for each of
        the target's blocks. Raises Unfit where a block of the target is not in the local tensor.
        """
        if self.copies == "shared":
            return self._shared(target)
        sizes = {**self.sizes, **self.valid}
        terms = [_joined(term, sizes.keys()) for term in target.dims]
        if unknown := {leaf.name for term in terms for leaf in leaves(term)} - sizes.keys():
            raise Unfit(f"{', '.join(sorted(unknown))} is no factor of 'dims'")
        shape = tuple(_extent(term, sizes, self._nowhere) for term in terms)
        dims = [self._dimension(term, sizes) for term in terms]
        known = [dim for dim in dims if dim is not None]
        if len(known) == len(dims) and sorted(d.local for d in known) == list(range(len(self.terms))):
            return [_separate(known, shape)]
        own = {names_of(branch): branch for branch in branches(self.terms, self.sizes, self.grid)}
        found = []
        for branch in branches(terms, sizes, self._nowhere):
            if (names := names_of(branch)) not in own:
                raise Unfit(f"no block of 'dims' has the factors {' '.join(sorted(names))}")
            found.append(self._part(own[names], branch, shape))
        return found

    def _shared(self, target: Pattern) -> list[Part]:
        """Return, for each dimension that has some, the blocks that ranks share beside split ones."""
        sizes = {**self.sizes, **self.valid}
        terms = [_joined(term, sizes.keys()) for term in target.dims]
        shape = tuple(_extent(term, sizes, self._nowhere) for term in terms)
        every = replace(self, copies="all")
        dims = [every._dimension(term, sizes) for term in terms]
        whole = [dim for dim in dims if dim is not None]
        if len(whole) < len(dims):
            return []  # blocks that are tensors of their own are copies of each other as they are
        alone = [self._dimension(term, sizes) for term in terms]
        return [
            _separate([*whole[:n], dim, *whole[n + 1 :]], shape)
            for n, dim in enumerate(alone)
            if dim is not None and len(dim.here)
        ]

    def _dimension(self, term: Term, sizes: Mapping[str, int]) -> _Dimension | None:
        """Return where a dimension of the target comes from, None where not from one local dimension."""
        own = {
            names_of((block,)): (dim, block)
            for dim, local in enumerate(self.terms)
            for block in blocks_of(local, self.sizes, self.grid)
        }
        wanted = blocks_of(term, sizes, self._nowhere)
        if any(names_of((block,)) not in own for block in wanted):
            return None
        pairs = [(block, *own[names_of((block,))]) for block in wanted]
        if len({dim for _, dim, _ in pairs}) > 1:
            return None
        axes = set().union(*(_axes(mine) for _, _, mine in pairs))
        here, there = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for block, _, mine in pairs:
            shared = [axis for axis in axes - _axes(mine) if axis not in self.partial]
            if self.copies == "first" and any(self.grid.where[axis] for axis in shared):
                continue
            if self.copies == "shared" and not shared:
                continue
            strides = {leaf.name: (leaf, stride) for leaf, stride in mine.factors}
            kept = {name: self._kept(leaf) for name, (leaf, _) in strides.items()}
            ordered = Block(mine.base, tuple(strides[leaf.name] for leaf, _ in block.factors))
            here.append(_combine(ordered, {name: positions for name, (positions, _) in kept.items()}))
            there.append(_combine(block, {name: positions for name, (_, positions) in kept.items()}))
        summed = any(axis in self.partial for axis in axes)
        return _Dimension(pairs[0][1], np.concatenate(here), np.concatenate(there), summed)

    def _part(self, local: Branch, target: Branch, global_shape: tuple[int, ...]) -> Part:
        kept = {leaf.name: self._kept(leaf) for block in local for leaf, _ in block.factors}
        order = [leaf.name for block in local for leaf, _ in block.factors]
        wanted = [leaf.name for block in target for leaf, _ in block.factors]
        positions = [_combine(block, {n: there for n, (_, there) in kept.items()}) for block in target]
        return Part(
            index=tuple(_combine(block, {n: here for n, (here, _) in kept.items()}) for block in local),
            expanded=tuple(len(kept[name][0]) for name in order),
            order=tuple(order.index(name) for name in wanted),
            shape=tuple(map(len, positions)),
            held=tuple(_runs(p) for p in positions),
            global_shape=global_shape,
        )

    def _kept(self, leaf: Leaf) -> tuple[np.ndarray, np.ndarray]:
        """Return a factor's local positions that aren't padding, and the global positions of these."""
        size = self.sizes[leaf.name]
        runs = [np.arange(run.start, run.stop, dtype=np.int64) for run in self.grid.runs(leaf, size)]
        there = np.concatenate(runs) if runs else np.zeros(0, dtype=np.int64)
        here = np.flatnonzero(there < self.valid.get(leaf.name, size))
        return here, there[here]


def _axes(block: Block) -> set[str]:
    """Return the axes that split a block."""
    return {split.axis for leaf, _ in block.factors for split in leaf.splits}


class _Dimension(NamedTuple):
    """A dimension of the target: the local one it comes from, what to take of that, and where it lies.

    ``summed``: ranks' parts overlap and add up.
    """

    local: int
    here: np.ndarray
    there: np.ndarray
    summed: bool


def _separate(dims: Sequence[_Dimension], global_shape: tuple[int, ...]) -> Part:
    """Return the part whose dimensions are taken one by one."""
    by_local = sorted(dims, key=lambda dim: dim.local)
    summed = any(dim.summed for dim in dims)
    return Part(
        index=tuple(dim.here for dim in by_local),
        expanded=tuple(len(dim.here) for dim in by_local),
        order=tuple(dim.local for dim in dims),
        shape=global_shape if summed else tuple(len(dim.there) for dim in dims),
        held=tuple((range(n),) for n in global_shape) if summed else tuple(_runs(dim.there) for dim in dims),
        global_shape=global_shape,
        filled=tuple(dim.there for dim in dims) if summed else (),
    )


def _combine(block: Block, positions: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the positions in a dimension of all combinations of its factors' positions, in their order."""
    found = np.array([block.base], dtype=np.int64)
    for leaf, stride in block.factors:
        found = (found[:, None] + positions[leaf.name] * stride).reshape(-1)
    return found


def _runs(positions: np.ndarray) -> tuple[range, ...]:
    """Return ascending positions as runs of neighbours; one empty run where there are none."""
    if not len(positions):
        return (range(0),)
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return tuple(range(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, cuts))


def _joined(term: Term, known: Container[str]) -> Term:
    """Return a target's term with ``(heads d)`` as one factor where 'dims' splits that as a whole."""
    if isinstance(term, Leaf):
        return term
    if isinstance(term, Blocks):
        return Blocks(tuple(_joined(block, known) for block in term.blocks))
    plain = all(isinstance(factor, Leaf) for factor in term.factors)
    name = " ".join(leaf.name for leaf in leaves(term))
    if plain and name in known:
        return Leaf(name)
    return Product(tuple(_joined(factor, known) for factor in term.factors))
