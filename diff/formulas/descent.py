"""Optimizers that descend along the gradient, its momentum or its sign: SGD, ASGD, Rprop, Muon."""

from __future__ import annotations

import numpy as np

from tensortrace.diff.formulas.inputs import Scaled, UpdateInputs, number

_SMALLEST = 2.0**-150
"""Half of the smallest number of float32 and bfloat16: a product below it is zero there."""


class Sgd(Scaled):
    """Gradient descent with momentum as in Sutskever et al. 2013, in the form that torch documents."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return the momentum; the first gradient is all of it, without dampening."""
        if slot != "momentum_buffer":
            return None
        gradient = self.gradient(x)
        if slot not in x.before:
            return gradient
        return x.hypers["momentum"] * x.before[slot] + (1 - x.hypers.get("dampening", 0.0)) * gradient

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step by the gradient, by the momentum, or by both."""
        gradient, momentum = self.gradient(x), x.hypers.get("momentum", 0.0)
        if momentum:
            if "momentum_buffer" not in x.after:
                return None
            buffer = x.after["momentum_buffer"]
            gradient = gradient + momentum * buffer if x.hypers.get("nesterov") else buffer
        return x.param - x.hypers["lr"] * gradient


class Asgd(Scaled):
    """Averaged gradient descent (Polyak & Juditsky 1992, with the schedules of Bottou 2010)."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return the rate and the weight of the next update, the average, or the count."""
        step, rate = number(self.count(x)), x.hypers["lr"]
        if slot == "eta":
            return np.asarray(rate / (1 + x.hypers["lambd"] * rate * step) ** x.hypers["alpha"])
        if slot == "mu":
            return np.asarray(1 / max(1.0, step - x.hypers["t0"]))
        if slot == "ax":
            weight = number(x.before.get("mu", np.ones(())))
            return np.asarray((1 - weight) * self.before(x, slot) + weight * self.param(x))
        return self.count(x) if slot == "step" else None

    def param(self, x: UpdateInputs) -> np.ndarray:
        """Return the parameter after a step at the rate that the update before left."""
        eta = number(x.before.get("eta", np.full((), x.hypers["lr"])))
        return np.asarray(x.param * (1 - x.hypers["lambd"] * eta) - eta * self.gradient(x))


class Rprop(Scaled):
    """Resilient backpropagation (Riedmiller & Braun 1993), without going back (Igel & Husken 2000)."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return each element's step, the gradient that is remembered, or the count."""
        if slot == "step_size":
            return self._sizes(x)
        if slot == "prev":
            return np.where(self._turned(x), 0.0, self.gradient(x))
        return self.count(x) if slot == "step" else None

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step against the sign of each gradient that has not turned."""
        if "step_size" not in x.after:
            return None
        return np.asarray(
            x.param - np.sign(np.where(self._turned(x), 0.0, self.gradient(x))) * x.after["step_size"]
        )

    def _agreement(self, x: UpdateInputs) -> np.ndarray:
        product = self.gradient(x) * self.before(x, "prev")
        return np.where(np.abs(product) < _SMALLEST, 0.0, product)

    def _turned(self, x: UpdateInputs) -> np.ndarray:
        return self._agreement(x) < 0

    def _sizes(self, x: UpdateInputs) -> np.ndarray:
        agreement, start = self._agreement(x), np.full_like(x.gradient, x.hypers["lr"])
        factor = np.where(agreement < 0, x.hypers["etas.0"], np.where(agreement > 0, x.hypers["etas.1"], 1.0))
        sizes = x.before.get("step_size", start) * factor
        return np.asarray(np.clip(sizes, x.hypers["step_sizes.0"], x.hypers["step_sizes.1"]))


class Muon(Scaled):
    """What Muon keeps; what it makes of that is bfloat16 inside, and no formula's."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return the momentum, an average (Jordan et al. 2024)."""
        if slot != "momentum_buffer":
            return None
        return self.average(x, slot, x.hypers["momentum"], x.gradient)

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return None: what the iteration makes of the momentum in bfloat16 follows no formula."""
        return None
