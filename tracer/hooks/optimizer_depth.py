"""Tells whether, and how deeply, an optimizer is stepping on this thread."""

from __future__ import annotations

from torch.optim import Optimizer

from tensortrace.tracer.hooks.source import calls_in_progress

_STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""The code that all hooked ``step`` methods share; its frames are the steps in progress."""


def inside_optimizer() -> bool:
    """Tell whether an ``optimizer.step()`` is running on this thread."""
    return calls_in_progress(_STEP) > 0


def is_outermost_step() -> bool:
    """Tell, from an optimizer's own hook, whether its step isn't part of another step."""
    return calls_in_progress(_STEP) == 1
