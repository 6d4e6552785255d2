"""Pools: the greatest element or the mean of each window."""

from __future__ import annotations

import math

import numpy as np
import torch

from tensortrace.replay.modules.formulas.windows import windows
from tensortrace.replay.modules.given import Form, Given, NoFormula


def _padded_with(x: torch.Tensor, padding: tuple[int, ...], value: float) -> torch.Tensor:
    for dim, more in enumerate(padding, start=x.dim() - len(padding)):
        if more:
            shape = [*x.shape]
            shape[dim] = more
            edge = torch.full(shape, value, dtype=x.dtype)
            x = torch.cat([edge, x, edge], dim)
    return x


def _shaped(given: Given, dims: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return kernel, stride and padding."""
    settings = given.settings
    if settings.flag("ceil_mode"):
        raise NoFormula("its last windows may reach beyond the end")
    kernel = settings.each("kernel_size", dims)
    stride = kernel if settings.get("stride") is None else settings.each("stride", dims)
    return kernel, stride, settings.each("padding", dims)


def _greatest(given: Given, dims: int) -> torch.Tensor:
    """Return the greatest of each window; the first of equal ones gets the gradient."""
    if given.settings.flag("return_indices"):
        raise NoFormula("it returns indices, too")
    kernel, stride, padding = _shaped(given, dims)
    x = _padded_with(given.x, padding, -math.inf)
    found = windows(x, kernel, stride, given.settings.each("dilation", dims)).flatten(-dims)
    first = torch.from_numpy(np.asarray(np.argmax(found.detach().numpy(), axis=-1)))
    return found.gather(-1, first[..., None])[..., 0]


def _mean(given: Given, dims: int) -> torch.Tensor:
    kernel, stride, padding = _shaped(given, dims)
    one = (1,) * dims
    total = windows(_padded_with(given.x, padding, 0.0), kernel, stride, one).flatten(-dims).sum(-1)
    divisor = given.settings.get("divisor_override") if "divisor_override" in given.settings else None
    if isinstance(divisor, int) and divisor:
        return total / divisor
    if given.settings.flag("count_include_pad"):
        return total / math.prod(kernel)
    there = _padded_with(torch.ones(given.x.shape[-dims:], dtype=torch.float64), padding, 0.0)
    return total / windows(there, kernel, stride, one).flatten(-dims).sum(-1)


def _adaptive(given: Given, dims: int) -> torch.Tensor:
    """Return the means of so many stretches, each from floor(i n / m) to ceil((i + 1) n / m)."""
    x = given.x
    for dim, size in enumerate(given.settings.each("output_size", dims), start=x.dim() - dims):
        n = x.shape[dim]
        spans = [(i * n // size, -((-(i + 1) * n) // size)) for i in range(size)]
        x = torch.stack([x.narrow(dim, a, b - a).mean(dim) for a, b in spans], dim)
    return x


def _window(given: Given) -> int:
    kernel = given.settings.get("kernel_size")
    return math.prod(kernel) if isinstance(kernel, tuple) else int(kernel or 1) ** max(given.x.dim() - 2, 1)


def _stretch(given: Given) -> int:
    return max(given.x.numel() // max(math.prod(given.shape), 1), 1)


POOLING = {
    **{
        f"MaxPool{n}d": Form(lambda g, n=n: _greatest(g, n), stores=1, kinked=True)  # type: ignore[misc]
        for n in (1, 2, 3)
    },
    **{
        f"AvgPool{n}d": Form(lambda g, n=n: _mean(g, n), _window, _window)  # type: ignore[misc]
        for n in (1, 2, 3)
    },
    **{
        f"AdaptiveAvgPool{n}d": Form(lambda g, n=n: _adaptive(g, n), _stretch, _stretch)  # type: ignore[misc]
        for n in (1, 2, 3)
    },
}
