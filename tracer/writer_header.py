"""The safetensors header of a segment, gathered while tensors arrive and kept compressed."""

from __future__ import annotations

import msgspec
import zstandard

from tensortrace.tracer import layout
from tensortrace.tracer.codec import Codec, stored_frame
from tensortrace.tracer.manifest_safetensors import (
    MAX_HEADER_BYTES,
    tensor_item,
    unique_name,
)
from tensortrace.tracer.types import Boundary

_encode = msgspec.json.Encoder().encode
_PIECE_BYTES = 64 << 10
_SHARD_BYTES = 16 << 10  # a longer shard stands in the index only, so that any item fits a header
_ITEM_BYTES = 320  # an item and its note without name, shard and shape
_CHARACTER_BYTES = 8  # of name and slot: at most four, whatever escapes them, in the item and in the note
_DIM_BYTES = 16
_OVERHEAD_BYTES = 512  # length field, braces, own metadata, the filler's frame header


class _Part:
    """Comma-separated JSON members, compressed piece by piece as one frame each."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters.from_level(3, write_checksum=True)
        )
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._frames: list[bytes] = []
        self.raw_bytes = 0
        self.bound = 0  # bytes of the finished frames, and of the pending piece if it didn't compress

    def add(self, member: bytes) -> None:
        text = b"," + member if self.raw_bytes else member
        self._pending.append(text)
        self._pending_bytes += len(text)
        self.raw_bytes += len(text)
        self.bound += len(text)
        if self._pending_bytes >= _PIECE_BYTES:
            self._compress()

    def frames(self) -> list[bytes]:
        if self._pending:
            self._compress()
        return self._frames

    def _compress(self) -> None:
        frame = self._compressor.compress(b"".join(self._pending))
        self.bound += len(frame) - self._pending_bytes
        self._frames.append(frame)
        self._pending, self._pending_bytes = [], 0


class Header:
    """Names, dtypes, shapes and offsets of a segment's tensors, and their ``__metadata__``."""

    def __init__(self, rank: int, segment: int, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes - _OVERHEAD_BYTES
        self._tensors = _Part()
        self._metadata = _Part()
        self._names: set[str] = set()
        self._end = 0
        own = {"tensortrace.format": str(layout.FORMAT_VERSION), "tensortrace.rank": str(rank)}
        own["tensortrace.segment"] = str(segment)
        for key, value in own.items():
            self._metadata.add(_member(key, value))

    @property
    def boundaries(self) -> int:
        """How many boundaries it names."""
        return len(self._names)

    def has_room(self, boundary: Boundary) -> bool:
        """Tell whether a boundary can still be named in this header, even if nothing compresses."""
        raw = self._tensors.raw_bytes + self._metadata.raw_bytes
        bound = self._tensors.bound + self._metadata.bound
        shard = min(_SHARD_BYTES, len(_encode(boundary.shard))) if boundary.shard else 0
        most = _ITEM_BYTES + _CHARACTER_BYTES * (len(boundary.name) + len(boundary.slot)) + 2 * shard
        most += 2 * _DIM_BYTES * len(boundary.local_shape)
        return bound + most <= self._capacity and raw + most <= MAX_HEADER_BYTES

    def add_tensor(self, boundary: Boundary, codec: Codec) -> None:
        """Name the tensor whose raw bytes were appended last."""
        name = unique_name(boundary, self._names)
        item = tensor_item(boundary, codec, self._end)
        self._end = item.data_offsets[1]
        self._tensors.add(_member(name, item))
        self._note(name, boundary, {"codec": codec})

    def add_alias(self, boundary: Boundary, same_as: int) -> None:
        """Note a boundary whose bytes are those of an earlier event."""
        self._note(unique_name(boundary, self._names), boundary, {"same_as": same_as})

    def add_unstored(self, boundary: Boundary) -> None:
        """Note a boundary whose bytes are not kept."""
        self._note(unique_name(boundary, self._names), boundary, {})

    def _note(self, name: str, boundary: Boundary, how: dict[str, object]) -> None:
        note = {"event": boundary.event, "dtype": boundary.dtype, "shape": boundary.local_shape, **how}
        if boundary.shard is not None:
            text = _encode(boundary.shard)
            note["shard"] = msgspec.Raw(text) if len(text) <= _SHARD_BYTES else "see index"
        self._metadata.add(_member(name, _encode(note).decode()))

    def frames(self) -> bytes:
        """Return the frames that decompress to the safetensors header, its length field included."""
        tensors, metadata = self._tensors.frames(), self._metadata.frames()
        opening = b'{"__metadata__":{'
        closing = b"}," if self._tensors.raw_bytes else b"}"
        size = len(opening) + len(closing) + 1 + self._tensors.raw_bytes + self._metadata.raw_bytes
        padding = b" " * (-size % 8)
        length = (size + len(padding)).to_bytes(8, "little")
        parts = [stored_frame(length + opening), *metadata, stored_frame(closing), *tensors]
        return b"".join([*parts, stored_frame(b"}" + padding)])


def _member(key: str, value: object) -> bytes:
    return _encode(key) + b":" + _encode(value)
