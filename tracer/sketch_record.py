"""A sketch's numbers as they stand in an index line, and back."""

from __future__ import annotations

import binascii

import numpy as np

from tensortrace.tracer.errors import DamagedTrace
from tensortrace.tracer.sketch import Numbers
from tensortrace.tracer.types import Sketch

ROUNDING = 2.0**-24
"""What a float32 number of a sketch may be off by, relatively."""

_LEAST, _MOST = 1e-30, 1e30
"""A sketch whose greatest number lies between these loses nothing to float32's range."""


def encode_numbers(
    numbers: Numbers, *, dtype: str, rows: int | None = None, positions: int | None = None
) -> Sketch:
    """Return the record of a finite sketch of a tensor of this dtype, float64 where float32 would lose."""
    top = float(np.abs(numbers).max())
    wide = dtype == "float64" or not (_LEAST < top < _MOST or top == 0.0)
    text = binascii.b2a_base64(numbers.astype("<f8" if wide else "<f4").tobytes(), newline=False).decode()
    first, second = numbers.shape
    return Sketch(text, "float64" if wide else "float32", (first, second), rows, positions)


def decode_numbers(sketch: Sketch) -> Numbers:
    """Return the numbers, [K1, K2] in float64; raise DamagedTrace where one isn't finite.

    The record's size and text were checked when its line was read.
    """
    data = np.frombuffer(binascii.a2b_base64(sketch.values), "<f8" if sketch.dtype == "float64" else "<f4")
    numbers = data.astype("f8").reshape(sketch.size)
    if not np.isfinite(numbers).all():
        raise DamagedTrace("field sketch.values", found="a number that is not finite")
    return numbers
