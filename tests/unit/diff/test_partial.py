"""The partial sums of a gradient's terms, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace as Fake
from typing import Any

import numpy as np
import pytest

from tensortrace.diff.catalog import Slot
from tensortrace.diff.partial import growth
from tensortrace.tracer.types import Kind

OUT = Slot("train", Kind.ACTIVATION_GRAD, "layer", "out", 0)


def grown(*parts: np.ndarray, shape: tuple[int, ...]) -> float:
    """Return the growth of a gradient whose terms are these in one run, and one number in the other."""
    items = tuple(Fake(entry=Fake(local_shape=part.shape), read=lambda part=part: part) for part in parts)
    entry: Any = Fake(magnitude_of=((None, OUT), (0, OUT)))
    pair: Any = Fake(a=Fake(items={OUT: items}), b=Fake(items={}))
    return growth(entry, shape, pair)


def signed(*signs: int) -> np.ndarray:
    return np.array(signs, np.float32)[:, None]


def test_terms_of_one_sign_before_those_of_the_other() -> None:
    # The partial sums of eight +1 and eight -1 are 1, 2, ..., 8, 7, ..., 0. Their squares add up to
    # 2 * 140 + 64 = 344; sixteen terms of random signs would have 16 * 17 / 2, the model's 16 * 16 / 2.
    assert grown(signed(*[1] * 8, *[-1] * 8), shape=(1,)) == pytest.approx(math.sqrt(344 / 128))


def test_parts_are_added_up_apart() -> None:
    # Each part's partial sums are 1, 2, 3, 4, 3, 2, 1, 0, of squares 44; twice that over 16 * 16 / 2.
    part = signed(1, 1, 1, 1, -1, -1, -1, -1)
    assert grown(part, part, shape=(1,)) == 1.0  # 88 / 128
    assert grown(part, shape=(1,)) == pytest.approx(math.sqrt(44 / 32))


def test_signs_that_alternate_are_no_larger() -> None:
    assert grown(signed(*[1, -1] * 8), shape=(1,)) == 1.0


def test_channels_may_come_before_positions() -> None:
    images = np.concatenate([np.ones((4, 3, 2), np.float32), -np.ones((4, 3, 2), np.float32)])
    assert grown(images, shape=(3, 5)) == pytest.approx(math.sqrt(344 / 128))  # 8 terms up and 8 down


def test_what_is_added_up_by_index_tells_nothing() -> None:
    assert grown(signed(*[1] * 8), shape=(100, 7)) == 1.0
