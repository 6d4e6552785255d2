"""Convolutions: a window times the kernel; and transposed ones, which are their gradients."""

from __future__ import annotations

import math

import torch

from tensortrace.replay.modules.formulas.windows import padded, windows
from tensortrace.replay.modules.given import Form, Given, NoFormula


def _product(
    x: torch.Tensor, weight: torch.Tensor, stride: tuple[int, ...], dilation: tuple[int, ...], groups: int
) -> torch.Tensor:
    """Return the convolution of x (N, C, ...) with a kernel (O, C / groups, ...); without padding."""
    dims = weight.dim() - 2
    found = windows(x, weight.shape[2:], stride, dilation)
    batch, channels = x.shape[:2]
    out = found.shape[2 : 2 + dims]
    found = found.reshape(batch, groups, channels // groups, *found.shape[2:])
    kernel = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    inside, places = "uvw"[:dims], "xyz"[:dims]
    made = torch.einsum(f"bgc{places}{inside},goc{inside}->bgo{places}", found, kernel)
    return made.reshape(batch, weight.shape[0], *out)


def _biased(made: torch.Tensor, given: Given, dims: int) -> torch.Tensor:
    bias = given.maybe("bias")
    return made if bias is None else made + bias.reshape(-1, *[1] * dims)


def _convolution(given: Given) -> torch.Tensor:
    weight, settings = given.parameter("weight"), given.settings
    dims = weight.dim() - 2
    stride, dilation = settings.each("stride", dims), settings.each("dilation", dims)
    kernel, padding = tuple(weight.shape[2:]), settings.get("padding")
    mode, groups = settings.get("padding_mode"), settings.whole("groups")
    if padding == "valid":
        before = after = (0,) * dims
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before = tuple(t // 2 for t in total)
        after = tuple(t - b for t, b in zip(total, before, strict=True))
    else:
        before = after = settings.each("padding", dims)
    x = given.x if given.x.dim() == dims + 2 else given.x[None]
    made = _biased(
        _product(padded(x, before, after, str(mode)), weight, stride, dilation, groups), given, dims
    )
    return made if given.x.dim() == dims + 2 else made[0]


def _transposed(given: Given) -> torch.Tensor:
    weight, settings = given.parameter("weight"), given.settings
    dims = weight.dim() - 2
    if settings.get("padding_mode") != "zeros":
        raise NoFormula(f"its padding is {settings.get('padding_mode')!r}")
    stride, dilation = settings.each("stride", dims), settings.each("dilation", dims)
    padding, groups = settings.each("padding", dims), settings.whole("groups")
    x = given.x if given.x.dim() == dims + 2 else given.x[None]
    for dim, step in enumerate(stride, start=2):  # zeros between the elements
        spread = [*x.shape]
        spread[dim] = (x.shape[dim] - 1) * step + 1
        at = torch.arange(x.shape[dim]) * step
        x = torch.zeros(spread, dtype=x.dtype).index_copy(dim, at, x)
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    before = [r - p for r, p in zip(reach, padding, strict=True)]
    wanted = given.shape[-dims:]
    after = [
        size - 1 + r - (b + n) + 1 for size, r, b, n in zip(wanted, reach, before, x.shape[2:], strict=True)
    ]  # as large as what came out, which may have been asked for at the call
    if min(before) < 0:
        cut = [max(-b, 0) for b in before]
        for dim, less in enumerate(cut, start=2):
            x = x.narrow(dim, less, x.shape[dim] - less)
        before = [max(b, 0) for b in before]
    if min(after) < 0:
        for dim, more in enumerate(after, start=2):
            x = x.narrow(dim, 0, x.shape[dim] + min(more, 0))
        after = [max(a, 0) for a in after]
    per_group = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    kernel = per_group.transpose(1, 2).flatten(0, 1).flip(tuple(range(2, 2 + dims)))
    one = (1,) * dims
    made = _biased(_product(padded(x, before, after, "zeros"), kernel, one, dilation, groups), given, dims)
    return made if given.x.dim() == dims + 2 else made[0]


def _window(given: Given) -> int:
    return math.prod(given.parameter("weight").shape[1:])


def _other(given: Given) -> int:
    weight = given.parameter("weight")
    return weight.shape[0] * math.prod(weight.shape[2:])


CONVOLUTIONS = {
    **{f"Conv{n}d": Form(_convolution, _window, _other) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": Form(_transposed, _other, _window) for n in (1, 2, 3)},
}
