"""Tests of the generator of a common start against an independent one in numpy and published vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensortrace.tracer.start.generator import key_of, mix, mix_all, signed, text_number, uniform


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator, written out in numpy's wrapping uint64."""
    found = []
    x = np.array([state], dtype=np.uint64)
    for _ in range(count):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        z = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found.append(int((z ^ (z >> np.uint64(31)))[0]))
    return found


def test_the_generator_is_splitmix64() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF
    assert splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]
    assert mix(1234567) == 6457827717110365317
    assert mix(1234567 + 0x9E3779B97F4A7C15) == 3203168211198807973


@pytest.mark.parametrize("state", [0, 1, 1 << 63, (1 << 64) - 1, 0x61C8864680B583EB])
def test_tensors_are_mixed_as_numbers_are(state: int) -> None:
    [mixed] = mix_all(torch.tensor([signed(state)])).tolist()
    assert mixed % (1 << 64) == splitmix64(state, 1)[0] == mix(state)


def test_texts_are_hashed_by_fnv_1a() -> None:
    assert text_number("") == 0xCBF29CE484222325
    assert text_number("a") == 0xAF63DC4C8601EC8C
    assert text_number("foobar") == 0x85944171F73967E8


def test_a_key_folds_its_words_in_order() -> None:
    assert key_of(7) == mix(7)
    assert key_of(7, 3) == mix(mix(7) ^ 3)
    assert key_of(7, "a", 3) == mix(mix(mix(7) ^ 0xAF63DC4C8601EC8C) ^ 3)
    assert key_of(7, "a", "b") != key_of(7, "b", "a")


def test_numbers_lie_in_zero_to_one_and_are_the_upper_53_bits() -> None:
    key = key_of(7, "init", "fc.weight")
    drawn = uniform(key, torch.arange(100_000)).numpy()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 4 / np.sqrt(12 * 100_000), "four standard errors of the mean"
    assert float(drawn[5]) == (mix(key + 5) >> 11) / 2**53
