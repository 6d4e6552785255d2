"""What an optimizer's formula makes of recorded inputs, in float64, so that inherited error is told from own.

The formulas are those of the papers that ``diff/formulas`` names. Where torch documents another form, it is
torch's.
"""

from __future__ import annotations

import numpy as np

from tensortrace.diff.formulas.adam import Adam, Adamax, Lion, NAdam, RAdam
from tensortrace.diff.formulas.descent import Asgd, Muon, Rprop, Sgd
from tensortrace.diff.formulas.factored import Adafactor
from tensortrace.diff.formulas.inputs import Family, Hypers, UpdateInputs
from tensortrace.diff.formulas.scaled import Adadelta, Adagrad, RmsProp

__all__ = [
    "Hypers", "UpdateInputs", "amplification", "has_formula", "is_factored", "predict_param", "predict_state",
]  # fmt: skip

_OF_ADAM = frozenset({"lr", "betas.0", "betas.1", "eps"})

_FAMILIES: dict[str, tuple[Family, frozenset[str]]] = {
    "Adam": (Adam(decoupled=False), _OF_ADAM),
    "AdamW": (Adam(decoupled=True), _OF_ADAM),
    "SGD": (Sgd(), frozenset({"lr"})),
    "RMSprop": (RmsProp(), frozenset({"lr", "alpha", "eps"})),
    "Adagrad": (Adagrad(), frozenset({"lr", "eps"})),
    "Adadelta": (Adadelta(), frozenset({"lr", "rho", "eps"})),
    "Adamax": (Adamax(), _OF_ADAM),
    "Muon": (Muon(), frozenset({"lr", "momentum", "ns_coefficients.0"})),
    "NAdam": (NAdam(), _OF_ADAM | {"momentum_decay"}),
    "RAdam": (RAdam(), _OF_ADAM),
    "ASGD": (Asgd(), frozenset({"lr", "lambd", "alpha", "t0"})),
    "Rprop": (Rprop(), frozenset({"lr", "etas.0", "etas.1", "step_sizes.0", "step_sizes.1"})),
    "Adafactor": (Adafactor(), frozenset({"lr", "beta2_decay", "eps.1", "d"})),
    "Lion": (Lion(), frozenset({"lr", "betas.0", "betas.1"})),
}
"""Formulas by the name of the optimizer's class, with the hyperparameters that they read."""


def has_formula(optimizer: str) -> bool:
    """Tell whether the formula of this class of optimizers is known."""
    return optimizer in _FAMILIES


def is_factored(optimizer: str) -> bool:
    """Tell whether an optimizer keeps sums over rows and columns: its formula needs whole tensors."""
    return optimizer == "Adafactor"


def predict_state(inputs: UpdateInputs, slot: str) -> np.ndarray | None:
    """Return what one state tensor should become; None where this optimizer's formula is not known."""
    family = _family(inputs)
    return family.state(inputs, slot) if family else None


def predict_param(inputs: UpdateInputs) -> np.ndarray | None:
    """Return what the parameter should become, from the recorded state *after* the update."""
    family = _family(inputs)
    return family.param(inputs) if family else None


def amplification(inputs: UpdateInputs) -> np.ndarray:
    """Return by how much an update's own round-off is greater than that of the terms it sums, 1 where not."""
    family = _family(inputs)
    return family.amplified(inputs) if family else np.ones(())


def _family(inputs: UpdateInputs) -> Family | None:
    family, needs = _FAMILIES.get(inputs.optimizer, (None, frozenset()))
    return family if needs <= inputs.hypers.keys() else None
