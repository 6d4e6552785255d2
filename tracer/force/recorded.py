"""The recorded run: which boundaries its trace holds, and this rank's part of each as the live run lies."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from tensortrace.tracer import layout as files
from tensortrace.tracer.copies import dtype_name
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.geometry import LayoutError, Region, full_region, region
from tensortrace.tracer.placements import Spec
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.rules import RunLayout, portions
from tensortrace.tracer.start.places import Place, indices
from tensortrace.tracer.start.refusal import rank, world_size
from tensortrace.tracer.start.sources import Source, assembled, named, shape_of
from tensortrace.tracer.types import Key, Kind, Shard


class Unforced(TraceError):
    """A boundary that the live run keeps as it is; the message is the reason."""


class Local(NamedTuple):
    """What the live run holds of a boundary: shape and dtype of the local tensor, and its place if known."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: Spec | None


class Recorded:
    """The trace's boundaries under the names of the unpartitioned program; values are read when asked for.

    One tensor at a time is held: the memory that it takes is that of the largest.
    """

    def __init__(self, path: Path, live: RunLayout | None = None) -> None:
        """Read the indexes; ``live`` is the layout file of the live run. Raises TraceError."""
        trace = Trace.open(path)
        stored = path / files.LAYOUT
        self._layout = RunLayout.load(stored) if stored.is_file() else None
        self._live = live
        self._ranks = len(trace.ranks)
        self._lock = threading.Lock()
        self._sources: dict[Key, list[Source]] = defaultdict(list)
        self._keys: dict[tuple[Kind, str, str], dict[Key, None]] = defaultdict(dict)
        self._aliases: dict[str, str] = {}
        self._last: dict[int, int] = {}
        for source_rank in trace.ranks:
            for entry in source_rank.entries:
                if entry.recompute:
                    continue
                self._last[entry.step] = max(self._last.get(entry.step, 0), entry.microbatch or 0)
                for name, source in named(source_rank, entry, self._layout):
                    key = entry.key._replace(name=name)
                    self._sources[key].append(source)
                    self._keys[key.kind, name, key.slot][key] = None
                    self._aliases.update(dict.fromkeys(entry.meta.aliases, name))

    def __contains__(self, key: Key) -> bool:
        return key in self._sources

    def keys(self, kind: Kind, name: str, slot: str) -> list[Key]:
        """Return the boundaries of a kind, name and slot, in the order of the first rank that has them."""
        return list(self._keys.get((kind, name, slot), ()))

    def known(self, name: str) -> str:
        """Return the canonical name of a tied parameter by any of its names."""
        return self._aliases.get(name, name)

    def last_microbatch(self, step: int) -> int:
        """Return the number of the last pass of a step."""
        return self._last.get(step, 0)

    def whole(self, key: Key) -> torch.Tensor:
        """Return the global tensor; raise Unforced where the trace has none."""
        sources = self._sources.get(key)
        if not sources:
            raise Unforced("the trace does not have it")
        with self._lock:
            try:
                return assembled(key.name, sources, self._layout)
            except Unforced:
                raise
            except TraceError as error:
                raise Unforced(str(error)) from error

    def fill(self, place: Place, keys: Iterable[Key | None]) -> tuple[Key, torch.Tensor]:
        """Overwrite what the live run holds of a tensor; return what with, and a copy of what was there.

        It is the first of ``keys`` that is one. Raises Unforced where there is none, or its shape is another.
        """
        key = next((key for key in keys if key is not None), None)
        if key is None:
            raise Unforced("the trace does not have it")
        whole = self.whole(key)
        if tuple(whole.shape) != place.global_shape:
            raise Unforced(f"it is {list(whole.shape)} in the trace, {list(place.global_shape)} here")
        flat, before = whole.flatten(), place.local.clone()
        place.write(flat[index] for index in indices(place.region))
        return key, before

    def part(self, key: Key, own_name: str, local: Local) -> torch.Tensor:
        """Return what the live tensor is to hold, in its shape and dtype; raise Unforced, saying why not.

        On as many ranks in the same layout each has what the same rank recorded. ``own_name`` is what the
        live rank calls the tensor.
        """
        sources = self._sources.get(key)
        if not sources:
            raise Unforced("the trace does not have it")
        if sources[0].entry.dtype != dtype_name(local.dtype):
            raise Unforced(f"it is {sources[0].entry.dtype} in the trace, {dtype_name(local.dtype)} here")
        if local.spec is not None and any(p.kind == "partial" for p in local.spec.placements):
            raise Unforced("it is a sum over ranks, of which no rank's part can be told")
        mine = self._mine(sources, local)
        if mine is not None:
            with self._lock:
                return mine.read().to(local.dtype)
        place, positions = self._place(key, own_name, local)
        if place.global_shape != shape_of(sources):
            shapes = f"{list(shape_of(sources))} in the trace, {list(place.global_shape)} here"
            raise Unforced(f"its global shape is {shapes}: other rows, or parts that no layout tells of")
        return _cut(self.whole(key), place, positions, local)

    def _mine(self, sources: list[Source], local: Local) -> Source | None:
        """Return this rank's own record, where both runs lay the tensor out alike."""
        if self._ranks != world_size():
            return None
        for source in sources:
            if source.rank.rank == rank() and source.view is None and source.entry.local_shape == local.shape:
                return source if _alike(source.entry.shard, local.spec) else None
        return None

    def _place(self, key: Key, own_name: str, local: Local) -> tuple[Region, torch.Tensor | None]:
        """Return which part of the global tensor is here, and at which local positions if not in order."""
        if local.spec is not None:
            try:
                return region(local.spec.shard(), local.spec.mesh, local.shape), None
            except LayoutError as error:
                raise Unforced(str(error)) from error
        if self._live is None:
            return full_region(local.shape), None
        found = portions(self._live, own_name, rank(), local.shape, kind=key.kind, slot=key.slot)
        found = tuple(portion for portion in found if portion.name == key.name)
        if not found:
            return full_region(local.shape), None
        if len(found) > 1 or found[0].summed:
            raise Unforced("it is a sum over ranks, of which no rank's part can be told")
        taken = found[0].positions()
        return found[0].region, None if taken is None else torch.from_numpy(taken.copy())


def _alike(shard: Shard | None, spec: Spec | None) -> bool:
    """Tell whether a recorded place and a live one are the same; data axes are no place."""
    theirs = () if shard is None else tuple(p for p in shard.placements if p.kind != "data")
    if spec is None:
        return all(placement.kind == "replicate" for placement in theirs)
    return theirs == spec.placements


def _cut(whole: torch.Tensor, place: Region, positions: torch.Tensor | None, local: Local) -> torch.Tensor:
    pieces = [whole.flatten()[index] for index in indices(place)] if place.size else []
    held = torch.cat(pieces) if pieces else torch.empty(0, dtype=whole.dtype)
    if positions is not None:
        filled = torch.zeros(local.shape, dtype=whole.dtype)
        filled.put_(positions, held)
        return filled.to(local.dtype)
    if held.numel() != torch.Size(local.shape).numel():
        raise Unforced("a part of it here is padding")
    return held.reshape(local.shape).to(local.dtype)
