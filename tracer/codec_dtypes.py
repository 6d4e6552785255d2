"""The dtypes a trace can hold: their names, their sizes and the values that their bytes mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tensortrace.tracer.errors import TraceError

Bytes = NDArray[np.uint8]
Family = Literal["bool", "int", "float", "complex"]


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype: torch's name without ``torch.``, and how its bytes are held.

    ``storage`` is the little-endian numpy dtype of the elements as stored; it is the dtype of the values
    too, unless the values have to be decoded (bfloat16, 8-bit floats, complex32). ``safetensors`` is None
    where that format has no such dtype; such tensors are always held as byte planes.
    """

    name: str
    itemsize: int
    storage: str
    safetensors: str | None
    family: Family


@dataclass(frozen=True, slots=True)
class _Small:
    """Layout of an 8-bit float: exponent bits, mantissa bits, bias and which codes are not finite."""

    exponent: int
    mantissa: int
    bias: int
    nonfinite: Literal["ieee", "all-ones", "negative-zero"]


_TABLE = (
    DType("bool", 1, "|b1", "BOOL", "bool"),
    DType("uint8", 1, "|u1", "U8", "int"),
    DType("int8", 1, "|i1", "I8", "int"),
    DType("uint16", 2, "<u2", "U16", "int"),
    DType("int16", 2, "<i2", "I16", "int"),
    DType("uint32", 4, "<u4", "U32", "int"),
    DType("int32", 4, "<i4", "I32", "int"),
    DType("uint64", 8, "<u8", "U64", "int"),
    DType("int64", 8, "<i8", "I64", "int"),
    DType("float8_e4m3fn", 1, "|u1", "F8_E4M3", "float"),
    DType("float8_e4m3fnuz", 1, "|u1", "F8_E4M3FNUZ", "float"),
    DType("float8_e5m2", 1, "|u1", "F8_E5M2", "float"),
    DType("float8_e5m2fnuz", 1, "|u1", "F8_E5M2FNUZ", "float"),
    DType("float8_e8m0fnu", 1, "|u1", "F8_E8M0", "float"),
    DType("bfloat16", 2, "<u2", "BF16", "float"),
    DType("float16", 2, "<f2", "F16", "float"),
    DType("float32", 4, "<f4", "F32", "float"),
    DType("float64", 8, "<f8", "F64", "float"),
    DType("complex32", 4, "<f2", None, "complex"),
    DType("complex64", 8, "<c8", "C64", "complex"),
    DType("complex128", 16, "<c16", None, "complex"),
)

DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _TABLE}
"""Every dtype of format 1, by name."""

_SMALL = {
    "float8_e4m3fn": _Small(4, 3, 7, "all-ones"),
    "float8_e4m3fnuz": _Small(4, 3, 8, "negative-zero"),
    "float8_e5m2": _Small(5, 2, 15, "ieee"),
    "float8_e5m2fnuz": _Small(5, 2, 16, "negative-zero"),
}


def dtype_of(name: str) -> DType:
    """Return the dtype of that name; raise TraceError for a name that format 1 doesn't know."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise TraceError(f"dtype {name[:40]!r} cannot be held in a trace", expected=", ".join(DTYPES))
    return dtype


@lru_cache(maxsize=4096)
def size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of logical bytes of a tensor."""
    return dtype_of(dtype).itemsize * math.prod(shape)


def values(dtype: str, data: Bytes) -> NDArray[np.generic]:
    """Return the elements that logical bytes mean, as a flat array.

    bfloat16 and the 8-bit floats become float32 and complex32 becomes complex64, each exactly; every
    other dtype is native and shares memory with ``data``.
    """
    kind = dtype_of(dtype)
    if kind.name == "bfloat16":
        return (data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    if kind.name == "complex32":
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            return data.view("<f2").astype("<f4").view("<c8")
    if kind.family == "float" and kind.itemsize == 1:
        return _small_float_table(kind.name)[data]
    return data.view(kind.storage)


def encoded(dtype: str, array: NDArray[np.generic]) -> Bytes:
    """Return the logical bytes that mean these elements: ``values`` the other way round.

    Exact for what ``values`` gives, but that a NaN of an 8-bit float may get another of its codes.
    """
    kind = dtype_of(dtype)
    flat = np.ascontiguousarray(array).reshape(-1)
    if kind.name == "bfloat16":
        flat = (flat.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
    elif kind.name == "complex32":
        with np.errstate(invalid="ignore"):
            flat = flat.astype("<c8").view("<f4").astype("<f2")
    elif kind.family == "float" and kind.itemsize == 1:
        table = _small_float_table(kind.name).view("<u4")
        order = np.argsort(table, kind="stable")
        found = np.searchsorted(table[order], flat.astype("<f4").view("<u4"))
        flat = order[np.minimum(found, 255)].astype("u1")
    else:
        flat = flat.astype(kind.storage, copy=False)
    return flat.view(np.uint8)


@cache
def _small_float_table(name: str) -> NDArray[np.float32]:
    """Return the float32 value of each of the 256 codes of an 8-bit float."""
    if name == "float8_e8m0fnu":
        table = [math.ldexp(1.0, code - 127) for code in range(255)] + [math.nan]
    else:
        table = [_small_float(code, _SMALL[name]) for code in range(256)]
    return np.array(table, "<f4")


def _small_float(code: int, layout: _Small) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    top = (1 << layout.exponent) - 1
    exponent = (code >> layout.mantissa) & top
    fraction = code & ((1 << layout.mantissa) - 1)
    if layout.nonfinite == "negative-zero" and code == 0x80:
        return math.nan
    if layout.nonfinite == "all-ones" and code & 0x7F == 0x7F:
        return math.nan
    if layout.nonfinite == "ieee" and exponent == top:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - layout.bias - layout.mantissa)
    return sign * math.ldexp((1 << layout.mantissa) + fraction, exponent - layout.bias - layout.mantissa)
