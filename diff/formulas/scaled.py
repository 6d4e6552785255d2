"""Optimizers that divide the gradient by a running size of it: RMSprop, Adagrad, Adadelta."""

from __future__ import annotations

import numpy as np

from tensortrace.diff.formulas.inputs import Scaled, UpdateInputs, number


class RmsProp(Scaled):
    """The gradient over its running root mean square (Tieleman & Hinton 2012; centered: Graves 2013)."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return a running average, the momentum, or the count."""
        gradient = self.gradient(x)
        if slot == "square_avg":
            return self.average(x, slot, x.hypers["alpha"], gradient**2)
        if slot == "grad_avg":
            return self.average(x, slot, x.hypers["alpha"], gradient)
        if slot == "momentum_buffer":
            size = self._size(x)
            return None if size is None else x.hypers["momentum"] * self.before(x, slot) + gradient / size
        return self.count(x) if slot == "step" else None

    def _size(self, x: UpdateInputs) -> np.ndarray | None:
        if "square_avg" not in x.after or (x.hypers.get("centered") and "grad_avg" not in x.after):
            return None
        square = x.after["square_avg"]
        if x.hypers.get("centered"):
            square = square - x.after["grad_avg"] ** 2
        with np.errstate(invalid="ignore"):
            return np.asarray(np.sqrt(square) + x.hypers["eps"])

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step by the scaled gradient, or by its momentum."""
        if x.hypers.get("momentum"):
            buffer = x.after.get("momentum_buffer")
            return None if buffer is None else x.param - x.hypers["lr"] * buffer
        size = self._size(x)
        return None if size is None else x.param - x.hypers["lr"] * self.gradient(x) / size

    def amplified(self, x: UpdateInputs) -> np.ndarray:
        """Return how much greater than its result the terms of a variance are."""
        if not x.hypers.get("centered") or not {"square_avg", "grad_avg"} <= set(x.after):
            return np.ones(())
        square = x.after["square_avg"]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(1 + square / np.abs(square - x.after["grad_avg"] ** 2))


class Adagrad(Scaled):
    """The gradient over the root of the sum of its squares (Duchi et al. 2011)."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return the sum of squares or the count."""
        if slot == "sum":
            start = np.full_like(x.gradient, x.hypers.get("initial_accumulator_value", 0.0))
            return np.asarray(x.before.get(slot, start) + self.gradient(x) ** 2)
        return self.count(x) if slot == "step" else None

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step by the scaled gradient."""
        if not {"sum", "step"} <= set(x.after):
            return None
        rate = x.hypers["lr"] / (1 + (number(x.after["step"]) - 1) * x.hypers.get("lr_decay", 0.0))
        return np.asarray(x.param - rate * self.gradient(x) / (np.sqrt(x.after["sum"]) + x.hypers["eps"]))


class Adadelta(Scaled):
    """The gradient by the ratio of two running sizes (Zeiler 2012)."""

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return a running average or the count."""
        keep = x.hypers["rho"]
        if slot == "square_avg":
            return self.average(x, slot, keep, self.gradient(x) ** 2)
        if slot == "acc_delta":
            change = self._change(x)
            return None if change is None else self.average(x, slot, keep, change**2)
        return self.count(x) if slot == "step" else None

    def _change(self, x: UpdateInputs) -> np.ndarray | None:
        if "square_avg" not in x.after:
            return None
        eps = x.hypers["eps"]
        ratio = np.sqrt((self.before(x, "acc_delta") + eps) / (x.after["square_avg"] + eps))
        return np.asarray(ratio * self.gradient(x))

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step of the size of earlier ones."""
        change = self._change(x)
        return None if change is None else x.param - x.hypers["lr"] * change
