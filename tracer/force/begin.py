"""Installs what a live run is to be given of a recorded one."""

from __future__ import annotations

from pathlib import Path

from tensortrace.tracer.force.calls import Calls
from tensortrace.tracer.force.gradients import ReducedGradients
from tensortrace.tracer.force.ledger import Ledger
from tensortrace.tracer.force.parameters import Parameters, unplaced
from tensortrace.tracer.force.recorded import Recorded
from tensortrace.tracer.hooks import Hooks
from tensortrace.tracer.notices import describe
from tensortrace.tracer.rules import RunLayout
from tensortrace.tracer.settings import Forcing
from tensortrace.tracer.start.places import Parts
from tensortrace.tracer.start.refusal import refuse


def install(hooks: Hooks, forcing: Forcing, *, layout: str | None = None) -> None:
    """See to it that the run is given what was asked for; called once, right after the hooks were installed.

    ``layout`` is the path of the live run's layout file. Runs no collective: each rank reads its own parts.
    """
    session, ledger = hooks.session, Ledger(Path(forcing.ledger))

    def opened() -> None:
        """Read the indexes once a training begins: launchers and other processes need none."""
        try:
            live = None if layout is None else RunLayout.load(layout)
            recorded = Recorded(Path(forcing.trace), live)
        except Exception as error:
            refuse(f"{forcing.trace}: {describe(error)}")
        parts = Parts(session, live, refuse=unplaced)
        if "params" in forcing.kinds:
            parameters = Parameters(parts, recorded, ledger)
            parameters.begin()
            session.clock.on_open.append(parameters.open)
        values, gradients = "inputs" in forcing.kinds, "activation_grads" in forcing.kinds
        if values or gradients:
            hooks.modules.forces = Calls(session, recorded, ledger, live, values=values, gradients=gradients)
        if "reduced_grads" in forcing.kinds:
            ReducedGradients(parts, recorded, ledger)

    session.clock.before_first.insert(0, opened)
    session.clock.before_close.append(ledger.write)
