"""The sources of tensors: hooks on a training program, one file per source, no input or output."""

from __future__ import annotations

from tensortrace.tracer.hooks import backward, checkpoint, clip, flats, guard, loss, rng
from tensortrace.tracer.hooks.collectives import Collectives
from tensortrace.tracer.hooks.duplicates import Duplicates
from tensortrace.tracer.hooks.gradients import Gradients
from tensortrace.tracer.hooks.living import number_living
from tensortrace.tracer.hooks.modules import Modules
from tensortrace.tracer.hooks.named import Named
from tensortrace.tracer.hooks.optimizer import Optimizers
from tensortrace.tracer.hooks.pipelines import Pipelines
from tensortrace.tracer.hooks.reductions import Reductions
from tensortrace.tracer.hooks.scaler import Scalers
from tensortrace.tracer.hooks.schedule import Schedules
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.hooks.sink import Sink
from tensortrace.tracer.hooks.state import State

__all__ = ["Hooks", "Sink", "guard", "install"]


class Hooks:
    """The hooks of one recording: ``finish`` when the program ends, ``remove`` to undo everything.

    ``session`` and ``modules`` are for what changes the run at its user's request (``tracer.start``).
    """

    def __init__(self, session: Session, modules: Modules) -> None:
        self.session = session
        self.modules = modules

    @guard.guard("finish")
    def finish(self) -> None:
        """Record what the last window still owes; called once, when the program ends."""
        self.session.clock.end()

    def remove(self) -> None:
        """Take out every hook and patch; tensors recorded so far are not affected."""
        guard.disarm()
        self.session.patches.undo()


def install(sink: Sink) -> Hooks:
    """Install every hook, once torch has been imported. One recording at a time."""
    session = Session(sink)
    gradients = Gradients(session)
    session.clock.on_open.insert(0, lambda: sink.step_began(session.clock.step))
    session.clock.before_close.append(gradients.close_window)
    reductions, state = Reductions(session, gradients), State(session)
    session.on_read.append(reductions.settle)
    scalers, schedules = Scalers(session), Schedules(session)
    optimizers = Optimizers(session, gradients, state, scalers, schedules)
    scalers.on_skip.append(optimizers.skipped)
    session.clock.before_first.insert(
        0,
        lambda: number_living(
            session.optimizers,
            schedules.order,
            trains=lambda parameter: session.names.known(parameter) is not None,
            unhooked=optimizers.watch_class,
        ),
    )
    rng.install(session)
    modules = Modules(session)
    parts = (
        modules,
        Named(session, modules),
        Collectives(session, reductions),
        Pipelines(session, reductions),
        Duplicates(session),
    )
    for part in (*parts, scalers, schedules, optimizers):
        part.install()
    flats.install(session.patches)
    for source in (checkpoint, backward, loss, clip):
        source.install(session)
    session.patches.bind()
    guard.arm(sink)
    return Hooks(session, modules)
