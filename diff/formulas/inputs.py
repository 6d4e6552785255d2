"""What an update formula reads, and what a family of formulas answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

Hypers = Mapping[str, float]


@dataclass(frozen=True)
class UpdateInputs:
    """One parameter's recorded values around one update of one run, as float64 arrays (or blocks of them).

    ``before`` and ``after`` are optimizer state; ``before`` is empty at the first update. Complex numbers
    come as pairs, in one more dimension. ``dtype`` is the parameter's.
    """

    optimizer: str
    param: np.ndarray
    gradient: np.ndarray
    before: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]
    hypers: Hypers
    dtype: str = "float32"

    def magnitudes(self) -> UpdateInputs:
        """Return the same of magnitudes: what a formula makes of these is the magnitude of its terms."""
        return replace(
            self, param=np.abs(self.param), gradient=np.abs(self.gradient),
            before={k: np.abs(v) for k, v in self.before.items()},
            hypers={**self.hypers, "maximize": 0.0},
        )  # fmt: skip


class Family(Protocol):
    """A family of formulas. ``None`` says that a value is not known."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return what one state tensor becomes."""

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return what the parameter becomes, from the state after the update."""

    def amplified(self, x: UpdateInputs) -> np.ndarray:
        """Return by how much an update's round-off is greater than that of its terms, 1 where not."""


def number(value: np.ndarray) -> float:
    """Return a count; beside a parameter that is a number itself it comes in a block of one."""
    return float(np.ravel(value)[0])


class Scaled:
    """What most families share: decay, of the gradient or of the parameter; running averages."""

    def gradient(self, x: UpdateInputs) -> np.ndarray:
        """Return the gradient that is descended, with a decay that is added to it."""
        gradient = -x.gradient if x.hypers.get("maximize") else x.gradient
        decay = 0.0 if x.hypers.get("decoupled_weight_decay") else x.hypers.get("weight_decay", 0.0)
        return gradient + decay * x.param if decay else gradient

    def kept(self, x: UpdateInputs) -> np.ndarray:
        """Return the parameter after a decay that is taken off it."""
        decoupled = bool(x.hypers.get("decoupled_weight_decay"))
        return x.param * (1 - x.hypers["lr"] * x.hypers.get("weight_decay", 0.0)) if decoupled else x.param

    def before(self, x: UpdateInputs, slot: str) -> np.ndarray:
        """Return a state before the update, zeros at the first."""
        return x.before[slot] if slot in x.before else np.zeros_like(x.gradient)

    def average(self, x: UpdateInputs, slot: str, keep: float, value: np.ndarray) -> np.ndarray:
        """Return a running average with one more value in it."""
        return np.asarray(keep * self.before(x, slot) + (1 - keep) * value)

    def count(self, x: UpdateInputs) -> np.ndarray:
        """Return the number of updates with this one."""
        return np.asarray(x.before.get("step", np.zeros(())) + 1)

    def moment(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return Adam's moments and count, which several optimizers share."""
        gradient = self.gradient(x)
        if slot == "exp_avg":
            return self.average(x, slot, x.hypers["betas.0"], gradient)
        if slot == "exp_avg_sq":
            return self.average(x, slot, x.hypers["betas.1"], gradient**2)
        return self.count(x) if slot == "step" else None

    def amplified(self, x: UpdateInputs) -> np.ndarray:
        """Return 1: the terms are no greater than what they sum to, but for their signs."""
        return np.ones(())
