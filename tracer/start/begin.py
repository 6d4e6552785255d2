"""Changes where a run begins, right before its initial state is recorded."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F

from tensortrace.tracer.hooks import Hooks
from tensortrace.tracer.settings import Start
from tensortrace.tracer.start import attention
from tensortrace.tracer.start.dropout import Dropout
from tensortrace.tracer.start.fill import fill
from tensortrace.tracer.start.load import load


def install(hooks: Hooks, start: Start) -> None:
    """See to it that the run begins as asked; called once, right after the hooks were installed.

    Parameters are set when the first window opens: by then wrappers have broadcast, sharded and moved
    what they will, and nothing has been computed from them. What can't be done ends the program.
    """
    session = hooks.session
    if start.init_from is not None:
        path = Path(start.init_from)
        session.clock.before_first.insert(0, lambda: load(session, path))
    if start.dropout_seed is not None:
        dropout = Dropout(hooks, start.dropout_seed, padding=start.pad_id)
        attend = attention.replacement(dropout, eager=start.eager_attention)
        session.patches.function(F.scaled_dot_product_attention, attend)
        dropout.install()
    if start.init_seed is not None:
        seed = start.init_seed
        session.clock.before_first.insert(0, lambda: fill(session, seed, adversarial=start.adversarial))
