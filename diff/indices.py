"""Sets of indices in words: runs, every n-th, equal blocks."""

from __future__ import annotations

import numpy as np

MOST_BLOCKS = 128
_SHOWN = 6
_FUSED = {2: "such as gate or up of a fused weight", 3: "such as query, key or value of a fused weight"}


def described(what: str, indices: np.ndarray, count: int) -> str:
    """Return sorted indices among ``count`` as words; ``count`` is 0 where it says nothing."""
    of = f" of {count}" if count else ""
    one = what.removesuffix("s")
    if len(indices) == 1:
        return f"{one} {indices[0]}{of}{_block(indices, count)}"
    if _in_a_row(indices):
        if count and indices[-1] == count - 1 and not _block(indices, count):
            return f"the last {len(indices)} {what} ({indices[0]}-{indices[-1]}{of})"
        return f"{what} {indices[0]}-{indices[-1]}{of}{_block(indices, count)}"
    stripe = _stripe(indices, count)
    if stripe:
        return f"{what} {stripe}{of}"
    runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    shown = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs[:_SHOWN])
    more = f", … ({len(indices)} in all)" if len(runs) > _SHOWN else ""
    return f"{what} {shown}{more}{of}"


def _in_a_row(indices: np.ndarray) -> bool:
    return bool(np.all(np.diff(indices) == 1))


def _block(indices: np.ndarray, count: int) -> str:
    """Tell which of equal blocks a run is, "" where it is none."""
    width = len(indices)
    if width < 2 or not count or count % width or indices[0] % width or count // width > MOST_BLOCKS:
        return ""
    blocks = count // width
    hint = _FUSED.get(blocks, f"a head if there are {blocks}")
    return f", which is block {indices[0] // width} of {blocks} equal ones ({hint})"


def _stripe(indices: np.ndarray, count: int) -> str:
    """Tell a pattern that repeats: the same places of every period; "" where there is none."""
    first = indices[0]
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    width = int(breaks[0])
    if len(indices) % width or len(indices) // width < 3:
        return ""
    period = int(indices[width] - first)
    times = len(indices) // width
    expected = (first + period * np.arange(times)[:, None] + np.arange(width)[None, :]).reshape(-1)
    if not np.array_equal(indices, expected):
        return ""
    run = f"{first}-{first + width - 1}" if width > 1 else f"{first}"
    return f"{run} and every {period} further ({times} times)"
