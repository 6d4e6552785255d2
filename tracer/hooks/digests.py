"""Tells whether a tensor's bytes changed since they were last recorded, without keeping a copy."""

from __future__ import annotations

import weakref

import numpy as np
import torch
import xxhash

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.placements import split

Digest = tuple[int, ...]

COLUMNS = 64


class Digests:
    """The digest of each parameter or buffer when it was last recorded.

    Versions don't tell: writes through ``.data``, fused kernels and batch norm leave them as they were.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Digest]] = {}

    def changed(self, tensor: torch.Tensor) -> bool:
        """Tell whether the tensor differs from what was noted last, or was never noted; note it now."""
        digest = _digest(tensor)
        known = self._known.get(id(tensor))
        self._known[id(tensor)] = (weakref.ref(tensor), digest)
        return known is None or known[0]() is not tensor or known[1] != digest

    def note(self, tensor: torch.Tensor) -> None:
        """Take the tensor as recorded with its present bytes."""
        self.changed(tensor)


def _digest(tensor: torch.Tensor) -> Digest:
    with unobserved():
        plain = split(tensor)[0].detach()
        if plain.layout is not torch.strided or type(plain) not in (torch.Tensor, torch.nn.Parameter):
            return (-1,)
        if plain.device.type == "cpu":
            return _digest_of_bytes(plain)
        return _digest_on_device(plain)


def _digest_of_bytes(tensor: torch.Tensor) -> Digest:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return (*tensor.shape, xxhash.xxh3_64_intdigest(np.ascontiguousarray(flat).data))


def _digest_on_device(tensor: torch.Tensor) -> Digest:
    """Add up the words on the device, in 64 columns modulo 2^32: a few numbers to wait for.

    The sums are made in the words' own type, since another would take memory for a converted copy.
    """
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // (4 * COLUMNS) * 4 * COLUMNS
    words = flat[:whole].view(torch.int32).reshape(-1, COLUMNS)
    sums = words.sum(dim=0, dtype=torch.int32)
    return (*tensor.shape, *sums.tolist(), *flat[whole:].tolist())
