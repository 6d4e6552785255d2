"""Numbers as people read them: figures, sizes, counts, ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime

_SMALL, _LARGE, _WHOLE = 1e-3, 1e4, 1e5
_COUNTED = 1e6


def number(value: float | None) -> str:
    """Return a figure with four significant digits; ``inf``, ``nan``, and ``?`` for None."""
    if value is None:
        return "?"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < _WHOLE:
        return str(int(value))
    if _SMALL <= abs(value) < _LARGE:
        return f"{value:.4g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def times(value: float | None) -> str:
    """Return a ratio with four significant digits: below a million its thousands are set apart."""
    if value is not None and _WHOLE / 100 <= abs(value) < _COUNTED:
        return f"{float(f'{value:.4g}'):,.0f}"
    return number(value)


def exactly(value: float) -> str:
    """Return a figure so that reading it back gives the same float64; whole numbers without a point."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(value)


def size(size_bytes: int) -> str:
    """Return a size with a binary unit, such as ``1.5 MiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the right number: ``1 boundary``, ``1,204 boundaries``."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'x', 'ch')) else 's'}"


def spans(numbers: Iterable[int]) -> str:
    """Return whole numbers in order with runs drawn together: ``0-3, 7``."""
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for value in ordered:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def ranks(numbers: Iterable[int]) -> str:
    """Return ranks in words: ``rank 0``, ``ranks 0-3, 7``, ``no rank``."""
    found = sorted(set(numbers))
    return f"{'rank' if len(found) == 1 else 'ranks'} {spans(found)}" if found else "no rank"


def moment(seconds: float) -> str:
    """Return a time in seconds since the epoch as a date, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return "unknown time"
