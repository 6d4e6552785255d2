"""A safetensors file of ordinary tensors, written tensor by tensor."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np

from tensortrace.cli.export.chosen import Chosen
from tensortrace.tracer.codec_dtypes import dtype_of, encoded
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.manifest_safetensors import TensorItem

MAX_HEADER_BYTES = 100_000_000
"""What the library itself refuses to read beyond."""

_STANDS_FOR = {"complex32": "complex64", "complex128": "float64"}
"""What is written where safetensors has no such dtype; complex128 has a dimension of 2 more."""


def write(tensors: list[Chosen], about: dict[str, str], target: Path) -> None:
    """Write the tensors in the dtype that was recorded; the file says in ``__metadata__`` what they are.

    Raises BadRequest where they are too many for one file.
    """
    ordered = sorted(tensors, key=lambda each: -dtype_of(_dtype(each)).itemsize)  # so that all are aligned
    metadata = about | {f"dtype of {each.key}": each.dtype for each in ordered if _dtype(each) != each.dtype}
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for each in ordered:
        kind, shape = dtype_of(_dtype(each)), _shape(each)
        begin, end = end, end + kind.itemsize * math.prod(shape)
        assert kind.safetensors is not None, "another dtype stands for it"
        header[each.key] = TensorItem(kind.safetensors, shape, (begin, end))
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise BadRequest(
            f"{len(tensors):,} tensors are too many for one safetensors file",
            remedy="select with --step, --kind or --name",
        )
    with target.open("xb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for each in ordered:
            out.write(encoded(_dtype(each), _values(each)).data)


def _values(chosen: Chosen) -> np.ndarray:
    array = chosen.read()
    return np.ascontiguousarray(array).view("f8") if chosen.dtype == "complex128" else array


def _dtype(chosen: Chosen) -> str:
    return _STANDS_FOR.get(chosen.dtype, chosen.dtype)


def _shape(chosen: Chosen) -> tuple[int, ...]:
    return (*chosen.shape, 2) if chosen.dtype == "complex128" else chosen.shape
