"""Tells what a program's own value is worth as a plain number: settings come in whatever class it chose.

No method that such a class may have defined is called: its errors would be taken for the recorder's.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np

_REAL = "biuf"  # numpy's letters for booleans, integers and floats


def plain_number(value: object) -> bool | int | float | None:
    """Return a number as one of Python's own; None for what is none, or lies beyond float64.

    numpy's numbers and arrays of one element, ``Decimal`` and ``Fraction`` count, as do members of an enum
    that are numbers. NaN and infinity do, too.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _within(int.__int__(value))
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, (np.generic, np.ndarray)):
        array = np.asarray(value)
        if array.size != 1 or array.dtype.kind not in _REAL:
            return None
        found = array.reshape(()).item()
        return float(found) if array.dtype.kind == "f" else found  # of long doubles item() returns one
    if type(value) in (Decimal, Fraction):
        return _nearest(value)
    return None


def finite_number(value: object) -> bool | int | float | None:
    """Return a number that JSON can hold, an integer of more than 64 bits as a float; None for others."""
    number = plain_number(value)
    if number is None or not math.isfinite(number):
        return None
    return number if isinstance(number, float) or -(1 << 63) <= number < 1 << 63 else float(number)


def _within(value: int) -> int | None:
    return None if _nearest(value) is None else value


def _nearest(value: object) -> float | None:
    assert isinstance(value, (int, Decimal, Fraction))
    try:
        return float(value)
    except (ArithmeticError, ValueError):  # a signalling NaN is a ValueError
        return None
