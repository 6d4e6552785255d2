"""Keeps the last steps of a recording on disk, until something worth keeping happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from tensortrace.tracer.flight_signal import Listener
from tensortrace.tracer.flight_watch import Watch
from tensortrace.tracer.notices import say
from tensortrace.tracer.reader_window import said
from tensortrace.tracer.selection import Selection
from tensortrace.tracer.types import (
    INIT_STEP,
    Boundary,
    Entry,
    Kind,
    Promise,
    RankManifest,
    Triggered,
    Window,
)
from tensortrace.tracer.writer import Mark, RankWriter


@dataclass(slots=True)
class _Step:
    """A recorded step: where it begins in the files, and where the update of its parameters does."""

    step: int
    begin: Mark
    update: Mark | None = None


class FlightStore:
    """The files of a rank of which only the last ``promise.keep_last`` steps stay; on the writer thread.

    The writer is cut where a step begins and where its parameters are updated, so that what lies behind a
    cut needs nothing before it. Of the step before the first one kept, what lies behind the second cut
    stays too: the parameters with which the first one begins. Once a trigger was set off, ``promise.after``
    further steps are kept, and then ``on_end`` is called: nothing more is recorded.
    """

    def __init__(
        self, writer: RankWriter, promise: Promise, *, rank: int, listener: Listener | None,
        on_end: Callable[[], None],
    ) -> None:  # fmt: skip
        self._writer = writer
        self._promise = promise
        self._rank = rank
        self._listener = listener
        self._on_end = on_end
        sees_updates = Selection(promise).wants_kind(Kind.SCHEDULE)
        self._watch = Watch(promise.triggers, sees_updates=sees_updates)
        self._steps: deque[_Step] = deque()
        self._open: _Step | None = None
        self._window = Window()

    def append(
        self, boundary: Boundary, payload: NDArray[np.uint8], *, hurried: bool = False
    ) -> Entry | None:
        """Store one boundary; None once the window is complete."""
        if self._window.last is not None:
            return None
        if self._open is None:
            self._open = _Step(boundary.step, self._writer.cut())
            self._steps.append(self._open)
        if self._open.update is None and _begins_update(boundary):
            self._open.update = self._writer.cut()
        self._open.step = max(self._open.step, boundary.step)
        entry = self._writer.append(boundary, payload, hurried=hurried)
        self._watch.see(entry)
        return entry

    def end_step(self) -> None:
        """Judge the step that ends, and disown those that are not to be kept any more."""
        ended, self._open = self._open, None
        if ended is None:
            return
        self._look_out(ended.step)
        if (removed := self._beyond_window()) is not None:
            self._writer.disown(removed.update or self._steps[0].begin)
            self._update(first=self._steps[0].step)
        found = self._window.triggered
        if found is not None and ended.step >= found.step + self._promise.after:
            self._writer.cut()
            self._update(last=ended.step)
            self._on_end()

    def write_manifest(self, manifest: RankManifest) -> None:
        """Replace ``rank.json``, and then remove what it says is not kept."""
        self._writer.write_manifest(msgspec.structs.replace(manifest, window=self._window))
        self._writer.drop()

    def note(self, text: str | None) -> None:
        """Say, and keep in the manifest, that a trigger cannot work."""
        if text is not None:
            self._update(notes=(*self._window.notes, text))
            say(f"rank {self._rank}: {text}")

    def close(self) -> None:
        """Seal what is open."""
        self._writer.close()

    def _beyond_window(self) -> _Step | None:
        """Take the steps off that lie before the window; return the last of them."""
        found = self._window.triggered
        before = [each for each in self._steps if found is None or each.step <= found.step]
        removed = None
        for _ in range(len(before) - self._promise.keep_last):
            removed = self._steps.popleft()
        return removed

    def _look_out(self, step: int) -> None:
        """Notice what set off a trigger in the step that ends, or a signal in a later one."""
        found = self._watch.end_step(step)
        if self._listener is not None:
            self.note(self._listener.replaced())
            found = found or self._listener.asked
        if found is None or self._window.triggered is not None:
            return
        found = msgspec.structs.replace(found, step=max(found.step, step))
        self._update(triggered=found)
        say(f"rank {self._rank}: {said(found)}; {_rest(self._promise, found)}")

    def _update(self, **changes: object) -> None:
        self._window = msgspec.structs.replace(self._window, **changes)


def _rest(promise: Promise, found: Triggered) -> str:
    first = max(found.step - promise.keep_last + 1, 0)
    return f"steps {first}-{found.step + promise.after} are kept, then recording ends; training goes on"


def _begins_update(boundary: Boundary) -> bool:
    return boundary.kind is Kind.PARAM and boundary.slot == "model" and boundary.step != INIT_STEP
