"""What a program's settings are worth as plain numbers, whatever class they are of."""

from __future__ import annotations

import enum
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from tensortrace.tracer.hooks.numbers import finite_number, plain_number


class Level(enum.IntEnum):
    ONE = 1


class Half(enum.Enum):
    HALF = 0.5


class Whole(int):
    def __int__(self) -> int:
        raise RuntimeError("the program's own")

    __float__ = __index__ = __trunc__ = __int__  # type: ignore[assignment]


class Real(float):
    def __float__(self) -> float:
        raise RuntimeError("the program's own")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, True), (3, 3), (0.25, 0.25), (2**70, 2**70), (Whole(3), 3), (Real(0.5), 0.5), (Level.ONE, 1),
        (np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (np.float16(0.5), 0.5), (np.longdouble(0.25), 0.25),
        (np.int8(-3), -3), (np.uint64(2**63), 2**63), (np.bool_(True), True), (np.array(0.5), 0.5),
        (np.array([[7]]), 7), (Decimal("0.1"), 0.1), (Fraction(1, 4), 0.25), (Decimal("1e999"), math.inf),
    ],
)  # fmt: skip
def test_numbers_of_any_class_are_pythons_own(value: object, number: float) -> None:
    found = plain_number(value)
    assert (found, type(found)) == (number, type(number))


@pytest.mark.parametrize(
    "value",
    [
        None, "0.5", b"1", 1j, Half.HALF, math.sqrt, [0.5], {"a": 1}, ..., np.arange(2), np.zeros(0),
        np.complex64(1), np.datetime64("2020"), np.array(Whole(3), dtype=object), np.str_("a"),
        Decimal("sNaN"), 10**400, -(10**400), Fraction(10**400, 3),
    ],
)  # fmt: skip
def test_anything_else_is_no_number(value: object) -> None:
    assert plain_number(value) is None


def test_json_gets_no_number_that_it_cannot_hold() -> None:
    assert [finite_number(value) for value in (math.nan, -math.inf, np.float32("inf"))] == [None] * 3
    assert [finite_number(value) for value in (2**63 - 1, 2**63, -(2**70))] == [
        2**63 - 1,
        2.0**63,
        -(2.0**70),
    ]
