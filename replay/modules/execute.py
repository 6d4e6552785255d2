"""Executes one call's formula in float64, forward and backward, with the magnitudes of what it sums.

How large the terms of a result are is measured: the inputs are changed at random by one part in a million,
each element by itself. What that changes of the result is what round-off of that relative size would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tensortrace.replay.modules.given import Form, Given, NoFormula

CHANGED = 2.0**-20
"""By how much inputs are changed, relative: far above the round-off of float64, far below 1."""

_SEED = 6


@dataclass(frozen=True)
class Made:
    """What a formula gives in the place of a tensor, the norm of the terms, how many an element sums."""

    value: np.ndarray
    terms: float
    length: int


def execute(
    form: Form,
    given: Given,
    gradient: torch.Tensor | None,
    inputs: Mapping[str, str],
    own: Sequence[str],
) -> dict[str, Made]:
    """Return ``out``, and where a gradient comes back those of ``in.…`` and of own parameters by name.

    ``inputs`` are those that want one, each by the first input that is the same tensor.

    Raises NoFormula where the formula does not fit what was given.
    """
    try:
        plain = _run(form, given, gradient, inputs, own)
        changed = _run(form, *_changed(form, given, gradient), inputs, own)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NoFormula(f"what was recorded does not fit its formula ({line[:80]})") from error
    rows = max(given.x.numel() // max(given.x.shape[-1], 1), 1) if given.x.dim() else 1
    found = {}
    for name, value in plain.items():
        if name == "out":
            length = form.forward(given)
        else:
            length = form.backward(given) if name.startswith("in.") else _summed(value, gradient, rows)
        terms = float(torch.linalg.vector_norm(changed[name] - value)) / CHANGED
        found[name] = Made(value.numpy(), terms if math.isfinite(terms) else 0.0, max(length, 1))
    return found


def _summed(value: torch.Tensor, gradient: torch.Tensor | None, rows: int) -> int:
    """Return how many terms a parameter's gradient sums: all places at which its elements were used."""
    used = gradient.numel() if gradient is not None else rows
    width = value.shape[0] if value.dim() else 1
    return max(used // max(width, 1), 1)


def _run(
    form: Form,
    given: Given,
    gradient: torch.Tensor | None,
    inputs: Mapping[str, str],
    own: Sequence[str],
) -> dict[str, torch.Tensor]:
    leaves: dict[str, torch.Tensor] = {}
    if gradient is not None:
        leaves |= {f"in.{n}": given.inputs[n].detach().requires_grad_() for n in set(inputs.values())}
        leaves |= {name: given.own[name].detach().requires_grad_() for name in own}
    held = replace(
        given,
        inputs={n: leaves.get(f"in.{inputs.get(n, n)}", value) for n, value in given.inputs.items()},
        own={name: leaves.get(name, value) for name, value in given.own.items()},
    )
    with torch.set_grad_enabled(bool(leaves)):
        made = form.run(held)
    found = {"out": made.detach()}
    if leaves and gradient is not None:
        if made.shape != gradient.shape:
            raise NoFormula(f"it returned {list(gradient.shape)}, its formula gives {list(made.shape)}")
        back = torch.autograd.grad(made, list(leaves.values()), gradient, allow_unused=True)
        for (name, leaf), value in zip(leaves.items(), back, strict=True):
            found[name] = torch.zeros_like(leaf) if value is None else value
    return found


def _changed(form: Form, given: Given, gradient: torch.Tensor | None) -> tuple[Given, torch.Tensor | None]:
    """Return the call with all its numbers changed a little at random."""
    signs = torch.Generator().manual_seed(_SEED)

    def change(value: torch.Tensor) -> torch.Tensor:
        if not value.is_floating_point():
            return value
        sign = torch.randint(0, 2, value.shape, generator=signs, dtype=torch.int8).to(torch.float64)
        return value * (1 + CHANGED * (2 * sign - 1))

    still = form.kinked and gradient is not None  # an edge that is crossed is no round-off
    inputs = {name: value if still else change(value) for name, value in given.inputs.items()}
    own = {name: change(value) for name, value in given.own.items()}
    return replace(given, inputs=inputs, own=own), None if gradient is None else change(gradient)
