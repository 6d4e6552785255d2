"""How a boundary appears in the safetensors file that a segment decompresses to."""

from __future__ import annotations

import msgspec

from tensortrace.tracer.codec import Codec
from tensortrace.tracer.codec_dtypes import dtype_of, size_bytes
from tensortrace.tracer.types import INIT_STEP, Boundary

MAX_HEADER_BYTES = 8 << 20
"""Raw bytes of a header; safetensors itself stops at 100 MB."""


class TensorItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in a safetensors header: ``data_offsets`` are [begin, end) behind the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def tensor_name(boundary: Boundary) -> str:
    """Return the name of a boundary's tensor in a segment: ``step/microbatch/kind/name/slot/call``.

    ``init`` stands for step -1 and ``-`` for no microbatch; ``%`` and ``/`` inside name and slot are
    written ``%25`` and ``%2F``, so that the name can be split again; a recompute adds ``+recompute``.
    """
    step = "init" if boundary.step == INIT_STEP else str(boundary.step)
    microbatch = "-" if boundary.microbatch is None else str(boundary.microbatch)
    call = f"{boundary.call}+recompute" if boundary.recompute else str(boundary.call)
    return "/".join((step, microbatch, boundary.kind, _escape(boundary.name), _escape(boundary.slot), call))


def unique_name(boundary: Boundary, taken: set[str]) -> str:
    """Return the boundary's name in one segment and take it; a second one of the key adds ``#EVENT``."""
    name = tensor_name(boundary)
    if name in taken:
        name = f"{name}#{boundary.event}"
    taken.add(name)
    return name


def tensor_item(boundary: Boundary, codec: Codec, begin: int) -> TensorItem:
    """Return the header item of a tensor whose raw bytes begin at ``begin``."""
    kind = dtype_of(boundary.dtype)
    end = begin + size_bytes(boundary.dtype, boundary.local_shape)
    if codec == "planes":
        return TensorItem("U8", (kind.itemsize, *boundary.local_shape), (begin, end))
    assert kind.safetensors is not None, "a dtype without a name there is held as planes"
    return TensorItem(kind.safetensors, boundary.local_shape, (begin, end))


def _escape(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F")
