"""Tensors to frames and back, digests and statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tensortrace.tracer.codec import (
    FRAME_BYTES,
    BadFrame,
    Decoder,
    Encoder,
    logical,
    parse_frame,
    stored_frame,
    stored_parts,
)
from tensortrace.tracer.codec_dtypes import DTYPES, dtype_of, encoded, size_bytes, values
from tensortrace.tracer.codec_values import digest, statistics
from tensortrace.tracer.errors import TraceError
from tests.synthetic import logical_bytes

SMALL_FLOATS = [name for name in DTYPES if name.startswith("float8")]


class Memory:
    """Bytes as a source of frames."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def at(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]


def round_trip(data: np.ndarray, dtype: str, compress: str = "auto") -> np.ndarray:
    encoder = Encoder(compress)
    codec = encoder.codec_of(dtype, data)
    stream = Memory(b"".join(b"".join(frame) for frame in encoder.frames(codec, dtype, data)))
    raw, offset = b"", 0
    while offset < len(stream.data):
        frame = parse_frame(stream, offset)
        assert frame.content <= FRAME_BYTES
        raw += Decoder().frame(stream.at(offset, frame.length), frame)
        offset += frame.length
    return logical(codec, dtype, np.frombuffer(raw, np.uint8))


def written(codec: str, data: np.ndarray) -> int:
    """Return the size of all frames."""
    return sum(len(part) for frame in Encoder().frames(codec, "float32", data) for part in frame)


@pytest.mark.parametrize("compress", ["auto", "planes", "best", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [0, 1, 5, 1023, 1024, 70_001])
def test_bytes_of_every_dtype_come_back(dtype: str, elements: int, compress: str) -> None:
    data = np.random.default_rng(1).integers(0, 256, elements * dtype_of(dtype).itemsize, np.uint8)
    np.testing.assert_array_equal(round_trip(data, dtype, compress), data)


def test_a_tensor_larger_than_a_frame_is_split_and_comes_back() -> None:
    data = np.random.default_rng(2).standard_normal(3 << 20).astype("<f4").view(np.uint8)
    assert len(list(Encoder().frames("planes", "float32", data))) == 4
    assert len(list(Encoder().frames("raw", "float32", data))) == 3
    np.testing.assert_array_equal(round_trip(data, "float32"), data)


def test_weights_become_smaller_through_byte_planes() -> None:
    weights = (0.02 * np.random.default_rng(3).standard_normal(1 << 18)).astype("<f4").view(np.uint8)
    planes = written("planes", weights)
    raw = written("raw", weights)
    assert weights.size / planes > 1.15
    assert planes < raw


def test_small_tensors_and_integers_stay_ordinary_safetensors() -> None:
    encoder = Encoder()
    data = np.ones(8 << 20, np.uint8)
    assert encoder.codec_of("float32", data[: 4 * 1023]) == "raw"
    assert encoder.codec_of("float32", data[: 4 * 1024]) == "planes"
    assert encoder.codec_of("int64", data) == "raw"
    assert encoder.codec_of("float8_e5m2", data) == "raw"
    assert encoder.codec_of("complex128", data[:16]) == "planes"  # safetensors has no such dtype
    assert Encoder("none").codec_of("float32", data) == "raw"


def test_only_auto_takes_bytes_as_they_are_in_a_hurry() -> None:
    data = np.ones(1 << 20, np.uint8)
    codecs = {c: Encoder(c).codec_of("float32", data, hurried=True) for c in ("auto", "planes", "best")}
    assert codecs == {"auto": "raw", "planes": "planes", "best": "planes"}
    assert sum(map(len, next(Encoder().frames("raw", "float32", data, hurried=True)))) > data.size
    assert sum(map(len, next(Encoder().frames("raw", "float32", data)))) < data.size // 100


@pytest.mark.parametrize(
    ("dtype", "array"),
    [
        ("float32", np.random.default_rng(6).standard_normal(40_000).astype("<f4").view("<u4") & 0xFFFF0000),
        ("float32", np.where(np.arange(40_000) % 5, 0, 1.1).astype("<f4")),
        ("bfloat16", np.where(np.arange(40_000) % 5, 0, 0x3F8D).astype("<u2")),
        ("complex64", np.zeros(40_000, "<c8")),
    ],
)
def test_what_is_half_zeros_is_compressed_in_a_hurry_too(dtype: str, array: np.ndarray) -> None:
    data = array.reshape(-1).view(np.uint8)
    encoder = Encoder("auto")
    assert encoder.codec_of(dtype, data, hurried=True) == "planes"
    size = sum(len(part) for frame in encoder.frames("planes", dtype, data, hurried=True) for part in frame)
    assert size < 0.55 * data.size


def test_half_precision_is_compressed_in_a_hurry_where_its_exponents_differ_little() -> None:
    normal = np.random.default_rng(8).standard_normal(40_000).astype("<f4")
    encoder = Encoder("auto")
    sizes = {}
    for name, array in {"before": normal, "near 1": 1 + np.abs(normal) / 2}.items():
        data = (array.view("<u4") >> 16).astype("<u2").view(np.uint8)
        codec = encoder.codec_of("bfloat16", data, hurried=True)
        frames = encoder.frames(codec, "bfloat16", data, hurried=True)
        sizes[name] = sum(len(part) for frame in frames for part in frame) / data.size
    assert sizes["before"] > 1
    assert sizes["near 1"] < 2 / 3


def test_what_is_compressed_in_a_hurry_is_not_told_by_one_column() -> None:
    rows = np.ones((512, 1024), "<f4")
    rows[:, 32:] = np.random.default_rng(9).standard_normal((512, 992))
    assert Encoder("auto").codec_of("float32", rows.reshape(-1).view(np.uint8), hurried=True) == "raw"


def test_numbers_of_full_precision_are_taken_as_they_are_in_a_hurry() -> None:
    data = np.random.default_rng(7).standard_normal(40_000).astype("<f4").view(np.uint8)
    assert Encoder("auto").codec_of("float32", data, hurried=True) == "raw"
    assert Encoder("auto").codec_of("float32", data) == "planes"


def test_masks_are_compressed_in_a_hurry_too() -> None:
    data = np.tri(1024, dtype=bool).reshape(-1).view(np.uint8)
    encoder = Encoder("auto")
    frames = encoder.frames(encoder.codec_of("bool", data, hurried=True), "bool", data, hurried=True)
    assert sum(len(part) for frame in frames for part in frame) < 0.1 * data.size


def test_the_best_frames_are_never_larger() -> None:
    data = np.repeat(np.random.default_rng(5).integers(0, 64, 40_000), 3).astype("<i8").view(np.uint8)
    best, fast = (
        sum(len(p) for f in Encoder(c).frames("raw", "int64", data) for p in f) for c in ("best", "auto")
    )
    assert best < fast


@pytest.mark.parametrize("size", [0, 1, 131072, 131073, FRAME_BYTES])
def test_a_stored_frame_is_standard_zstandard(size: int) -> None:
    raw = np.random.default_rng(4).integers(0, 256, size, np.uint8).tobytes()
    frame = stored_frame(raw)
    assert zstandard.ZstdDecompressor().decompress(frame) == raw
    assert parse_frame(Memory(frame), 0)[:3] == (0, len(frame), size)
    plain = b"".join(stored_parts(raw))
    assert zstandard.ZstdDecompressor().decompress(plain) == raw
    assert parse_frame(Memory(plain), 0)[:3] == (0, len(frame) - 4, size)


def test_no_flip_in_a_stored_frame_gives_other_bytes() -> None:
    raw = bytes(range(100))
    frame = stored_frame(raw)
    harmless = 0
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            parsed = parse_frame(Memory(bytes(flipped)), 0)
            if parsed.length == len(frame):  # else the next frame doesn't begin where it should
                assert Decoder().frame(bytes(flipped), parsed) == raw
                harmless += 1
        except BadFrame:
            continue
    assert harmless == 1  # a content size of one byte instead of four: the rest reads as an empty block


@given(st.binary(max_size=200), st.sampled_from([0xFD2FB528, None]))
def test_any_bytes_are_a_frame_or_one_error(data: bytes, magic: int | None) -> None:
    stream = Memory((magic.to_bytes(4, "little") if magic else b"") + data)
    try:
        frame = parse_frame(stream, 0)
        if frame.skippable is None:
            assert len(Decoder().frame(stream.at(0, frame.length), frame)) == frame.content
    except BadFrame:
        pass


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_every_code_of_an_8_bit_float_has_torchs_value(name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(getattr(torch, name)).to(torch.float32).numpy()
    found = values(name, codes)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(
        found.view("u4")[~np.isnan(found)], expected.view("u4")[~np.isnan(expected)]
    )
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))


def test_every_bfloat16_has_its_exact_value() -> None:
    codes = np.arange(65536, dtype="<u2")
    expected = torch.from_numpy(codes.astype("<i4").astype("<i2")).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(values("bfloat16", codes.view(np.uint8)).view("u4"), expected.view("u4"))


def test_complex32_is_decoded_to_complex64() -> None:
    parts = np.array([1.5, -2.0, 0.0, 65504.0], "<f2")
    np.testing.assert_array_equal(
        values("complex32", parts.view(np.uint8)), np.array([1.5 - 2j, 65504j], "c8")
    )


@pytest.mark.parametrize("dtype", [*SMALL_FLOATS, "bfloat16", "complex32", "float16", "int64", "bool"])
def test_values_become_the_bytes_that_they_came_from(dtype: str) -> None:
    codes = np.arange(1 << 16, dtype="<u2").view(np.uint8)
    if dtype == "bool":
        codes = codes & 1
    means = values(dtype, codes)
    again = encoded(dtype, means)
    finite = np.repeat(np.isfinite(means), dtype_of(dtype).itemsize)
    assert np.array_equal(again[finite], codes[finite])
    assert np.array_equal(values(dtype, again), means, equal_nan=True)


def test_the_digest_covers_dtype_and_shape_as_documented() -> None:
    data = np.arange(6, dtype="<f4").view(np.uint8)
    expected = xxhash.xxh3_128_hexdigest(b"float32[2,3]\0" + data.tobytes())
    assert digest("float32", (2, 3), data) == expected
    assert digest("float32", (3, 2), data) != expected
    assert digest("int32", (2, 3), data) != expected
    assert digest("float32", (), data[:4]) == xxhash.xxh3_128_hexdigest(b"float32[]\0" + bytes(4))


def test_statistics_leave_out_what_is_not_finite() -> None:
    array = np.array([3.0, math.nan, -4.0, math.inf, -math.inf], "<f4")
    found = statistics("float32", array.view(np.uint8))
    assert (found.finite, found.nan, found.inf) == (2, 1, 2)
    assert (found.minimum, found.maximum, found.mean, found.l2) == (-4.0, 3.0, -0.5, 5.0)


@pytest.mark.parametrize(("dtype", "size"), [("float64", 1 << 20), ("float32", 4096)])
def test_statistics_are_accumulated_in_float64(dtype: str, size: int) -> None:
    array = np.full(size, 0.1, dtype)
    found = statistics(dtype, array.view(np.uint8))
    exact = float(array[0])
    assert found.mean == pytest.approx(exact, rel=1e-13)
    assert found.l2 == pytest.approx(exact * math.sqrt(size), rel=1e-13)


@pytest.mark.parametrize("size", [4097, 131072, 300_001])
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e-42, 1e25, 3e38])
def test_statistics_of_many_are_as_near_as_the_format_page_says(size: int, scale: float) -> None:
    array = (np.random.default_rng(0).standard_normal(size).clip(-1, 1) * scale).astype("<f4")
    array[:: size // 3] = 0.0
    found, wide = statistics("float32", array.view(np.uint8)), array.astype("f8")
    assert (found.finite, found.minimum, found.maximum) == (size, wide.min(), wide.max())
    assert found.mean == pytest.approx(wide.mean(), abs=2.0**-18 * np.abs(wide).mean())
    assert found.l2 == pytest.approx(scale * float(np.linalg.norm(wide / scale)), rel=2.0**-15)


def test_statistics_of_many_leave_out_what_is_not_finite() -> None:
    array = np.ones(300_000, "<f4")
    array[:3] = math.nan, math.inf, -2.0
    found = statistics("float32", array.view(np.uint8))
    assert (found.finite, found.nan, found.inf, found.minimum) == (299_998, 1, 1, -2.0)
    assert found.l2 == pytest.approx(math.sqrt(299_997 + 4.0), rel=2.0**-15)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_the_norm_neither_vanishes_nor_overflows(scale: float) -> None:
    found = statistics("float64", np.array([3 * scale, 4 * scale]).view(np.uint8))
    assert found.l2 == pytest.approx(5 * scale, rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "array", "expected"),
    [
        ("bool", np.array([True, False, True, True]), (4, 0.0, 1.0, 0.75, math.sqrt(3))),
        ("int64", np.array([-3, 4]), (2, -3.0, 4.0, 0.5, 5.0)),
        ("bfloat16", np.array([3.0, -4.0], "f4"), (2, -4.0, 3.0, -0.5, 5.0)),
        ("complex64", np.array([3 + 4j], "c8"), (1, None, None, None, 5.0)),
        ("float32", np.zeros(0, "f4"), (0, None, None, None, None)),
        ("float16", np.array([math.nan], "f2"), (0, None, None, None, None)),
    ],
)
def test_statistics_by_dtype(dtype: str, array: np.ndarray, expected: tuple[object, ...]) -> None:
    found = statistics(dtype, logical_bytes(array, dtype))
    assert (found.finite, found.minimum, found.maximum, found.mean, found.l2) == expected


def test_a_complex_element_with_one_part_nan_is_nan() -> None:
    found = statistics("complex64", np.array([complex(math.nan, 1), complex(1, math.inf)], "<c8").view("u1"))
    assert (found.finite, found.nan, found.inf) == (0, 1, 1)


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(TraceError, match="float7"):
        size_bytes("float7", (1,))
