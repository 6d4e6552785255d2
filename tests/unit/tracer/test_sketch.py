"""Sketches: the specified signs, and that parts add up to the whole."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortrace.tracer import sketch
from tensortrace.tracer.errors import DamagedTrace
from tensortrace.tracer.manifest import decode_entry, encode_entry
from tensortrace.tracer.sketch_record import decode_numbers, encode_numbers
from tensortrace.tracer.types import Entry, Kind, Sketch

MASK = (1 << 64) - 1


def mix(number: int) -> int:
    """docs/format.md, section 8, in Python's integers."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & MASK
    return number ^ number >> 31


def word(dim: int, index: int) -> int:
    return mix((mix(mix(0) ^ dim) + index * 0x9E3779B97F4A7C15) & MASK)


def by_definition(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The sum over elements as the format page writes it."""
    if values.ndim == 1:
        folded = {(i // 64, i % 64): x for i, x in enumerate(values)}
    else:
        folded = dict(np.ndenumerate(values))
    found = np.zeros(size)
    for index, x in folded.items():
        words = [word(dim, i) for dim, i in enumerate(index)]
        for t1 in range(size[0]):
            for t2 in range(size[1]):
                sign = math.prod(1 - 2 * (w >> t1 & 1) for w in words[:-1])
                found[t1, t2] += x * sign * (1 - 2 * (words[-1] >> (32 + t2) & 1)) if index else x
    return found


def sides(shape: tuple[int, ...]) -> list[sketch.Side]:
    return [sketch.Side(sketch.words(dim, np.arange(size)), size) for dim, size in enumerate(shape)]


def of(values: np.ndarray, size: tuple[int, int] = (16, 16)) -> np.ndarray:
    flat = values.reshape(-1)
    if values.ndim == 1:
        return sketch.sketch_flat(
            lambda a, b: flat[a:b], sketch.whole_sides(values.shape), [(0, values.size)], size
        )
    return sketch.sketch_product(lambda a, b: flat[a:b], sides(values.shape), size)


def test_the_words_are_those_of_the_format_page() -> None:
    found = [sketch.words(dim, np.array([i], np.uint64))[0] for dim, i in ((0, 0), (0, 1), (2, 5), (1, MASK))]
    expected = [0x238275BC38FCBE91, 0xF89A2566B5822C54, 0x95E6EF67EEB8A2B2, 0x616DA74069FC32EB]
    assert found == expected == [word(0, 0), word(0, 1), word(2, 5), word(1, MASK)]


def test_the_sketches_are_those_of_the_format_page() -> None:
    matrix, vector = np.arange(1.0, 7).reshape(2, 3), np.arange(70.0)
    assert of(matrix, (2, 3)).tolist() == [[3, 3, -3], [11, 3, -11]]
    assert of(vector, (2, 3)).tolist() == [[-809, 53, -553], [807, 205, 283]]


@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 99),
    st.tuples(st.integers(1, 32), st.integers(1, 32)),
)
@settings(max_examples=30, deadline=None)
def test_a_sketch_is_the_sum_that_defines_it(shape: list[int], seed: int, size: tuple[int, int]) -> None:
    values = np.random.default_rng(seed).standard_normal(shape)
    np.testing.assert_allclose(of(values, size), by_definition(values, size), rtol=0, atol=1e-11)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.lists(st.integers(0, 2000), max_size=5),
    st.sampled_from(["float32", "float64", "float16"]),
)
@settings(max_examples=60, deadline=None)
def test_intervals_of_the_flattened_tensor_add_up_to_it(
    shape: list[int], cuts: list[int], dtype: str
) -> None:
    shape = [*shape, 7 * shape[-1]]
    values = np.random.default_rng(len(cuts)).standard_normal(shape).astype(dtype)
    flat = values.reshape(-1)
    edges = sorted({0, flat.size, *(cut % flat.size for cut in cuts)})
    total = np.zeros((16, 16))
    for start, stop in pairwise(edges):
        part = flat[start:stop]
        total += sketch.sketch_flat(
            lambda a, b, part=part: part[a:b], sketch.whole_sides(shape), [(start, stop)]
        )
    bound = 1e-10 if dtype == "float64" else 2.0**-22 * float(np.linalg.norm(values.astype("f8")))
    assert math.sqrt(np.mean((total - of(values.astype("f8"))) ** 2)) <= bound


@pytest.mark.parametrize("pieces", [1, 2, 700])
def test_short_intervals_and_long_ones_give_the_same(pieces: int) -> None:
    values = np.random.default_rng(0).standard_normal((70, 30))
    flat, size = values.reshape(-1), 2100 // pieces
    intervals = [(i * size, (i + 1) * size) for i in range(pieces)]
    found = sketch.sketch_flat(lambda a, b: flat[a:b], sketch.whole_sides(values.shape), intervals)
    np.testing.assert_allclose(found, of(values), rtol=0, atol=1e-10)


def test_what_is_not_finite_counts_as_zero_and_padding_not_at_all() -> None:
    values = np.random.default_rng(0).standard_normal((5, 6, 7)).astype("f4")
    padded = np.full((5, 8, 9), np.nan, "f4")
    padded[:, :6, :7] = values
    padded[1, 2, 3] = values[1, 2, 3] = np.inf
    flat = padded.reshape(-1)
    found = sketch.sketch_product(
        lambda a, b: flat[a:b],
        [
            sketch.Side(words, size)
            for (words, _), size in zip(sides(values.shape), padded.shape, strict=True)
        ],
    )
    values[1, 2, 3] = 0
    np.testing.assert_allclose(found, of(values.astype("f8")), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(300, 256), (5, 3000), (70, 130), (100003,), (9000, 3)])
@pytest.mark.parametrize("kind", ["normal", "positive", "alike"])
def test_sums_in_float32_are_as_near_as_the_format_page_says(shape: tuple[int, ...], kind: str) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype("f4")
    values = {"normal": values, "positive": np.abs(values), "alike": np.full(shape, 0.1, "f4")}[kind]
    exact, norm = of(values.astype("f8")), float(np.linalg.norm(values.astype("f8")))
    assert math.sqrt(np.mean((of(values) - exact) ** 2)) < 2.0**-22 * norm


def test_numbers_whose_sums_float32_cannot_hold_are_summed_in_float64() -> None:
    values = np.full((4, 128), 3e38, "f4")
    found, expected = of(values), of(values.astype("f8"))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e26)


def test_a_wide_row_is_taken_in_pieces() -> None:
    values = np.random.default_rng(0).standard_normal((3, 5000))
    signs = [
        (1 - 2.0 * ((sketch.words(0, np.arange(3))[:, None] >> np.uint64(t)) & np.uint64(1)))
        for t in range(4)
    ]
    columns = 1 - 2.0 * (sketch.words(1, np.arange(5000)) >> np.uint64(32) & np.uint64(1))
    expected = [(values * sign * columns).sum() for sign in signs]
    np.testing.assert_allclose(of(values)[:4, 0], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("scale", "dtype"), [(1.0, "float32"), (1e35, "float64"), (1e-40, "float64"), (0.0, "float32")]
)
def test_numbers_survive_the_record_in_the_dtype_that_holds_them(scale: float, dtype: str) -> None:
    numbers = scale * np.random.default_rng(0).standard_normal((16, 16))
    record = encode_numbers(numbers, dtype="float32", rows=1)
    assert (record.dtype, record.rows) == (dtype, 1)
    np.testing.assert_allclose(decode_numbers(record), numbers, rtol=2.0**-24, atol=0)


def entry_with(record: Sketch) -> Entry:
    return Entry(
        event=0, step=0, microbatch=None, kind=Kind.PARAM, name="w", slot="model", dtype="float32",
        local_shape=(4, 5), digest="0" * 32, sketch=record,
    )  # fmt: skip


def test_an_index_line_with_a_sketch_reads_as_it_was_written() -> None:
    entry = entry_with(encode_numbers(np.ones((8, 4)), dtype="float32"))
    assert decode_entry(encode_entry(entry), where="here") == entry


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"size": (33, 4)}, "sketch.size"),
        ({"size": (8, 5)}, "sketch.values"),
        ({"dtype": "float64"}, "sketch.values"),
        ({"values": "€"}, "sketch.values"),
        ({"rows": 2}, "sketch.rows"),
        ({"positions": 3}, "sketch.positions"),
    ],
)
def test_a_sketch_that_cannot_be_true_is_refused_by_field(change: dict[str, object], complaint: str) -> None:
    import msgspec
    import xxhash

    record = msgspec.structs.replace(encode_numbers(np.ones((8, 4)), dtype="float32"), **change)
    text = msgspec.json.encode(entry_with(record))
    line = b"%b\t%b\n" % (text, xxhash.xxh3_64_hexdigest(text).encode())
    with pytest.raises(DamagedTrace, match=complaint):
        decode_entry(line, where="here")


def test_a_number_that_is_not_finite_is_refused() -> None:
    record = encode_numbers(np.ones((1, 1)), dtype="float64")
    nan = Sketch("AAAAAAAA+H8=", "float64", (1, 1))
    assert decode_numbers(record) == 1.0
    with pytest.raises(DamagedTrace, match="not finite"):
        decode_numbers(nan)
