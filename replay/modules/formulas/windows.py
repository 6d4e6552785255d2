"""Sliding windows over the last dimensions of a tensor, padded as convolutions and pools pad."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensortrace.replay.modules.given import NoFormula


def padded(x: torch.Tensor, before: Sequence[int], after: Sequence[int], mode: str) -> torch.Tensor:
    """Return a tensor with so many elements more at either end of its last dimensions."""
    for dim, (left, right) in enumerate(zip(before, after, strict=True), start=x.dim() - len(before)):
        if not left and not right:
            continue
        size = x.shape[dim]
        index = torch.arange(-left, size + right)
        if mode == "zeros":
            inside = (index >= 0) & (index < size)
            x = x.index_select(dim, index.clamp(0, max(size - 1, 0)))
            x = x * inside.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1 - dim))
        elif mode == "circular":
            x = x.index_select(dim, index % size)
        elif mode == "replicate":
            x = x.index_select(dim, index.clamp(0, size - 1))
        elif mode == "reflect":
            index = index.abs()
            x = x.index_select(dim, torch.where(index >= size, 2 * (size - 1) - index, index))
        else:
            raise NoFormula(f"its padding is {mode!r}")
    return x


def windows(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """Return a view of all windows: the last dimensions are counted, and as many follow inside each."""
    first = x.dim() - len(kernel)
    for dim, (size, step, apart) in enumerate(zip(kernel, stride, dilation, strict=True), start=first):
        x = x.unfold(dim, (size - 1) * apart + 1, step)[..., ::apart]
    return x
