"""Gives parameters and buffers, when a window opens, the values that the recorded run had then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.force.ledger import Ledger
from tensortrace.tracer.force.put import same
from tensortrace.tracer.force.recorded import Recorded, Unforced
from tensortrace.tracer.notices import describe
from tensortrace.tracer.start.places import Parts, Place
from tensortrace.tracer.types import INIT_STEP, Key, Kind

MODEL, START = "model", "start"


def unplaced(reason: str) -> NoReturn:
    """Say that a tensor cannot be placed, without ending the program."""
    raise Unforced(reason)


class Parameters:
    """Writes recorded values in place, resharded; what the program wrote itself was recorded before."""

    def __init__(self, parts: Parts, recorded: Recorded, ledger: Ledger) -> None:
        self._parts = parts
        self._recorded = recorded
        self._ledger = ledger

    def begin(self) -> None:
        """Set what the run begins with, right before it is recorded."""
        session = self._parts.session
        session.names.adopt([p for o in session.optimizers for g in o.param_groups for p in g["params"]])
        self._set(INIT_STEP)

    def open(self) -> None:
        """Set what the window that has just opened computes with, once what was there was recorded."""
        if self._parts.session.clock.step > 0:
            self._set(self._parts.session.clock.step)

    def _set(self, step: int) -> None:
        for tensor in self._owned():
            kind = Kind.PARAM if isinstance(tensor, torch.nn.Parameter) else Kind.BUFFER
            name = self._parts.session.names.tensor(tensor).name
            try:
                with torch.no_grad(), unobserved():
                    written = [
                        self._write(kind, step, place, self._parts.names(tensor))
                        for place in self._parts.of(tensor)
                    ]
            except Unforced as reason:
                self._note(step, kind, name, str(reason))
                continue
            except Exception as error:  # the program goes on with what it has
                self._note(step, kind, name, describe(error))
                continue
            if any(written):
                for listener in self._parts.session.on_rewritten:
                    listener(tensor)

    def _owned(self) -> Iterator[torch.Tensor]:
        session = self._parts.session
        held = list(session.names.owned())
        for module in dict.fromkeys(module for module, _, _ in held):
            session.note_layout(module)
        yield from session.flats.whole()
        for module, own, tensor in held:
            is_own = own in module._buffers or isinstance(tensor, torch.nn.Parameter)
            if is_own and not session.flats.holds(tensor):
                yield tensor

    def _write(self, kind: Kind, step: int, place: Place, aliases: tuple[str, ...]) -> bool:
        """Set one part and tell whether it was otherwise."""
        keys = (self._key(kind, step, name) for name in (place.name, *aliases))
        key, before = self._recorded.fill(place, keys)
        self._note(step, kind, key.name)
        return not same(place.local, before)

    def _key(self, kind: Kind, step: int, name: str) -> Key | None:
        """Return where the trace has the value at the start of a step."""
        name = self._recorded.known(name)
        starts = [k for k in self._recorded.keys(kind, name, START) if k.step == step]
        before = [k for k in self._recorded.keys(kind, name, MODEL) if k.step < max(step, 0)]
        return max(starts or before, key=lambda key: (key.step, key.call), default=None)

    def _note(self, step: int, kind: Kind, name: str, reason: str = "") -> None:
        self._ledger.note(step, kind, name, MODEL, 0, reason)
