"""Tensors read block by block: sums of recorded tensors, and pairs of them, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from tensortrace.diff.assemble import Assembled, NotComparable
from tensortrace.diff.catalog import Item
from tensortrace.diff.compare import EPS, Sides, is_exact
from tensortrace.diff.estimate import Estimate, alike, as_array, is_estimate
from tensortrace.diff.sketched import known_blocks, known_through
from tensortrace.tracer.geometry_blocks import block_grid
from tensortrace.tracer.reader_rank import RankTrace

BLOCK_ELEMENTS = 1 << 20
"""Elements of a block; a computation on a block holds a dozen arrays of this size."""

LARGE_ELEMENTS = 16 << 20
"""Tensors of more elements are never held as a whole."""

PASSED_ELEMENTS = 1 << 18
"""Elements of a block of what is gone through once: it stays in the processor's cache until it is done."""


def block_size(shape: Sequence[int]) -> int:
    """Return how many elements to read at a time: it depends on the shape alone, so that blocks meet."""
    size = math.prod(shape)
    return BLOCK_ELEMENTS if size > 2 * BLOCK_ELEMENTS else max(size, 1)


class Readable(Protocol):
    """A tensor that can be read as a whole or in blocks of the grid of its shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""

    @property
    def exact(self) -> bool:
        """Whether the values are integers or booleans."""

    def read(self) -> np.ndarray:
        """Return the whole."""

    def blocks(self, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield the blocks in row-major order, of ``block_size`` elements, or one block alone."""


@dataclass(frozen=True)
class Whole:
    """A tensor that is in memory, or that a broadcast makes of a number."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return self.array.shape

    @property
    def exact(self) -> bool:
        """Whether the values are integers or booleans."""
        return self.array.dtype.kind in "iub"

    def read(self) -> np.ndarray:
        """Return the array."""
        return self.array

    def blocks(self, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield views of the array, or one alone."""
        for number, (offset, shape) in enumerate(block_grid(self.shape, block_size(self.shape))):
            if only is None or only == number:
                yield self.array[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def zeros(shape: tuple[int, ...]) -> Whole:
    """Return zeros that take no memory."""
    return Whole(np.broadcast_to(np.zeros(()), shape))


class Term(NamedTuple):
    """A recorded tensor, multiplied and divided."""

    item: Item
    times: float = 1.0
    over: float = 1.0


@dataclass(frozen=True)
class Sum:
    """Σ item · times / over in float64; one item that is neither multiplied nor divided keeps its dtype."""

    terms: tuple[Term, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first term, which is that of all."""
        return self.terms[0].item.entry.local_shape

    @property
    def exact(self) -> bool:
        """Whether the values are integers or booleans as they are."""
        item, times, over = self.terms[0]
        return len(self.terms) == 1 and times == over == 1.0 and is_exact(item.entry.dtype)

    @property
    def digest(self) -> str | None:
        """The digest of what is read: of one stored item as it is; else None."""
        item, times, over = self.terms[0]
        plain = len(self.terms) == 1 and times == over == 1.0 and not item.bare
        return f"{item.entry.dtype} {item.entry.digest}" if plain else None

    @property
    def norm(self) -> float | None:
        """The norm by statistics: of one term; None where they do not tell."""
        item, times, over = self.terms[0]
        norm = norm_of(item) if len(self.terms) == 1 else None
        return norm and norm * abs(times) / abs(over)

    def read(self) -> np.ndarray:
        """Return the whole sum."""
        return self._add(term.item.read() for term in self.terms)

    def blocks(self, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield the sum block by block, or one block alone."""
        if not self.is_even:
            yield from Whole(self.read()).blocks(only)
            return
        for found in zip(*(item_blocks(term.item, only) for term in self.terms), strict=True):
            yield self._add(found)

    @property
    def is_even(self) -> bool:
        """Whether all terms are of one shape, so that their blocks meet."""
        return len({term.item.entry.local_shape for term in self.terms}) == 1

    def through(self, most: int | None = None) -> Iterator[np.ndarray]:
        """Yield the sum block by block, for who uses nothing before the last step, which may raise.

        ``most`` is how many elements a block may have where the terms are even.
        """
        if not self.is_even:
            yield from self.blocks()
            return
        for found in zip(*(whole_blocks(term.item, most) for term in self.terms), strict=True):
            yield self._add(found)

    def scaled(self, factor: float) -> Sum:
        """Return the sum times a factor, in float64."""
        return Sum(tuple(term._replace(times=term.times * factor) for term in self.terms))

    def _add(self, arrays: Iterable[np.ndarray]) -> np.ndarray:
        total: np.ndarray | None = None
        for (_, times, over), array in zip(self.terms, arrays, strict=True):
            if len(self.terms) == 1 and times == over == 1.0:
                return array
            value = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
            value = value * times if times != 1.0 else value
            value = value / over if over != 1.0 else value
            with np.errstate(invalid="ignore"):  # of infinities
                total = value if total is None else total + value
        assert total is not None  # there is a term
        return total


def item_blocks(item: Item, only: int | None = None, most: int | None = None) -> Iterator[np.ndarray]:
    """Yield a recorded tensor block by block, or one block alone."""
    return known_blocks(item.source, item.entry, most or block_size(item.entry.local_shape), only)


def whole_blocks(item: Item, most: int | None = None) -> Iterator[np.ndarray]:
    """Yield a recorded tensor block by block, for who uses nothing before the last step, which may raise."""
    return known_through(item.source, item.entry, most or block_size(item.entry.local_shape))


def through(tensor: Readable) -> Iterator[np.ndarray]:
    """Yield the blocks of a tensor, for who uses nothing of what it makes of them before the last step.

    Digests are checked along the way, in the place of a pass of their own.
    """
    return tensor.through() if isinstance(tensor, Sum) else tensor.blocks()


def one(item: Item) -> Sum:
    """Return a recorded tensor as it is."""
    return Sum((Term(item),))


@dataclass(frozen=True)
class Streamed:
    """Both sides of a boundary whose tensor is too large to hold; they can be gone through repeatedly."""

    a: Readable
    b: Readable

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of both sides."""
        return self.a.shape

    @property
    def exact(self) -> bool:
        """Whether the values are integers or booleans."""
        return self.a.exact

    def blocks(self) -> Iterator[Sides]:
        """Yield both sides block by block; whoever is first goes through all before using anything of it."""
        a, b = self.a, self.b
        if isinstance(a, Sum) and isinstance(b, Sum) and a.is_even and b.is_even:
            return zip(a.through(PASSED_ELEMENTS), b.through(PASSED_ELEMENTS), strict=True)
        return zip(through(a), through(b), strict=True)

    def window(self, number: int) -> Assembled:
        """Return one block of both sides."""
        return Assembled(next(self.a.blocks(number)), next(self.b.blocks(number)))


@dataclass(frozen=True)
class Unread(Streamed):
    """Both sides of a boundary that nobody has read, each a recorded tensor as it stands in its file.

    They are gone through in blocks that stay in the cache: reading both into memory first would take longer
    than measuring them. Whoever does more than that takes ``whole``.
    """

    a: Sum
    b: Sum

    @classmethod
    def of(cls, a: Readable, b: Readable) -> Unread | None:
        """Return two tensors of two dimensions or more; None of what has no large blocks, or no such file."""
        if not (isinstance(a, Sum) and isinstance(b, Sum)) or len(a.shape) < 2:
            return None
        plain = a.digest != b.digest and all(_is_stored_plainly(side) for side in (a, b))
        return cls(a, b) if plain and math.prod(a.shape) > PASSED_ELEMENTS >= a.shape[-1] else None

    def read(self) -> Assembled | Streamed:
        """Return both sides as arrays unless they are large."""
        return _read(self.a, self.b)


def _is_stored_plainly(tensor: Sum) -> bool:
    """Tell whether all that is to be done to a tensor is to read it."""
    item = tensor.terms[0].item
    if tensor.digest is None or item.entry.dtype not in EPS or not isinstance(item.source, RankTrace):
        return False
    blob = item.source.blob_of(item.entry)
    return blob is not None and blob.codec == "raw"


def whole(loaded: Assembled | Streamed) -> Assembled | Streamed:
    """Return both sides of a boundary for who does more than go through them once."""
    return loaded.read() if isinstance(loaded, Unread) else loaded


@dataclass(frozen=True)
class Same(Streamed):
    """Both sides of a boundary that are one recorded tensor by their digests: nobody need read it.

    ``norm`` and ``nonfinite`` are what its recorded statistics say.
    """

    norm: float
    nonfinite: int

    @classmethod
    def of(cls, a: Readable, b: Readable) -> Same | None:
        """Return two tensors that are one; None where they are not, or where more than its norm may be asked.

        Single elements are looked at of vectors, and of what one rank does not hold as a whole.
        """
        if not (isinstance(a, Sum) and isinstance(b, Sum)) or a.digest is None or a.digest != b.digest:
            return None
        item = a.terms[0].item
        norm = norm_of(item)
        if norm is None or len(a.shape) < 2 or not isinstance(item.source, RankTrace):
            return None
        return cls(a, b, norm, math.prod(a.shape) - finite_of(item))


def norm_of(item: Item) -> float | None:
    """Return the norm of a recorded tensor of real numbers by its statistics; None where they do not tell."""
    stats = item.entry.stats
    known = stats is not None and item.entry.dtype in EPS and not item.entry.dtype.startswith("complex")
    return stats.l2 if stats is not None and known else None


def finite_of(item: Item) -> int:
    """Return how many elements of a recorded tensor are finite by its statistics, which there are."""
    assert item.entry.stats is not None
    return item.entry.stats.finite


@dataclass(frozen=True)
class Known:
    """An estimate as a tensor that is one block."""

    estimate: Estimate

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.estimate.shape

    @property
    def exact(self) -> bool:
        """Return False: whole numbers have no sketches."""
        return False

    def read(self) -> np.ndarray:
        """Return the estimate."""
        return as_array(self.estimate)

    def blocks(self, only: int | None = None) -> Iterator[np.ndarray]:
        """Yield the estimate."""
        if not only:
            yield self.read()


@dataclass(frozen=True)
class Sketched(Streamed):
    """Both sides of a boundary of which only sketches are known."""

    a: Known
    b: Known

    @classmethod
    def of(cls, a: Estimate, b: Estimate) -> Sketched:
        """Return two estimates; raise NotComparable where shapes, or the sketches' sizes, differ."""
        if a.numbers.shape != b.numbers.shape:
            raise NotComparable("the runs' sketches are of different sizes")
        if a.shape != b.shape:
            raise NotComparable(f"global shapes differ: {list(a.shape)} in a, {list(b.shape)} in b")
        return cls(Known(a), Known(b))

    @property
    def sides(self) -> tuple[Estimate, Estimate]:
        """Both estimates."""
        return self.a.estimate, self.b.estimate


def _estimates(a: Readable, b: Readable) -> Sketched | None:
    """Return both sides by their sketches where some tensor of either was not stored with its values."""
    terms = [term for side in (a, b) if isinstance(side, Sum) for term in side.terms]
    if not any(term.item.bare for term in terms):
        return None
    x, y = a.read(), b.read()
    known = x if is_estimate(x) else y
    if not is_estimate(known):
        return None
    left, right = alike([x, y])
    return Sketched.of(left, right)


def paired(a: Readable, b: Readable) -> Assembled | Streamed:
    """Return both sides, as arrays unless they are large or need no more than to be gone through.

    Raises NotComparable where shapes differ.
    """
    if a.shape != b.shape:
        raise NotComparable(f"global shapes differ: {list(a.shape)} in a, {list(b.shape)} in b")
    if (estimates := _estimates(a, b)) is not None:
        return estimates
    if (same := Same.of(a, b)) is not None:
        return same
    return Unread.of(a, b) or _read(a, b)


def _read(a: Readable, b: Readable) -> Assembled | Streamed:
    """Return both sides as arrays unless they are large."""
    if math.prod(a.shape) > LARGE_ELEMENTS:
        return Streamed(a, b)
    left = a.read()
    equal = isinstance(a, Sum) and isinstance(b, Sum) and a.digest is not None and a.digest == b.digest
    return Assembled(left, left if equal else b.read())


def block_of(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of the block that holds an element."""
    for number, (offset, size) in enumerate(block_grid(shape, block_size(shape))):
        if all(o <= i < o + n for i, o, n in zip(index, offset, size, strict=True)):
            return number
    raise IndexError(f"{list(index)} in {list(shape)}")
