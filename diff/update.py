"""What an optimizer's formula makes of recorded inputs, in float64, so that inherited error is told from own.

Formulas: SGD with momentum as in Sutskever et al. 2013 in the form that torch documents; Adam from
Kingma & Ba 2015 (Algorithm 1; AMSGrad from Reddi et al. 2018); decoupled decay from Loshchilov & Hutter 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Hypers = Mapping[str, float]


@dataclass(frozen=True)
class UpdateInputs:
    """One parameter's recorded values around one update of one run, as float64 arrays (or blocks of them).

    ``before`` and ``after`` are optimizer state; ``before`` is empty at the first update.
    """

    optimizer: str
    param: np.ndarray
    gradient: np.ndarray
    before: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]
    hypers: Hypers


def has_formula(optimizer: str) -> bool:
    """Tell whether the formula of this class of optimizers is known."""
    return optimizer in _FAMILIES


def predict_state(inputs: UpdateInputs, slot: str) -> np.ndarray | None:
    """Return what one state tensor should become; None where this optimizer's formula is not known."""
    family = _FAMILIES.get(inputs.optimizer)
    return family.state(inputs, slot) if family else None


def predict_param(inputs: UpdateInputs) -> np.ndarray | None:
    """Return what the parameter should become, from the recorded state *after* the update."""
    family = _FAMILIES.get(inputs.optimizer)
    return family.param(inputs) if family else None


class _Adam:
    """Adam and AdamW; they differ in where weight decay enters."""

    def __init__(self, *, decoupled: bool) -> None:
        self.decoupled = decoupled

    def _gradient(self, x: UpdateInputs) -> np.ndarray:
        gradient = -x.gradient if x.hypers.get("maximize") else x.gradient
        decoupled = self.decoupled or bool(x.hypers.get("decoupled_weight_decay"))
        decay = 0.0 if decoupled else x.hypers.get("weight_decay", 0.0)
        return gradient + decay * x.param

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        gradient = self._gradient(x)
        if slot == "exp_avg":
            beta = x.hypers["betas.0"]
            return beta * x.before.get(slot, np.zeros_like(gradient)) + (1 - beta) * gradient
        if slot == "exp_avg_sq":
            beta = x.hypers["betas.1"]
            squares: np.ndarray = (1 - beta) * gradient**2
            return np.asarray(beta * x.before.get(slot, np.zeros_like(gradient)) + squares)
        if slot == "max_exp_avg_sq":
            return np.asarray(np.maximum(x.before.get(slot, np.zeros_like(gradient)), x.after["exp_avg_sq"]))
        if slot == "step":
            return np.asarray(x.before.get(slot, np.zeros(())) + 1)
        return None

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        if not {"exp_avg", "exp_avg_sq", "step"} <= set(x.after):
            return None
        step, rate = float(x.after["step"]), x.hypers["lr"]
        second = x.after["max_exp_avg_sq"] if x.hypers.get("amsgrad") else x.after["exp_avg_sq"]
        first = x.after["exp_avg"] / (1 - x.hypers["betas.0"] ** step)
        scale = np.sqrt(second / (1 - x.hypers["betas.1"] ** step)) + x.hypers["eps"]
        decoupled = self.decoupled or bool(x.hypers.get("decoupled_weight_decay"))
        keep = 1 - rate * x.hypers.get("weight_decay", 0.0) if decoupled else 1.0
        return np.asarray(x.param * keep - rate * first / scale)


class _Sgd:
    """Stochastic gradient descent with momentum, dampening and Nesterov's variant."""

    def _gradient(self, x: UpdateInputs) -> np.ndarray:
        gradient = -x.gradient if x.hypers.get("maximize") else x.gradient
        return gradient + x.hypers.get("weight_decay", 0.0) * x.param

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        if slot != "momentum_buffer":
            return None
        gradient = self._gradient(x)
        if slot not in x.before:
            return gradient
        return x.hypers["momentum"] * x.before[slot] + (1 - x.hypers.get("dampening", 0.0)) * gradient

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        gradient, momentum = self._gradient(x), x.hypers.get("momentum", 0.0)
        if momentum:
            if "momentum_buffer" not in x.after:
                return None
            buffer = x.after["momentum_buffer"]
            gradient = gradient + momentum * buffer if x.hypers.get("nesterov") else buffer
        return x.param - x.hypers["lr"] * gradient


_FAMILIES: dict[str, _Adam | _Sgd] = {
    "Adam": _Adam(decoupled=False),
    "AdamW": _Adam(decoupled=True),
    "SGD": _Sgd(),
}
