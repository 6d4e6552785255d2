"""Which samples a forward computes on: a 64-bit number for each row of the root module's input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from tensortrace.tracer.start.generator import mix_all

Given = Sequence[tuple[str, torch.Tensor]]
"""(slot, tensor) of what the root module was given, in order."""


class Rows(NamedTuple):
    """The rows of one forward: int64 of shape [rows]; ``positions`` is None where the input has none."""

    numbers: torch.Tensor
    positions: int | None


def identify(given: Given, padding: int | None = None) -> Rows | None:
    """Return the rows of a forward by their content, or None where it was given no rows.

    The first integer matrix is taken for token ids, else the first tensor with dimensions. Of token ids,
    positions that a mask of the same shape leaves out don't count, or where there is no mask trailing
    ``padding``, so that a row is the same whatever it is padded to.
    """
    tokens = next((t for _, t in given if t.dim() == 2 and _is_integer(t)), None)
    if tokens is not None:
        return Rows(_fold(tokens.to(torch.int64), _valid(tokens, given, padding)), tokens.shape[1])
    first = next((t for _, t in given if t.dim() >= 1 and t.shape[0]), None)
    if first is None:
        return None
    bits = _bits(first.detach()).reshape(first.shape[0], -1)
    return Rows(_fold(bits, None), first.shape[1] if first.dim() >= 3 else None)


def padding_of(modules: Sequence[nn.Module]) -> int | None:
    """Return the token that embeddings declare as padding, if any does."""
    found = (m.padding_idx for m in modules if isinstance(m, nn.Embedding) and m.padding_idx is not None)
    return next(found, None)


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def _valid(tokens: torch.Tensor, given: Given, padding: int | None) -> torch.Tensor | None:
    for slot, mask in given:
        if "mask" in slot and mask.shape == tokens.shape and not mask.is_floating_point():
            return mask == 0 if "padding_mask" in slot else mask != 0
    if padding is None:
        return None
    real = tokens != padding
    return real.flip(1).cumsum(1).flip(1) > 0


def _fold(values: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return mix(Σ mix(value + mix(position))) over the valid positions of each row."""
    position = mix_all(torch.arange(values.shape[1], device=values.device))
    terms = mix_all(values + position)
    if valid is not None:
        terms = torch.where(valid, terms, 0)
    return mix_all(terms.sum(1))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers; complex numbers as pairs of them."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_floating_point():
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        tensor = tensor.contiguous().view(integer)
    return tensor.to(torch.int64)
