"""Master copies that a program keeps of its parameters: an optimizer holds and updates what no module owns.

In training by hand in half precision gradients are copied to float32 parameters, which are updated and copied
back. Such a parameter has no gradient of its own passes. It is known by its first value, which rounded to the
dtype of the module's parameter is that parameter. Under the module's name it is what the update is computed
on (``model``), and the module's own parameter the ``copy`` that the passes compute with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from msgspec.structs import replace

from tensortrace.diff.compare import EPS
from tensortrace.diff.ties import OF_PARAMETERS, renamed
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import INIT_STEP, Entry, Kind

COPY = "copy"
"""The slot of a module's parameter that is copied from a master."""

Masters = Mapping[str, str]
"""Names of master copies on one rank, to the name of the module's parameter."""

WRITTEN = "written"
"""The slot of what is left in a master's gradient: no backward adds to it, programs write it anew."""

COPIED = "copied"
"""The slot of its value when the run ends, after the last update."""


def unowned(rank: RankTrace) -> tuple[list[Entry], list[Entry]]:
    """Return first values: of what passes give gradients and no optimizer holds, and the reverse."""
    held = {name for e in rank.entries if e.kind == Kind.SCHEDULE for name in e.meta.members}
    given = {e.name for e in rank.entries if e.kind == Kind.CLIPPED_GRAD}
    trained = {e.name for e in rank.entries if e.kind == Kind.LOCAL_GRAD and e.slot != "start"}
    first = {e.name: e for e in rank.entries if e.kind == Kind.PARAM and e.step == INIT_STEP}
    copies = [e for name, e in first.items() if name in trained - held and rank.stored(e)]
    return copies, [e for name, e in first.items() if name in (held & given) - trained and rank.stored(e)]


def find_masters(rank: RankTrace) -> Masters:
    """Return which parameters of a rank's optimizers are masters of which parameters of its modules."""
    copies, masters = unowned(rank)
    if not copies or not masters:
        return {}
    alike: dict[tuple[int, ...], list[Entry]] = defaultdict(list)
    for entry in copies:
        alike[entry.local_shape].append(entry)
    found: dict[str, str] = {}
    for master in sorted(masters, key=lambda e: e.event):
        same = [c for c in alike[master.local_shape] if c.name not in found.values()]
        values = rank.read(master) if same else None
        fitting = [c for c in same if values is not None and is_copy(values, rank.read(c), c.dtype)]
        if fitting:  # of equal ones, such as weights of ones, the first: they come in the modules' order
            found[master.name] = fitting[0].name
    return found


def is_copy(master: np.ndarray, copy: np.ndarray, dtype: str) -> bool:
    """Tell whether values are those of a master in another dtype, whatever way they were rounded."""
    if dtype not in EPS:
        return False
    wide, narrow = master.astype(np.float64), copy.astype(np.float64)
    return bool(np.all(np.abs(wide - narrow) <= spacing(wide, dtype)))


def spacing(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return the distance of two neighbouring numbers of a dtype at each value."""
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.floor(np.log2(np.abs(values)))
    return np.asarray(EPS[dtype] * np.exp2(np.where(np.isfinite(exponent), exponent, -126.0)))


def under_copy(entry: Entry, masters: Masters) -> Entry:
    """Return an entry of a master under the name of its copy; one of the copy under its slot."""
    if entry.kind == Kind.PARAM and entry.name in masters.values():
        after = entry.slot == "model" and entry.step != INIT_STEP
        return replace(entry, slot=COPIED if after else COPY)
    if entry.kind == Kind.LOCAL_GRAD and entry.name in masters:
        return replace(renamed(entry, dict(masters)), slot=WRITTEN)
    if entry.kind in OF_PARAMETERS or entry.meta.members:
        return renamed(entry, dict(masters))
    return entry


def named_as_copies(
    ranks: Iterable[RankTrace], sliced: Mapping[int, Masters]
) -> Callable[[int, Entry], Entry] | None:
    """Return how entries of each rank are called, None where no rank has masters.

    ``sliced`` are those that are known to be slices of flat ones.
    """
    each = ((rank.rank, {**find_masters(rank), **sliced.get(rank.rank, {})}) for rank in ranks)
    found = {rank: masters for rank, masters in each if masters}
    if not found:
        return None
    return lambda rank, entry: under_copy(entry, found[rank]) if rank in found else entry
