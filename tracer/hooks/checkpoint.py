"""Pairs the recomputed forward of an activation checkpoint with its first pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from tensortrace.tracer.hooks.clock import Region
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.session import Session


def install(session: Session) -> None:
    """Wrap the function given to ``checkpoint``: its first run is the forward, others recompute."""
    original = torch.utils.checkpoint.checkpoint

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        reentrant = kwargs.get("use_reentrant") is not False
        return original(_paired(session, function, reentrant), *args, **kwargs)

    session.patches.function(original, checkpoint)


def _paired(session: Session, function: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    """Return the function, with each of its runs made known to the clock as a pass of one region."""
    if torch.compiler.is_compiling():
        return function
    region = _new_region(session, reentrant)
    if region is None:
        return function
    first = True

    @functools.wraps(function, assigned=("__doc__",), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        session.clock.enter_region(region, first=first)
        first = False
        try:
            return function(*args, **kwargs)
        finally:
            session.clock.leave_region()

    return run


@guard("checkpoint")
def _new_region(session: Session, reentrant: bool) -> Region:
    return session.clock.region(reentrant=reentrant, scope=session.scope())
