"""What values parameters get: by role and global shape only, so that every layout agrees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch

from tensortrace.tracer.start.generator import key_of, uniform

Role = Literal["matrix", "scale", "bias", "mean"]
"""``matrix``: two dimensions or more. ``scale``: around one. ``bias`` and ``mean`` (running): never zero."""

RUNNING: dict[str, Role] = {"running_mean": "mean", "running_var": "scale"}
"""The buffers that are state; any other (a mask, frequencies) is a constant that the program computes."""


LONGEST_KERNEL = 16
"""The longest one-dimensional kernel that is not taken for a matrix of a stack."""

TALL = 3
"""How many times as many rows as columns make a matrix tall."""


LIFT = 2.0
"""How far the halves of a row are lifted and lowered, times √columns: sums don't grow with the width."""


class Recipe(NamedTuple):
    """How one tensor is filled. ``fan_in`` is 1 where it isn't a matrix."""

    role: Role
    global_shape: tuple[int, ...]
    fan_in: int = 1


def recipe(own_name: str, global_shape: tuple[int, ...]) -> Recipe:
    """Return how a tensor is filled: of a vector only its own name tells a bias from a scale."""
    if own_name in RUNNING:
        return Recipe(RUNNING[own_name], global_shape)
    if len(global_shape) >= 2:
        return Recipe("matrix", global_shape, _fan_in(global_shape))
    is_bias = "bias" in own_name or own_name == "beta"
    return Recipe("bias" if is_bias else "scale", global_shape)


def _fan_in(shape: tuple[int, ...]) -> int:
    """Return how many terms an output sums; of a stack of matrices, the longer of their sides.

    Three dimensions are a stack unless the last is as short as a convolution's kernel.
    """
    if len(shape) == 3 and shape[-1] > LONGEST_KERNEL:
        return max(shape[-2:])
    return max(math.prod(shape[1:]), 1)


def draw(
    seed: int, name: str, how: Recipe, indices: Iterator[torch.Tensor], *, adversarial: bool
) -> Iterator[torch.Tensor]:
    """Yield the values (float32) at flat global indices (int64), piece by piece."""
    key = key_of(seed, "init", name)
    for index in indices:
        signed = uniform(key, index) * 2 - 1
        drawn = _adversarial(key, how, index, signed) if adversarial else _plain(how, signed)
        yield drawn.to(torch.float32)


def _plain(how: Recipe, signed: torch.Tensor) -> torch.Tensor:
    if how.role == "matrix":
        return signed * math.sqrt(3 / how.fan_in)
    if how.role == "scale":
        return 1 + signed / 4
    return (signed + torch.where(signed < 0, -1.0, 1.0)) / 16


def _adversarial(key: int, how: Recipe, index: torch.Tensor, signed: torch.Tensor) -> torch.Tensor:
    """Return values that make mistakes of meaning large.

    The first half of a row of a matrix is lifted and the second lowered, so that partial sums over a shard
    of the columns are large and cancel only when all are added; not so far that what comes from tables
    lifted alike saturates a softmax, whose gradients would be round-off. Rows grow from one half to one and
    a half, so that no two heads or blocks are alike; of tall matrices, as vocabularies are, the last eighth
    is four times as large, so that maxima lie on the last shard. What other modules there are must not
    matter: a pipeline stage doesn't know them. Biases are positive, so that one added twice is seen, but
    small beside activations: what all positions share is what the backward of a softmax cancels.
    """
    if how.role == "scale":
        return 1 + signed / 2
    if how.role != "matrix":
        return 0.25 + signed / 8
    rows, columns = how.global_shape[0], max(math.prod(how.global_shape[1:]), 1)
    row, column = index // columns, index % columns
    grow = 0.5 + (row.to(torch.float64) + 0.5) / rows
    if rows >= TALL * columns:
        grow = torch.where(row >= rows - -(-rows // 8), 4.0, grow)
    half = torch.where(column < columns // 2, 1.0, -1.0).to(torch.float64)
    turn = torch.where(uniform(key_of(key, "row"), row) < 0.5, -1.0, 1.0).to(torch.float64)
    lift = min(1.0, LIFT / math.sqrt(columns)) * half * turn
    return math.sqrt(3 / how.fan_in) * grow * (signed + lift) / 2
