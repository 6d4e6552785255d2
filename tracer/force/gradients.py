"""Gives the live run's gradients, once they are reduced, the recorded run's: ``--force reduced_grads``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.force.ledger import Ledger
from tensortrace.tracer.force.recorded import Recorded, Unforced
from tensortrace.tracer.notices import describe
from tensortrace.tracer.placements import split
from tensortrace.tracer.start.places import Parts
from tensortrace.tracer.start.refusal import world_size
from tensortrace.tracer.types import Key, Kind

NEAR = 0.05
"""How far from the number of ranks a factor may be that stands for it: gradients err, but not so much."""


class ReducedGradients:
    """Overwrites ``.grad`` where a reduction left it, or, in its absence, when the program first reads it.

    What a reduction left was recorded before. Of several microbatches the last one's reduction counts, or
    the first that reads. What the program does in between stays its own: where the reduction leaves a sum
    over ranks that the program divides by itself, it is given the recorded gradient times their number.
    """

    def __init__(self, parts: Parts, recorded: Recorded, ledger: Ledger) -> None:
        self._parts = parts
        self._recorded = recorded
        self._ledger = ledger
        self._has_read = False
        self._done: set[int] = set()
        self._microbatch = 0
        session = parts.session
        session.clock.on_open.append(self._open)
        session.on_reduced.append(self._reduced)
        session.on_read.append(self._read)

    def _open(self) -> None:
        self._has_read = False
        self._done.clear()

    def _reduced(self, parameters: list[torch.Tensor]) -> None:
        clock = self._parts.session.clock
        if clock.microbatch != self._microbatch:  # what another one was given has been added to
            self._done.clear()
        self._microbatch = clock.microbatch
        if clock.microbatch == self._recorded.last_microbatch(clock.step):
            self._set(parameters, reduced=True)

    def _read(self) -> None:
        if not self._has_read and torch._C._current_graph_task_id() < 0:
            self._has_read = True
            if self._parts.session.clock.microbatch != self._microbatch:
                self._done.clear()
            self._set(p for p in self._parameters() if id(p) not in self._done)

    def _parameters(self) -> Iterator[torch.Tensor]:
        session, seen = self._parts.session, set()
        updated = [p for o in session.optimizers for g in o.param_groups for p in g["params"]]
        for parameter in (*(p for p, _ in session.names.parameters()), *session.flats.whole(), *updated):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter

    def _set(self, parameters: Iterable[torch.Tensor], *, reduced: bool = False) -> None:
        step = self._parts.session.clock.step
        for parameter in parameters:
            if parameter.grad is None:
                continue
            name = self._parts.session.names.tensor(parameter).name
            try:
                with torch.no_grad(), unobserved():
                    self._write(step, parameter, parameter.grad, reduced=reduced)
                if reduced:
                    self._done.add(id(parameter))
            except Unforced as reason:
                self._note(step, name, str(reason))
            except Exception as error:  # the program goes on with what it has
                self._note(step, name, describe(error))

    def _write(self, step: int, parameter: torch.Tensor, gradient: torch.Tensor, *, reduced: bool) -> None:
        spec = split(gradient)[1]
        if spec is not None and any(placement.kind == "partial" for placement in spec.placements):
            raise Unforced("it is a sum over ranks, of which no rank's part can be told")
        aliases = self._parts.names(parameter)
        for place in self._parts.of(parameter, gradient):
            key, before = self._recorded.fill(place, (self._key(step, n) for n in (place.name, *aliases)))
            if reduced:
                place.local.mul_(_times(before, place.local))
            self._note(step, key.name)

    def _key(self, step: int, name: str) -> Key | None:
        """Return the gradient over all ranks as the recorded run had it before any clip.

        Of a run that reduced nothing it is what the clip or the optimizer read, or, where a loss scale is
        divided out first, the sum over the window.
        """
        name = self._recorded.known(name)

        def of(kind: Kind, slot: str) -> list[Key]:
            return [key for key in self._recorded.keys(kind, name, slot) if key.step == step]

        reduced = of(Kind.REDUCED_GRAD, "grad")
        if reduced:
            return max(reduced, key=lambda key: key.call)
        scaled = bool(of(Kind.UNSCALED_GRAD, "grad"))
        summed = [key for key in of(Kind.LOCAL_GRAD, "grad") if key.microbatch is None]
        read = [key for key in of(Kind.CLIPPED_GRAD, "before") if key.call == 0]
        read += [k for k in of(Kind.CLIPPED_GRAD, "grad") if k.microbatch is None and k.call == 0]
        return next(iter([*(() if scaled else read), *summed]), None)

    def _note(self, step: int, name: str, reason: str = "") -> None:
        self._ledger.note(step, Kind.REDUCED_GRAD, name, "grad", 0, reason)


def _times(before: torch.Tensor, value: torch.Tensor) -> float:
    """Return how many times the recorded gradient a reduction left: the number of ranks for a sum, else 1."""
    before, value = before.to(torch.float64).flatten(), value.to(torch.float64).flatten()
    size = float(torch.dot(value, value))
    times = float(torch.dot(before, value)) / size if size else 1.0
    return next((float(n) for n in (world_size(),) if abs(times / n - 1) < NEAR), 1.0)
