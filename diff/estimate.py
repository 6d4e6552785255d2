"""A tensor of which only a sketch is known: it can be added and multiplied by numbers, and nothing else.

The numbers of a sketch are linear in the tensor (``docs/format.md``), so what the diff does to tensors by
adding, weighing and scaling it can do to sketches. Everything else raises ``Unkept``: numpy finds no elements
here, so that no result is ever made of a sketch that only elements could give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from tensortrace.diff.logical import NOT_STORED, Unkept

NEEDS_VALUES = f"{NOT_STORED}, and comparing it takes more than adding and scaling, as sketches allow"

_LINEAR: dict[Any, Callable[[Any, Any], Any]] = {
    np.add: lambda x, y: x + y,
    np.subtract: lambda x, y: x - y,
    np.multiply: lambda x, y: x * y,
    np.true_divide: lambda x, y: x / y,
}


class Estimate:
    """Stands for a float64 tensor of ``shape`` whose sketch is ``numbers``.

    ``norm`` is its L2 norm where that was recorded. ``of`` makes the same sketch of a tensor in memory, so
    that one may be added to the other; None where that takes more than the tensor.
    """

    __slots__ = ("norm", "numbers", "of", "shape")

    dtype = np.dtype(np.float64)

    def __init__(
        self,
        numbers: np.ndarray,
        shape: tuple[int, ...],
        norm: float | None = None,
        of: Callable[[np.ndarray], np.ndarray] | None = None,
    ) -> None:
        self.numbers, self.shape, self.norm, self.of = numbers, shape, norm, of

    @property
    def ndim(self) -> int:
        """The number of dimensions of the tensor."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def vector(self) -> np.ndarray:
        """The sketch as a vector whose products with another's estimate those of the tensors."""
        return np.ravel(self.numbers) / math.sqrt(self.numbers.size)

    def astype(self, dtype: object, copy: bool = True) -> Estimate:
        """Return the tensor as it is, which is wide already."""
        if np.dtype(cast(Any, dtype)) != self.dtype:
            raise Unkept(NEEDS_VALUES)
        return self

    def __add__(self, other: object) -> Estimate:
        if not isinstance(other, Estimate | np.ndarray) and other == 0:
            return self
        known = self._like(other)
        return Estimate(self.numbers + known.numbers, self.shape, None, self.of or known.of)

    __radd__ = __add__

    def __sub__(self, other: object) -> Estimate:
        return self + -self._like(other)

    def __rsub__(self, other: object) -> Estimate:
        return -self + other

    def __neg__(self) -> Estimate:
        return self * -1.0

    def __mul__(self, factor: object) -> Estimate:
        number = _number(factor)
        norm = None if self.norm is None else self.norm * abs(number)
        return Estimate(self.numbers * number, self.shape, norm, self.of)

    __rmul__ = __mul__

    def __truediv__(self, factor: object) -> Estimate:
        return self * (1.0 / _number(factor))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Answer numpy's numbers and arrays where they are added or multiplied by; refuse the rest."""
        if ufunc is np.negative and method == "__call__" and not options:
            return -self
        if ufunc not in _LINEAR or method != "__call__" or options or len(inputs) != 2:
            raise Unkept(NEEDS_VALUES)
        left, right = inputs
        if isinstance(left, np.ndarray) and left.ndim:
            left = self._like(left)
        return _LINEAR[ufunc](left if isinstance(left, Estimate) else _plain(left), right)

    def __array_function__(self, function: Any, _: Any, inputs: Any, options: Any) -> Any:
        """Answer what inner products of whole tensors tell; refuse the rest."""
        if not options and function is np.vdot and len(inputs) == 2:
            left, right = vectors(inputs)
            return float(left @ right)
        if not options and function is np.linalg.norm and len(inputs) == 1:
            return float(np.linalg.norm(self.vector)) if self.norm is None else self.norm
        if not options and function is np.any and len(inputs) == 1:
            return bool(self.numbers.any())
        if function is np.shape:
            return self.shape
        raise Unkept(NEEDS_VALUES)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise Unkept(NEEDS_VALUES)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(name) if name.startswith("__") else Unkept(NEEDS_VALUES)

    def _refuse(self, *_: object) -> NoReturn:
        raise Unkept(NEEDS_VALUES)

    __getitem__ = __iter__ = __float__ = __int__ = __index__ = __bool__ = __abs__ = __invert__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __mod__ = __floordiv__ = __rtruediv__ = _refuse
    __hash__ = object.__hash__

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a number")
        return self.shape[0]

    def _like(self, other: object) -> Estimate:
        """Return another tensor as an estimate by the same sketch."""
        if isinstance(other, np.ndarray) and other.shape == self.shape and self.of is not None:
            return estimated(other, self.of)
        if not isinstance(other, Estimate) or other.shape != self.shape:
            raise Unkept(NEEDS_VALUES)
        return other


def estimated(array: np.ndarray, of: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """Return a tensor in memory as an estimate, by a function that makes its sketch."""
    wide = array.astype(np.float64, copy=False)
    norm = float(np.linalg.norm(np.ravel(wide)))
    return Estimate(of(array), array.shape, norm if math.isfinite(norm) else None, of)


def as_array(estimate: Estimate) -> np.ndarray:
    """Return an estimate under the type of what it stands for: it refuses what it cannot do itself."""
    return cast(np.ndarray, estimate)


def is_estimate(value: object) -> bool:
    """Tell whether a tensor is known by its sketch only."""
    return isinstance(value, Estimate)


def alike(arrays: Sequence[np.ndarray]) -> list[Estimate]:
    """Return tensors of one shape, of which at least one is an estimate, as estimates by the same sketch."""
    known: list[Any] = list(arrays)
    first = next(x for x in known if isinstance(x, Estimate))
    return [first._like(x) for x in known]


def vectors(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return tensors of one shape flattened; where any is an estimate, the vectors that stand for all.

    Inner products of the results are those of the tensors, or estimate them.
    """
    if not any(is_estimate(x) for x in arrays):
        return [np.ravel(x) for x in arrays]
    return [x.vector for x in alike(arrays)]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0 else value


def _number(value: object) -> float:
    if isinstance(value, Estimate) or (isinstance(value, np.ndarray) and value.ndim):
        raise Unkept(NEEDS_VALUES)
    return float(cast(Any, value))
