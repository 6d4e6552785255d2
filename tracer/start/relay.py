"""Hands what one rank knows of the rows of a forward to others: later stages, holders of other positions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch

from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import pipelining
from tensortrace.tracer.start.refusal import rank
from tensortrace.tracer.start.rows import Rows

PATIENCE = timedelta(seconds=60)
NO_POSITIONS = -1

_RECORDINGS = itertools.count()
"""Numbers the recordings of a process: what one left in the store must not be taken for the next one's."""


class Relay:
    """Passes rows through the store of torch.distributed, by pipeline, step and microbatch.

    A later stage asks for them in its forward, whose input comes out of the first stage's forward: they
    have been given by then, and nobody waits for more than he waits for anyway.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._given: list[str] = []
        self._exchanged: list[str] = []
        self._before: list[str] = []
        self._number = next(_RECORDINGS)

    def give(self, at: Moment, rows: Rows) -> None:
        """Publish the rows of a forward of the first stage; does nothing outside of pipelines."""
        store = pipelining.store() if self._session.pipeline else None
        if store is not None:
            positions = NO_POSITIONS if rows.positions is None else rows.positions
            numbers = [positions, *rows.numbers.tolist()]
            store.set(self._key(at), " ".join(map(str, numbers)))
            self._given.append(self._key(at))

    def take(self, at: Moment) -> Rows | None:
        """Return the rows that the first stage was given; None where it gave none."""
        store = pipelining.store() if self._session.pipeline else None
        if store is None:
            return None
        try:
            store.wait([self._key(at)], PATIENCE)
        except RuntimeError:
            return None
        positions, *numbers = map(int, store.get(self._key(at)).split())
        return Rows(torch.tensor(numbers), None if positions == NO_POSITIONS else positions)

    def exchange(self, at: Moment, mine: str, ranks: Sequence[int]) -> list[str] | None:
        """Return what each of the ranks gives, this one ``mine``; None where one of them gives nothing.

        Called in the forward of ranks that hold parts of the same rows: their attention waits for each other
        later in that forward. What was given is taken back when the window after this one has ended.
        """
        store = pipelining.store()
        if store is None:
            return None
        keys = [f"tensortrace/parts/{self._number}/{at.step}/{at.microbatch}/{other}" for other in ranks]
        own = f"tensortrace/parts/{self._number}/{at.step}/{at.microbatch}/{rank()}"
        store.set(own, mine)
        self._exchanged.append(own)
        try:
            store.wait(keys, PATIENCE)
        except RuntimeError:
            return None
        return [store.get(key).decode() for key in keys]

    def forget(self) -> None:
        """Take back what was given in a window that has ended: its forwards are over on all stages."""
        over = [*self._given, *self._before]
        store = pipelining.store() if over else None
        if store is not None:
            for key in over:
                store.delete_key(key)
        self._given.clear()
        self._before, self._exchanged = self._exchanged, []

    def _key(self, at: Moment) -> str:
        pipeline = "_".join(map(str, self._session.pipeline))
        return f"tensortrace/rows/{pipeline}/{at.step}/{at.microbatch}"
