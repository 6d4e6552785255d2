"""Adafactor (Shazeer & Stern 2018): second moments as an outer product of what rows and columns sum to."""

from __future__ import annotations

import numpy as np

from tensortrace.diff.compare import EPS
from tensortrace.diff.formulas.inputs import Scaled, UpdateInputs, number


class Adafactor(Scaled):
    """Steps relative to the parameter's size, cut off where they are too long; needs whole tensors."""

    def gradient(self, x: UpdateInputs) -> np.ndarray:
        """Return the gradient that is descended: decay is taken off the parameter."""
        return -x.gradient if x.hypers.get("maximize") else x.gradient

    def state(self, x: UpdateInputs, slot: str) -> np.ndarray | None:
        """Return the averages over rows or columns, that of a vector, or the count."""
        square = self.gradient(x) ** 2
        values = {"variance": square}
        if square.ndim > 1:
            values["row_var"] = square.mean(axis=-1, keepdims=True)
            values["col_var"] = square.mean(axis=-2, keepdims=True)
        if slot not in values:
            return self.count(x) if slot == "step" else None
        new = number(self.count(x)) ** x.hypers["beta2_decay"]
        before = x.before.get(slot, np.zeros_like(values[slot]))
        return np.asarray((1 - new) * before + new * values[slot])

    def param(self, x: UpdateInputs) -> np.ndarray | None:
        """Return the parameter after a step."""
        variance = self._variance(x)
        if variance is None or "step" not in x.after:
            return None
        rate, step = x.hypers["lr"], number(x.after["step"])
        size = max(x.hypers["eps.1"], _root_mean_square(x.param))
        change = self.gradient(x) / np.sqrt(np.maximum(variance, self._least(x) ** 2))
        length = max(1.0, _root_mean_square(change) / x.hypers["d"])
        kept = x.param * (1 - rate * x.hypers.get("weight_decay", 0.0))
        return np.asarray(kept - size * min(rate, step**-0.5) / length * change)

    def _variance(self, x: UpdateInputs) -> np.ndarray | None:
        if x.param.ndim < 2:
            return x.after.get("variance")
        if not {"row_var", "col_var"} <= set(x.after):
            return None
        rows, columns = x.after["row_var"], x.after["col_var"]
        return np.asarray(rows * columns / np.maximum(rows.mean(axis=-2, keepdims=True), self._least(x)))

    def _least(self, x: UpdateInputs) -> float:
        """Return the first eps; where none is given it is the spacing of the parameter's dtype."""
        return x.hypers.get("eps.0", EPS.get(x.dtype, EPS["float32"]))


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0
