"""Records parameters, buffers and optimizer state: at the start, after updates, after other changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.optim import Optimizer

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.digests import Digests
from tensortrace.tracer.hooks.names import TensorName
from tensortrace.tracer.hooks.numbers import plain_number
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.hooks.walk import is_plain, printable, tensors_in
from tensortrace.tracer.placements.zero import stepping
from tensortrace.tracer.types import INIT_STEP, Kind, Meta

NO_OPTIMIZER = "no optimizer has stepped"


class State:
    """What a run carries from step to step.

    What was recorded of a parameter last is one thing; what it was when the window opened is another, which
    tells of an update by the program's own hand, also in windows of which nothing is recorded. It is asked
    for, and kept, only as long as no optimizer has stepped.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._digests = Digests()
        self._trained = Digests()
        session.clock.before_first.append(self._record_init)
        session.clock.on_open.append(self._record_changes)
        session.clock.updated = self._updated_by_hand
        session.on_rewritten.append(self._rewritten)
        session.sink.absent(Kind.CLIPPED_GRAD, NO_OPTIMIZER)

    def record_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record parameters as an optimizer left them, and the buffers that changed meanwhile."""
        at = self._session.clock.window()
        for parameter in parameters:
            self._parameter(parameter, self._session.names.tensor(parameter), at, "model")
        self._buffers(at, only_changed=True)

    def record_optimizer(self, optimizer: Optimizer, at: Moment, call: int = 0) -> None:
        """Record every tensor and number of an optimizer's state, as far as this rank holds it."""
        if at.step != INIT_STEP:
            self._session.sink.absent(Kind.CLIPPED_GRAD, None)
        optimizer = stepping(optimizer)
        meta = Meta(optimizer=type(optimizer).__name__)
        for owner, entries in list(optimizer.state.items()):
            if isinstance(owner, torch.Tensor) and isinstance(entries, Mapping):
                name = self._session.names.tensor(owner).name
                for slot, tensor in _state_tensors(entries):
                    own = self._session.clock.take_from(call, at, Kind.OPTIMIZER_STATE, name, slot)
                    self._session.emit(
                        tensor, at, Kind.OPTIMIZER_STATE, name, slot,
                        call=own, meta=meta, parameter=owner,
                    )  # fmt: skip

    def _rewritten(self, tensor: torch.Tensor) -> None:
        """Take a tensor that we gave another value as known: the program did not change it."""
        self._digests.note(tensor)
        self._trained.note(tensor)

    def _updated_by_hand(self) -> bool:
        """Tell whether a parameter that the last backward reached has changed; record it and others if so.

        Flat parameters say nothing: their wrapper moves what they are made of.
        """
        session, found = self._session, []
        if next(session.flats.whole(), None) is not None:
            return False
        for parameter, name in session.names.parameters():
            if id(parameter) in session.arrived and is_plain(parameter) and self._trained.changed(parameter):
                found.append((parameter, name))
        for parameter, name in found:
            if session.wants(Kind.PARAM, name.name, session.clock.window(), parameter):
                self._digests.note(parameter)
                self._emit_parameter(parameter, name, session.clock.window(), "model")
        return bool(found)

    def _record_init(self) -> None:
        session, at = self._session, Moment(INIT_STEP, None)
        optimizers = list(session.optimizers)
        owned = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        session.names.adopt(owned)
        elsewhere = session.names.elsewhere()
        owned = [parameter for parameter in owned if id(parameter) not in elsewhere]
        for parameter, name in self._all_parameters(owned).items():
            self._parameter(parameter, name, at, "model")
        self._buffers(at, only_changed=False)
        for optimizer in optimizers:
            self.record_optimizer(optimizer, at)

    def _record_changes(self) -> None:
        """When a window opens, record parameters that something other than their optimizer has changed."""
        if self._session.quiet:
            return
        at, by_hand = self._session.clock.window(), not self._session.clock.has_optimizer
        self._session.names.refresh()
        for parameter, name in self._session.names.parameters():
            if by_hand and is_plain(parameter):
                self._trained.note(parameter)
            if self._session.wants(Kind.PARAM, name.name, at, parameter) and self._digests.changed(parameter):
                self._emit_parameter(parameter, name, at, "start")

    def _all_parameters(self, owned: list[torch.Tensor]) -> dict[torch.Tensor, TensorName]:
        found: dict[torch.Tensor, TensorName] = dict(self._session.names.parameters())
        for parameter in owned:
            found.setdefault(parameter, self._session.names.tensor(parameter))
        return found

    def _parameter(self, parameter: torch.Tensor, name: TensorName, at: Moment, slot: str) -> None:
        if is_plain(parameter) and self._session.wants(Kind.PARAM, name.name, at, parameter):
            self._digests.note(parameter)
            self._emit_parameter(parameter, name, at, slot)

    def _emit_parameter(self, parameter: torch.Tensor, name: TensorName, at: Moment, slot: str) -> None:
        meta = Meta(aliases=name.aliases, requires_grad=parameter.requires_grad)
        call = self._session.clock.ordinal_in(at, Kind.PARAM, name.name, slot)
        self._session.emit(
            parameter, at, Kind.PARAM, name.name, slot, call=call, meta=meta, parameter=parameter
        )

    def _buffers(self, at: Moment, *, only_changed: bool) -> None:
        for buffer, name in self._session.names.buffers():
            if self._session.wants(Kind.BUFFER, name.name, at):
                changed = self._digests.changed(buffer)
                if changed or not only_changed:
                    call = self._session.clock.ordinal_in(at, Kind.BUFFER, name.name, "model")
                    self._session.emit(
                        buffer, at, Kind.BUFFER, name.name, "model", call=call, parameter=buffer
                    )


def _state_tensors(entries: Mapping[str, object]) -> list[tuple[str, torch.Tensor]]:
    """Return (slot, tensor) of one parameter's state; numbers become float64, anything else is left out."""
    found: list[tuple[str, torch.Tensor]] = []
    for key, value in entries.items():
        slot = printable(str(key))
        number = plain_number(value)
        if number is not None:
            with unobserved():
                found.append((slot, torch.tensor(float(number), dtype=torch.float64)))
        else:
            found += tensors_in(value, slot)
    return found
