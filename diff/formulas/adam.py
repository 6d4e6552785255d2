"""Adam and its kin: Kingma & Ba 2015, Reddi 2018, Loshchilov 2019, Dozat 2016, Liu 2020, Chen 2023."""

from __future__ import annotations

import numpy as np

from tensortrace.diff.formulas.inputs import Scaled, UpdateInputs, number

_TIE = 2.0**-16
"""A sign of less than so much of the terms it is the sign of is round-off, and may be either."""


class Adam(Scaled):
    """Adam and AdamW; they differ in where weight decay enters."""

    def __init__(self, *, decoupled: bool) -> None:
        self.decoupled = decoupled

    def _apart(self, x: UpdateInputs) -> bool:
        return self.decoupled or bool(x.hypers.get("decoupled_weight_decay"))

    def gradient(self, x: UpdateInputs) -> np.ndarray:
        """Return the gradient that is descended, with a decay that is added to it."""
        gradient = -x.gradient if x.hypers.get("maximize") else x.gradient
        decay = 0.0 if self._apart(x) else x.hypers.get("weight_decay", 0.0)
        return gradient + decay * x.param if decay else gradient

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return a moment, the greatest second moment so far, or the count."""
        if slot == "max_exp_avg_sq":
            return np.asarray(np.maximum(self.before(x, slot), x.after["exp_avg_sq"]))
        return self.moment(x, slot)

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step by the unbiased moments."""
        if not {"exp_avg", "exp_avg_sq", "step"} <= set(x.after):
            return None
        step, rate = number(x.after["step"]), x.hypers["lr"]
        second = x.after["max_exp_avg_sq"] if x.hypers.get("amsgrad") else x.after["exp_avg_sq"]
        first = x.after["exp_avg"] / (1 - x.hypers["betas.0"] ** step)
        scale = np.sqrt(second / (1 - x.hypers["betas.1"] ** step)) + x.hypers["eps"]
        keep = 1 - rate * x.hypers.get("weight_decay", 0.0) if self._apart(x) else 1.0
        return np.asarray(x.param * keep - rate * first / scale)


class Adamax(Scaled):
    """Adam by the infinity norm (Algorithm 2 of the same paper)."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return the first moment, the greatest gradient, or the count."""
        if slot == "exp_inf":
            kept = x.hypers["betas.1"] * self.before(x, slot)
            return np.asarray(np.maximum(kept, np.abs(self.gradient(x)) + x.hypers["eps"]))
        return self.moment(x, slot)

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step by the unbiased first moment."""
        if not {"exp_avg", "exp_inf", "step"} <= set(x.after):
            return None
        rate = x.hypers["lr"] / (1 - x.hypers["betas.0"] ** number(x.after["step"]))
        return np.asarray(x.param - rate * x.after["exp_avg"] / x.after["exp_inf"])


class NAdam(Scaled):
    """Adam with Nesterov's momentum, whose decay has a schedule of its own."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return a moment, the product of the decays, or the count."""
        if slot == "mu_product":
            return np.asarray(x.before.get(slot, np.ones(())) * self._mu(x, number(self.count(x))))
        return self.moment(x, slot)

    def _mu(self, x: UpdateInputs, step: float) -> float:
        decay = 0.96 ** (step * x.hypers["momentum_decay"])
        return x.hypers["betas.0"] * float(1 - 0.5 * decay)

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step that looks ahead."""
        if not {"exp_avg", "exp_avg_sq", "mu_product", "step"} <= set(x.after):
            return None
        step, rate, product = number(x.after["step"]), x.hypers["lr"], number(x.after["mu_product"])
        size = np.sqrt(x.after["exp_avg_sq"] / (1 - x.hypers["betas.1"] ** step)) + x.hypers["eps"]
        mu, ahead = self._mu(x, step), self._mu(x, step + 1)
        own = (1 - mu) / (1 - product) * self.gradient(x)
        return np.asarray(
            self.kept(x) - rate * (own + ahead / (1 - product * ahead) * x.after["exp_avg"]) / size
        )


class RAdam(Scaled):
    """Adam whose step is scaled by the variance of its second moment only once that is known."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return a moment or the count."""
        return self.moment(x, slot)

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step, rectified where the moving average is long enough."""
        if not {"exp_avg", "exp_avg_sq", "step"} <= set(x.after):
            return None
        step, first, second = number(x.after["step"]), x.hypers["betas.0"], x.hypers["betas.1"]
        change = x.after["exp_avg"] / (1 - first**step)
        longest = 2 / (1 - second) - 1
        length = longest - 2 * step * second**step / (1 - second**step)
        if length > 5:
            square = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            size = np.sqrt(x.after["exp_avg_sq"]) + x.hypers["eps"]
            change = change * np.sqrt(square) * np.sqrt(1 - second**step) / size
        return np.asarray(self.kept(x) - x.hypers["lr"] * change)


class Lion(Scaled):
    """Steps by the sign of a momentum that looks ahead by one more average; decay is decoupled."""

    def gradient(self, x: UpdateInputs) -> np.ndarray:
        """Return the gradient that is descended."""
        return -x.gradient if x.hypers.get("maximize") else x.gradient

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return the momentum; some implementations count their updates too."""
        if slot == "exp_avg":
            return self.average(x, slot, x.hypers["betas.1"], self.gradient(x))
        return self.count(x) if slot == "step" else None

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step of the same size in every element."""
        kept = x.param * (1 - x.hypers["lr"] * x.hypers.get("weight_decay", 0.0))
        return np.asarray(kept - x.hypers["lr"] * np.sign(self._ahead(x)))

    def _ahead(self, x: UpdateInputs) -> np.ndarray:
        return self.average(x, "exp_avg", x.hypers["betas.0"], self.gradient(x))

    def amplified(self, x: UpdateInputs) -> np.ndarray:
        """Return so much that anything goes where the sign is that of round-off."""
        terms = np.abs(self.before(x, "exp_avg")) + np.abs(x.gradient)
        return np.where(np.abs(self._ahead(x)) <= _TIE * terms, 1 / _TIE**2, 1.0)
