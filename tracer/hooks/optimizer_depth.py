"""Tells whether, and how deeply, an optimizer is stepping on this thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from tensortrace.tracer.hooks.source import calls_in_progress

_STEP = Optimizer.profile_hook_step(lambda: None).__code__
"""The code that all hooked ``step`` methods share; its frames are the steps in progress."""


Hook = Callable[[Optimizer, Any, Any], object]


def watched(original: Callable[..., Any], before: Hook, after: Hook) -> Callable[..., Any]:
    """Return a ``step`` that calls hooks, as torch's own does, for a class that torch hasn't prepared."""

    @functools.wraps(original)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before(self, (self, *args), kwargs)
        result = original(self, *args, **kwargs)
        after(self, (self, *args), kwargs)
        return result

    return step


_WATCHED = watched(lambda: None, lambda *_: None, lambda *_: None).__code__


def inside_optimizer() -> bool:
    """Tell whether an ``optimizer.step()`` is running on this thread."""
    return calls_in_progress(_STEP, _WATCHED) > 0


def is_outermost_step() -> bool:
    """Tell, from an optimizer's own hook, whether its step isn't part of another step."""
    return calls_in_progress(_STEP, _WATCHED) == 1
