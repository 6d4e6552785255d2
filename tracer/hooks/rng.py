"""Records the state of each random generator when a window opens, without touching it."""

from __future__ import annotations

import random
import struct
import sys

import numpy as np
import torch

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.guard import cuda_in_use
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.types import Kind

NO_GAUSS = float("nan")
"""Stands for "no second Gaussian number is waiting" in Python's and numpy's states."""


def install(session: Session) -> None:
    """Record when a window opens."""
    session.clock.on_open.append(lambda: _record(session))


def _record(session: Session) -> None:
    at = session.clock.window()
    if not session.wants(Kind.RNG, "cpu", at):
        return
    with unobserved():
        states = _states()
    for name, state in states.items():
        session.emit(state, at, Kind.RNG, name, "state")


def _states() -> dict[str, torch.Tensor]:
    """Return the states as uint8 tensors of our own."""
    states = {"cpu": torch.get_rng_state(), "python": _python_state()}
    if cuda_in_use():
        for index in range(torch.cuda.device_count()):
            states[f"cuda:{index}"] = torch.cuda.get_rng_state(index)
    if "numpy.random" in sys.modules:
        states["numpy"] = _numpy_state()
    return states


def _python_state() -> torch.Tensor:
    _, words, gauss = random.getstate()
    packed = struct.pack(f"<{len(words)}Id", *words, NO_GAUSS if gauss is None else gauss)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _numpy_state() -> torch.Tensor:
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)
    _, words, position, has_gauss, gauss = state
    packed = np.asarray(words, dtype="<u4").tobytes() + struct.pack(
        "<Id", int(position), gauss if has_gauss else NO_GAUSS
    )
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)
