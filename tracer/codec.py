"""Logical bytes of a tensor to Zstandard frames and back.

A tensor becomes zero or more frames, each of at most ``FRAME_BYTES`` raw bytes and each stating its
content size. Under codec ``planes`` the raw bytes are the byte planes of the elements: first the least
significant byte of every element, and so on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import numpy as np
import xxhash
import zstandard

from tensortrace.tracer.codec_dtypes import Bytes, DType, dtype_of

FRAME_BYTES = 4 << 20
"""The most raw bytes that one frame may hold."""

WINDOW_BYTES = 8 << 20
"""The largest window that a frame may ask for."""

RECORD_MAGIC = 0x184D2A5A
"""Magic number of the skippable frame that holds an index line."""

FILLER_MAGIC = 0x184D2A5F
"""Magic number of the skippable frame of zeros that ends a segment's reserved front."""

Codec = Literal["raw", "planes"]
Compress = Literal["auto", "planes", "best", "none"]

_FRAME_MAGIC = 0xFD2FB528
_PLAIN, _CHECKSUMMED = 0b1010_0000, 0b1010_0100  # one segment, content size of 4 bytes
BLOCK_BYTES = 128 << 10
"""The most raw bytes of a block of a frame (RFC 8878)."""

_PLANES_FROM = 1024  # elements; smaller tensors gain nothing and stay readable as they are
_COMPRESS_FROM = 64  # bytes; below, a frame of one raw block is as small
_CACHED = 16 << 10  # elements that are put together at a time
_SAMPLE_BYTES = 4 << 10
_INCOMPRESSIBLE = 7.9  # bits per byte
_RUNS, _RUN = 32, 32  # as many stretches of as many elements tell what compresses well
_EVEN = 7.5  # bits per byte of a sample of that size: even noise shows no 8
_THIRD = 5.4  # bits of the 16 of a number of two bytes, and a little for what coding loses


class BadFrame(Exception):
    """Bytes that are no frame of a trace; ``offset`` is where in the file.

    ``torn`` tells that the file merely ends too early, as one does whose writer was killed.
    """

    def __init__(self, offset: int, what: str, *, torn: bool = False) -> None:
        super().__init__(what)
        self.offset = offset
        self.what = what
        self.torn = torn


class Frame(NamedTuple):
    """One frame of a segment: where it lies, and what it states.

    ``skippable`` is the magic number of a skippable frame, else None. ``content`` counts raw bytes (the
    payload of a skippable frame). ``start`` is the offset of a skippable frame's payload.
    """

    offset: int
    length: int
    content: int
    start: int
    skippable: int | None


class Source(Protocol):
    """Random access to bytes; returns fewer than asked only at the end."""

    def at(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset``."""


Parts = Sequence[bytes | memoryview]
"""One frame, in pieces that follow each other."""


class Encoder:
    """Turns logical bytes into frames; one per thread, since compressors cannot be shared.

    ``auto`` and ``planes`` differ in what is done in a hurry: ``auto`` then takes floating point numbers as
    they are, unless more than a third is saved: where half of their bits or more are zeros, which
    compress several times as fast, and of numbers of two bytes some. ``best`` tries a
    slow level beside the fast one, and takes the smaller frame.

    No frame is put together here, and planes go through memory that is used again and again: fresh memory
    for them would cost more page faults than all the rest takes.
    """

    def __init__(self, compress: Compress = "auto") -> None:
        self._compress = compress
        parameters = zstandard.ZstdCompressionParameters.from_level(
            1,
            strategy=zstandard.STRATEGY_FAST,
            hash_log=6,
            min_match=7,
            window_log=17,
            write_checksum=True,
            write_content_size=True,
        )
        self._compressors = [zstandard.ZstdCompressor(compression_params=parameters)]
        if compress == "best":
            self._compressors.append(_slow_compressor())
        self._plane = np.empty(0, np.uint8)

    def codec_of(self, dtype: str, data: Bytes, *, hurried: bool = False) -> Codec:
        """Return how a tensor of these logical bytes is held; ``hurried``: where time is short."""
        kind = dtype_of(dtype)
        if kind.safetensors is None:
            return "planes"
        if not _is_wide(kind) or data.size < _PLANES_FROM * kind.itemsize or self._compress == "none":
            return "raw"
        return "planes" if not self._is_quick(hurried) or _saves_a_third(data, kind.itemsize) else "raw"

    def frames(self, codec: Codec, dtype: str, data: Bytes, *, hurried: bool = False) -> Iterator[Parts]:
        """Yield the frames of a tensor, in order; none for an empty tensor.

        The parts of a frame hold only until the next one is asked for.
        """
        kind = dtype_of(dtype)
        itemsize = kind.itemsize
        if codec == "raw":
            stored = self._is_quick(hurried) and _is_wide(kind)
            for start in range(0, data.size, FRAME_BYTES):
                part = data[start : start + FRAME_BYTES]
                yield stored_parts(part.data) if stored else self.frame(part)
        elif 0 < data.size < _PLANES_FROM * itemsize:
            yield self.frame(np.ascontiguousarray(data.reshape(-1, itemsize).T).reshape(-1))
        else:
            for byte in range(itemsize):
                for start in range(0, data.size, FRAME_BYTES * itemsize):
                    part = data[start : start + FRAME_BYTES * itemsize]
                    yield self.frame(self._plane_of(part, itemsize, byte))

    def frame(self, raw: Bytes) -> Parts:
        """Return one frame of at most ``FRAME_BYTES`` raw bytes."""
        if self._compress == "none" or raw.size < _COMPRESS_FROM or _incompressible(raw):
            return stored_parts(raw.data)
        return (min((each.compress(raw.data) for each in self._compressors), key=len),)

    def _is_quick(self, hurried: bool) -> bool:
        return hurried and self._compress == "auto"

    def _plane_of(self, data: Bytes, itemsize: int, byte: int) -> Bytes:
        """Return one byte of each element, in memory that the next call overwrites."""
        count = data.size // itemsize
        if self._plane.size < count:
            self._plane = np.empty(count, np.uint8)
        plane = self._plane[:count]
        if itemsize in (2, 4, 8):  # twice as fast as a copy in strides
            words = data.view(f"<u{itemsize}")
            np.right_shift(words, 8 * byte, out=plane, casting="unsafe", dtype=words.dtype)
        else:
            plane[:] = data[byte::itemsize]
        return plane


def _slow_compressor() -> zstandard.ZstdCompressor:
    parameters = zstandard.ZstdCompressionParameters.from_level(
        9, window_log=20, write_checksum=True, write_content_size=True
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def _is_wide(kind: DType) -> bool:
    """Tell whether byte planes of such elements compress."""
    return kind.family in ("float", "complex") and kind.itemsize >= 2


def _saves_a_third(data: Bytes, itemsize: int) -> bool:
    """Tell from a sample whether planes save more than a third of a tensor, as far as that is cheap to tell.

    They do where the lower half of most elements is zero: of zeros, and of numbers that were computed in half
    the precision they are held in; and of numbers of two bytes where few exponents, or few numbers, are
    frequent. The sample are stretches of neighbours, since each place in memory costs more than what is done
    with it, and an odd number of stretches apart, so that they don't lie in one column of a matrix.
    """
    words = data.view(f"<u{min(itemsize, 8)}")
    runs = words[: words.size // _RUN * _RUN].reshape(-1, _RUN)
    sample = runs[:: (len(runs) // _RUNS) | 1].reshape(-1)
    half = (1 << (4 * sample.itemsize)) - 1
    if 2 * int(np.count_nonzero(sample & sample.dtype.type(half))) < sample.size:
        return True
    if itemsize != 2:
        return False
    found = [_entropy(sample.view(np.uint8)[byte::2]) for byte in (0, 1)]
    return sum(8 - bits for bits in found if bits < _EVEN) > _THIRD


def _incompressible(raw: Bytes) -> bool:
    """Tell from a sample of bytes whether entropy coding would gain nothing."""
    if raw.size < _SAMPLE_BYTES:
        return False
    sample = raw[:: (raw.size // _SAMPLE_BYTES) | 1]
    return _entropy(sample) > _INCOMPRESSIBLE


def _entropy(sample: Bytes) -> float:
    """Return the entropy of bytes taken each for itself, in bits per byte."""
    counts = np.bincount(sample, minlength=256)
    share = counts[counts > 0] / sample.size
    return float(-(share * np.log2(share)).sum())


def stored_frame(raw: memoryview | bytes) -> bytes:
    """Return a frame of raw blocks with a checksum: a 9-byte header and 3 bytes a block around the bytes."""
    head = struct.pack("<IBI", _FRAME_MAGIC, _CHECKSUMMED, len(raw))
    checksum = (xxhash.xxh64_intdigest(raw) & 0xFFFFFFFF).to_bytes(4, "little")
    return b"".join((head, *stored_parts(raw)[1:], checksum))


def stored_parts(raw: memoryview | bytes) -> Parts:
    """Return such a frame without a checksum, in parts that refer to the bytes.

    A checksum of a tensor's bytes would tell what its digest tells, for another pass over them.
    """
    view = memoryview(raw)
    head, blocks = stored_heads(len(view), checksums=False)
    parts: list[bytes | memoryview] = [head]
    for number, block in enumerate(blocks):
        parts += [block, view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]]
    return parts


class Stored(NamedTuple):
    """A blob as frames of raw blocks: the raw bytes of each, and whether a checksum stands behind each."""

    contents: list[int]
    checksums: bool


@lru_cache(maxsize=64)
def stored_heads(content: int, *, checksums: bool) -> tuple[bytes, tuple[bytes, ...]]:
    """Return the header of a frame of raw blocks as ``stored_parts`` writes it, and those of its blocks."""
    starts = range(0, max(content, 1), BLOCK_BYTES)
    blocks = tuple(
        (min(content - start, BLOCK_BYTES) << 3 | (start == starts[-1])).to_bytes(3, "little")
        for start in starts
    )
    flags = _CHECKSUMMED if checksums else _PLAIN
    return struct.pack("<IBI", _FRAME_MAGIC, flags, content), blocks


def stored_contents(raw_length: int, length: int) -> Stored | None:
    """Return what frames of raw blocks would hold of a blob of ``length`` bytes; None where it is no such.

    That it has the length that it would have says nothing of what stands there. ``length`` must be known to
    be one that the file has: what is returned grows with it.
    """
    if raw_length > length:
        return None
    full, rest = divmod(raw_length, FRAME_BYTES)
    contents = [FRAME_BYTES] * full + [rest] * bool(rest)
    for checksums in (False, True):
        if contents and length == sum(stored_length(each, checksums=checksums) for each in contents):
            return Stored(contents, checksums)
    return None


def stored_length(content: int, *, checksums: bool) -> int:
    """Return the length of a frame of raw blocks."""
    return 9 + content + 3 * max(-(-content // BLOCK_BYTES), 1) + 4 * checksums


def skippable_frame(magic: int, payload: bytes) -> bytes:
    """Return a frame that Zstandard decoders skip."""
    return struct.pack("<II", magic, len(payload)) + payload


def parse_frame(source: Source, offset: int) -> Frame:
    """Return the frame at an offset without decompressing it; raise BadFrame if there is none.

    Reads frame and block headers only. A frame of data must state a content size of at most
    ``FRAME_BYTES`` and need no dictionary.
    """
    head = source.at(offset, 18)
    if len(head) < 8:
        raise BadFrame(offset, "the file ends inside a frame header", torn=True)
    magic, size = struct.unpack_from("<II", head)
    if magic & 0xFFFFFFF0 == 0x184D2A50:
        return Frame(offset, 8 + size, size, offset + 8, magic)
    if magic != _FRAME_MAGIC:
        raise BadFrame(offset, f"no frame begins here (bytes {head[:4].hex()})")
    header, content = _parse_header(head, offset)
    length = _end_of_blocks(source, offset + header, offset, content) - offset
    if head[4] & 0b100:
        length += 4
    return Frame(offset, length, content, offset + header, None)


def _parse_header(head: bytes, offset: int) -> tuple[int, int]:
    """Return the length of a frame's header and the content size that it states (RFC 8878, 3.1.1.1)."""
    descriptor = head[4]
    single = bool(descriptor & 0b10_0000)
    field = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    if field == 0:
        raise BadFrame(offset, "the frame states no content size")
    if descriptor & 0b1_1011:
        raise BadFrame(offset, "the frame needs a dictionary or sets reserved bits")
    start = 5 if single else 6
    if len(head) < start + field:
        raise BadFrame(offset, "the file ends inside a frame header", torn=True)
    content = int.from_bytes(head[start : start + field], "little") + (256 if field == 2 else 0)
    if content > FRAME_BYTES:
        raise BadFrame(offset, f"the frame states {content} raw bytes, more than {FRAME_BYTES}")
    window = content if single else (1 << (10 + (head[5] >> 3))) // 8 * (8 + (head[5] & 7))
    if window > WINDOW_BYTES:
        raise BadFrame(offset, f"the frame asks for a window of {window} bytes")
    return start + field, content


def _end_of_blocks(source: Source, position: int, offset: int, content: int) -> int:
    """Return where the blocks of a frame end."""
    most = 16 + 2 * (content // 1024)
    for _ in range(most):
        raw = source.at(position, 3)
        if len(raw) < 3:
            raise BadFrame(offset, "the file ends inside a frame", torn=True)
        header = int.from_bytes(raw, "little")
        last, kind, size = header & 1, (header >> 1) & 3, header >> 3
        if kind == 3 or size > BLOCK_BYTES:
            raise BadFrame(position, "a block header is not valid")
        position += 3 + (1 if kind == 1 else size)
        if last:
            return position
    raise BadFrame(offset, f"a frame of {content} raw bytes has more than {most} blocks")


class Decoder:
    """Turns frames back into logical bytes; one per thread."""

    def __init__(self) -> None:
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)

    def frame(self, data: bytes, frame: Frame) -> bytes:
        """Return the raw bytes of one frame; raise BadFrame if they aren't what it states."""
        try:
            raw = self._decompressor.decompress(data, max_output_size=frame.content)
        except zstandard.ZstdError as error:
            raise BadFrame(frame.offset, f"the frame does not decompress ({error})") from error
        if len(raw) != frame.content:
            raise BadFrame(frame.offset, f"the frame holds {len(raw)} raw bytes, not {frame.content}")
        return raw


def _fresh(size: int) -> Bytes:
    return np.empty(size, np.uint8)


def logical(codec: Codec, dtype: str, raw: Bytes, memory: Callable[[int], Bytes] = _fresh) -> Bytes:
    """Return the logical bytes of a tensor from its raw bytes: undoes the byte planes, into ``memory``."""
    itemsize = dtype_of(dtype).itemsize
    if codec == "raw" or itemsize == 1 or raw.size == 0:
        return raw
    return interleaved(list(raw.reshape(itemsize, -1)), memory)


def interleaved(planes: Sequence[Bytes], memory: Callable[[int], Bytes] = _fresh) -> Bytes:
    """Return the bytes of elements from the planes of their first byte, their second, and so on."""
    count, itemsize = planes[0].size, len(planes)
    out = memory(count * itemsize)
    if itemsize == 2:  # in words: half the time of a copy in strides; of wider ones it is none
        words = out.view("<u2")
        for start in range(0, count, _CACHED):
            part = words[start : start + _CACHED]
            np.copyto(part, planes[1][start : start + _CACHED])
            np.left_shift(part, 8, out=part)
            np.bitwise_or(part, planes[0][start : start + _CACHED], out=part)
        return out
    items = out.reshape(count, itemsize)
    for start in range(0, count, _CACHED):
        some = items[start : start + _CACHED]
        for byte, plane in enumerate(planes):
            some[:, byte] = plane[start : start + _CACHED]
    return out
