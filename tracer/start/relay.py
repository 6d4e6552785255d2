"""Hands the rows that a pipeline's first stage was given to the stages after it."""

from __future__ import annotations

from datetime import timedelta

import torch

from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import pipelining
from tensortrace.tracer.start.rows import Rows

PATIENCE = timedelta(seconds=60)
NO_POSITIONS = -1


class Relay:
    """Passes rows through the store of torch.distributed, by pipeline, step and microbatch.

    A later stage asks for them in its forward, whose input comes out of the first stage's forward: they
    have been given by then, and nobody waits for more than he waits for anyway.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._given: list[str] = []

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

    def forget(self) -> None:
        """Take back what was given in a window that has ended: its forwards are over on all stages."""
        store = pipelining.store() if self._given else None
        if store is not None:
            for key in self._given:
                store.delete_key(key)
        self._given.clear()

    def _key(self, at: Moment) -> str:
        pipeline = "_".join(map(str, self._session.pipeline))
        return f"tensortrace/rows/{pipeline}/{at.step}/{at.microbatch}"
