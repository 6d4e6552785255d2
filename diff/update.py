"""What an optimizer's formula makes of recorded inputs, in float64, so that inherited error is told from own.

Formulas: SGD with momentum as in Sutskever et al. 2013 in the form that torch documents; Adam and Adamax
from Kingma & Ba 2015 (Algorithms 1 and 2; AMSGrad from Reddi et al. 2018); decoupled decay from Loshchilov &
Hutter 2019; NAdam from Dozat 2016; RAdam from Liu et al. 2020; RMSprop from Tieleman & Hinton 2012, centered
as in Graves 2013; Adagrad from Duchi et al. 2011; Adadelta from Zeiler 2012; the momentum of Muon from Jordan
et al. 2024. Where torch documents another form of one, it is torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

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
    family = _family(inputs)
    return family.state(inputs, slot) if family else None


def predict_param(inputs: UpdateInputs) -> np.ndarray | None:
    """Return what the parameter should become, from the recorded state *after* the update."""
    family = _family(inputs)
    return family.param(inputs) if family else None


def _number(value: np.ndarray) -> float:
    """Return a count; beside a parameter that is a number itself it comes in a block of one."""
    return float(np.ravel(value)[0])


def _before(x: UpdateInputs, slot: str) -> np.ndarray:
    """Return a state before the update, of zeros at the first."""
    return x.before[slot] if slot in x.before else np.zeros_like(x.gradient)


def amplification(inputs: UpdateInputs) -> np.ndarray:
    """Return by how much an update's own round-off is greater than that of the terms it sums, 1 where not."""
    family = _family(inputs)
    return family.amplified(inputs) if isinstance(family, _RmsProp) else np.ones(())


class _Adam:
    """Adam and AdamW; they differ in where weight decay enters."""

    def __init__(self, *, decoupled: bool) -> None:
        self.decoupled = decoupled

    def _gradient(self, x: UpdateInputs) -> np.ndarray:
        gradient = -x.gradient if x.hypers.get("maximize") else x.gradient
        decoupled = self.decoupled or bool(x.hypers.get("decoupled_weight_decay"))
        decay = 0.0 if decoupled else x.hypers.get("weight_decay", 0.0)
        return gradient + decay * x.param if decay else gradient

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        gradient = self._gradient(x)
        if slot == "exp_avg":
            beta = x.hypers["betas.0"]
            return beta * _before(x, slot) + (1 - beta) * gradient
        if slot == "exp_avg_sq":
            beta = x.hypers["betas.1"]
            squares: np.ndarray = (1 - beta) * gradient**2
            return np.asarray(beta * _before(x, slot) + squares)
        if slot == "max_exp_avg_sq":
            return np.asarray(np.maximum(_before(x, slot), x.after["exp_avg_sq"]))
        if slot == "step":
            return np.asarray(x.before.get(slot, np.zeros(())) + 1)
        return None

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        if not {"exp_avg", "exp_avg_sq", "step"} <= set(x.after):
            return None
        step, rate = _number(x.after["step"]), x.hypers["lr"]
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
        decay = x.hypers.get("weight_decay", 0.0)
        return gradient + decay * x.param if decay else gradient

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


class _Scaled:
    """Optimizers that divide the gradient by a running size of it; decay is added to the gradient."""

    def _gradient(self, x: UpdateInputs) -> np.ndarray:
        gradient = -x.gradient if x.hypers.get("maximize") else x.gradient
        decay = 0.0 if x.hypers.get("decoupled_weight_decay") else x.hypers.get("weight_decay", 0.0)
        return gradient + decay * x.param if decay else gradient

    def _kept(self, x: UpdateInputs) -> np.ndarray:
        """Return the parameter after a decay that is taken off it."""
        decoupled = bool(x.hypers.get("decoupled_weight_decay"))
        return x.param * (1 - x.hypers["lr"] * x.hypers.get("weight_decay", 0.0)) if decoupled else x.param

    def _average(self, x: UpdateInputs, slot: str, keep: float, value: np.ndarray) -> np.ndarray:
        return np.asarray(keep * _before(x, slot) + (1 - keep) * value)

    def _count(self, x: UpdateInputs) -> np.ndarray:
        return np.asarray(x.before.get("step", np.zeros(())) + 1)

    def _moment(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return Adam's moments and count, which several optimizers share."""
        gradient = self._gradient(x)
        if slot == "exp_avg":
            return self._average(x, slot, x.hypers["betas.0"], gradient)
        if slot == "exp_avg_sq":
            return self._average(x, slot, x.hypers["betas.1"], gradient**2)
        return self._count(x) if slot == "step" else None


class _RmsProp(_Scaled):
    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        gradient = self._gradient(x)
        if slot == "square_avg":
            return self._average(x, slot, x.hypers["alpha"], gradient**2)
        if slot == "grad_avg":
            return self._average(x, slot, x.hypers["alpha"], gradient)
        if slot == "momentum_buffer":
            size = self._size(x)
            return None if size is None else x.hypers["momentum"] * _before(x, slot) + gradient / size
        return self._count(x) if slot == "step" else None

    def _size(self, x: UpdateInputs) -> np.ndarray | None:
        if "square_avg" not in x.after or (x.hypers.get("centered") and "grad_avg" not in x.after):
            return None
        square = x.after["square_avg"]
        if x.hypers.get("centered"):
            square = square - x.after["grad_avg"] ** 2
        with np.errstate(invalid="ignore"):
            return np.asarray(np.sqrt(square) + x.hypers["eps"])

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        if x.hypers.get("momentum"):
            buffer = x.after.get("momentum_buffer")
            return None if buffer is None else x.param - x.hypers["lr"] * buffer
        size = self._size(x)
        return None if size is None else x.param - x.hypers["lr"] * self._gradient(x) / size

    def amplified(self, x: UpdateInputs) -> np.ndarray:
        """Return how much greater than its result the terms of a variance are."""
        if not x.hypers.get("centered") or not {"square_avg", "grad_avg"} <= set(x.after):
            return np.ones(())
        square = x.after["square_avg"]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(1 + square / np.abs(square - x.after["grad_avg"] ** 2))


class _Adagrad(_Scaled):
    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        if slot == "sum":
            start = np.full_like(x.gradient, x.hypers.get("initial_accumulator_value", 0.0))
            return np.asarray(x.before.get(slot, start) + self._gradient(x) ** 2)
        return self._count(x) if slot == "step" else None

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        if not {"sum", "step"} <= set(x.after):
            return None
        rate = x.hypers["lr"] / (1 + (_number(x.after["step"]) - 1) * x.hypers.get("lr_decay", 0.0))
        return np.asarray(x.param - rate * self._gradient(x) / (np.sqrt(x.after["sum"]) + x.hypers["eps"]))


class _Adadelta(_Scaled):
    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        keep = x.hypers["rho"]
        if slot == "square_avg":
            return self._average(x, slot, keep, self._gradient(x) ** 2)
        if slot == "acc_delta":
            change = self._change(x)
            return None if change is None else self._average(x, slot, keep, change**2)
        return self._count(x) if slot == "step" else None

    def _change(self, x: UpdateInputs) -> np.ndarray | None:
        if "square_avg" not in x.after:
            return None
        eps = x.hypers["eps"]
        ratio = np.sqrt((_before(x, "acc_delta") + eps) / (x.after["square_avg"] + eps))
        return np.asarray(ratio * self._gradient(x))

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        change = self._change(x)
        return None if change is None else x.param - x.hypers["lr"] * change


class _Adamax(_Scaled):
    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        if slot == "exp_inf":
            kept = x.hypers["betas.1"] * _before(x, slot)
            return np.asarray(np.maximum(kept, np.abs(self._gradient(x)) + x.hypers["eps"]))
        return self._moment(x, slot)

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        if not {"exp_avg", "exp_inf", "step"} <= set(x.after):
            return None
        rate = x.hypers["lr"] / (1 - x.hypers["betas.0"] ** _number(x.after["step"]))
        return np.asarray(x.param - rate * x.after["exp_avg"] / x.after["exp_inf"])


class _NAdam(_Scaled):
    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        if slot == "mu_product":
            return np.asarray(x.before.get(slot, np.ones(())) * self._mu(x, _number(self._count(x))))
        return self._moment(x, slot)

    def _mu(self, x: UpdateInputs, step: float) -> float:
        decay = 0.96 ** (step * x.hypers["momentum_decay"])
        return x.hypers["betas.0"] * float(1 - 0.5 * decay)

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        if not {"exp_avg", "exp_avg_sq", "mu_product", "step"} <= set(x.after):
            return None
        step, rate, product = _number(x.after["step"]), x.hypers["lr"], _number(x.after["mu_product"])
        size = np.sqrt(x.after["exp_avg_sq"] / (1 - x.hypers["betas.1"] ** step)) + x.hypers["eps"]
        mu, ahead = self._mu(x, step), self._mu(x, step + 1)
        own = (1 - mu) / (1 - product) * self._gradient(x)
        return np.asarray(
            self._kept(x) - rate * (own + ahead / (1 - product * ahead) * x.after["exp_avg"]) / size
        )


class _RAdam(_Scaled):
    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        return self._moment(x, slot)

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        if not {"exp_avg", "exp_avg_sq", "step"} <= set(x.after):
            return None
        step, first, second = _number(x.after["step"]), x.hypers["betas.0"], x.hypers["betas.1"]
        change = x.after["exp_avg"] / (1 - first**step)
        longest = 2 / (1 - second) - 1
        length = longest - 2 * step * second**step / (1 - second**step)
        if length > 5:
            square = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            size = np.sqrt(x.after["exp_avg_sq"]) + x.hypers["eps"]
            change = change * np.sqrt(square) * np.sqrt(1 - second**step) / size
        return np.asarray(self._kept(x) - x.hypers["lr"] * change)


class _Muon(_Scaled):
    """What Muon keeps; what it makes of that is bfloat16 inside, and no formula's."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        if slot != "momentum_buffer":
            return None
        return self._average(x, slot, x.hypers["momentum"], x.gradient)

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        return None


class _Family(Protocol):
    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None: ...

    def param(self, x: UpdateInputs) -> np.ndarray | None: ...


_FAMILIES: dict[str, tuple[_Family, frozenset[str]]] = {
    "Adam": (_Adam(decoupled=False), frozenset({"lr", "betas.0", "betas.1", "eps"})),
    "AdamW": (_Adam(decoupled=True), frozenset({"lr", "betas.0", "betas.1", "eps"})),
    "SGD": (_Sgd(), frozenset({"lr"})),
    "RMSprop": (_RmsProp(), frozenset({"lr", "alpha", "eps"})),
    "Adagrad": (_Adagrad(), frozenset({"lr", "eps"})),
    "Adadelta": (_Adadelta(), frozenset({"lr", "rho", "eps"})),
    "Adamax": (_Adamax(), frozenset({"lr", "betas.0", "betas.1", "eps"})),
    "Muon": (_Muon(), frozenset({"lr", "momentum", "ns_coefficients.0"})),
    "NAdam": (_NAdam(), frozenset({"lr", "betas.0", "betas.1", "eps", "momentum_decay"})),
    "RAdam": (_RAdam(), frozenset({"lr", "betas.0", "betas.1", "eps"})),
}
"""Formulas by the name of the optimizer's class, with the hyperparameters that they read."""


def _family(inputs: UpdateInputs) -> _Family | None:
    family, needs = _FAMILIES.get(inputs.optimizer, (None, frozenset()))
    return family if needs <= inputs.hypers.keys() else None
