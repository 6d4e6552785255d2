"""Changes where a run begins, right before its initial state is recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch.nn.functional as F

from tensortrace.tracer.hooks import Hooks
from tensortrace.tracer.notices import describe
from tensortrace.tracer.rules import RunLayout
from tensortrace.tracer.settings import Start
from tensortrace.tracer.start import attention
from tensortrace.tracer.start.dropout import Dropout
from tensortrace.tracer.start.fill import fill
from tensortrace.tracer.start.load import load
from tensortrace.tracer.start.places import Parts
from tensortrace.tracer.start.refusal import refuse


def install(hooks: Hooks, start: Start, *, layout: str | None = None) -> None:
    """See to it that the run begins as asked; called once, right after the hooks were installed.

    ``layout`` is the path of the layout file that says how the program spreads tensors by hand.

    Parameters are set when the first window opens: by then wrappers have broadcast, sharded and moved
    what they will, and nothing has been computed from them. What can't be done ends the program.
    """
    session = hooks.session

    def parts() -> Parts:
        return Parts(session, None if layout is None else RunLayout.load(layout))

    if start.init_from is not None:
        path = Path(start.init_from)
        session.clock.before_first.insert(0, _or_refuse(lambda: load(parts(), path)))
    if start.dropout_seed is not None:
        dropout = Dropout(hooks, start.dropout_seed, padding=start.pad_id, layout=layout)
        attend = attention.replacement(dropout, eager=start.eager_attention)
        session.patches.function(F.scaled_dot_product_attention, attend)
        dropout.install()
    if start.init_seed is not None:
        seed = start.init_seed
        session.clock.before_first.insert(
            0, _or_refuse(lambda: fill(parts(), seed, adversarial=start.adversarial))
        )


def _or_refuse(act: Callable[[], None]) -> Callable[[], None]:
    """Let no error of ours pass for an error of the recorder, after which the program would go on."""

    def set_state() -> None:
        try:
            act()
        except Exception as error:
            refuse(describe(error))

    return set_state
