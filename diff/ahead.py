"""Loads the tensors of boundaries that are compared next, on other workers, in bounded memory.

Judging is one boundary after another, parents first; reading, decompressing and putting together parts
depends on nothing that was judged, and may be done ahead. What is loaded, and any error, comes out as if it
had been loaded when it was asked for, however many workers there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Executor, Future
from types import TracebackType
from typing import Self

from tensortrace.diff.assemble import Assembled
from tensortrace.diff.holders import without_layout
from tensortrace.diff.levels import lacking
from tensortrace.diff.plan.comparison import Comparison
from tensortrace.diff.stream import Streamed
from tensortrace.tracer.codec_dtypes import size_bytes
from tensortrace.tracer.types import Kind

BYTES_AHEAD = 64 << 20
"""Bytes of both sides' tensors that one worker may have loaded ahead; one boundary's always."""

Loaded = Assembled | Streamed


class Ahead:
    """Loads what ``take`` will be asked for, in that order; used by one thread, which judges."""

    def __init__(self, executor: Executor | None, workers: int, entries: Iterable[Comparison]) -> None:
        self._executor = executor
        self._budget = BYTES_AHEAD * workers
        self._next = deque(entries if executor is not None else ())
        self._waiting: deque[tuple[Comparison, int, Future[Loaded]]] = deque()

    def take(self, entry: Comparison) -> Loaded:
        """Return what ``entry.load`` does, and raise as it does; go on loading what comes after it."""
        while self._waiting:
            found, _, future = self._waiting.popleft()
            if found is entry:
                self._submit()
                return future.result()
            future.cancel()  # it was not asked for after all
        while self._next and self._next.popleft() is not entry:
            pass
        self._submit()
        return entry.load()

    def _submit(self) -> None:
        if self._executor is None:
            return
        held = sum(size for _, size, _ in self._waiting)
        while self._next and (not self._waiting or held + _bytes_of(self._next[0]) <= self._budget):
            entry = self._next.popleft()
            held += _bytes_of(entry)
            self._waiting.append((entry, _bytes_of(entry), self._executor.submit(entry.load)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, _, future in self._waiting:
            future.cancel()


_BYTES_SUFFICE = frozenset({
    Kind.INPUT, Kind.ACTIVATION, Kind.CLIPPED_GRAD, Kind.SCHEDULE, Kind.OPTIMIZER_STATE, Kind.PARAM,
    Kind.BUFFER,
})  # fmt: skip


def is_equal(entry: Comparison) -> bool:
    """Tell whether equal digests say that a boundary is equal: it need not be read."""
    return entry.same_bytes and entry.slot.kind in _BYTES_SUFFICE


def is_loaded(entry: Comparison) -> bool:
    """Tell whether a boundary's values are compared, as far as is known before any was."""
    return not is_equal(entry) and not without_layout(entry) and not lacking(entry)


def _bytes_of(entry: Comparison) -> int:
    items = (*entry.items_a, *entry.items_b)
    return sum(size_bytes(item.entry.dtype, item.entry.local_shape) for item in items)
