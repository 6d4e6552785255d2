"""Knows which operation of a region left what in a tensor's memory, without keeping the tensor alive."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tensortrace.tracer.placements import local_part

Geometry = tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]


class Origin(NamedTuple):
    """A tensor as an operation left or was given it: the event that recorded it, and its place in texts.

    ``slot`` is where it was recorded. ``reference`` is how arguments refer to it. ``cut`` says that autograd
    ends here, as at ``detach``. What is ``external`` was not computed in the call.
    """

    event: int | None
    slot: str
    reference: str
    cut: bool
    external: bool
    geometry: Geometry
    address: int


class Origins:
    """Maps storages to what was written into them, in order.

    A weak reference to a storage keeps its number from being used again, so that one tensor's memory is
    never taken for another's.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, list[Origin]]] = {}

    def add(
        self,
        tensor: torch.Tensor,
        event: int | None,
        slot: str,
        reference: str,
        *,
        cut: bool = False,
        external: bool = False,
        anew: bool = False,
    ) -> None:
        """Note what a tensor holds now; ``anew`` says that what other views knew of the memory is stale."""
        local = local_part(tensor)
        storage = _storage(local)
        if storage is None:
            return
        key = storage._cdata
        held = self._known.get(key)
        if held is None:
            held = self._known[key] = (StorageWeakRef(storage), [])  # type: ignore[no-untyped-call]
        if anew:
            held[1].clear()
        held[1].append(Origin(event, slot, reference, cut, external, geometry(local), local._cdata))

    def find(self, tensor: torch.Tensor) -> Origin | None:
        """Return what left just this view of a memory; None for what was not seen before.

        Views of one geometry share everything but their place in autograd's graph: what needs a gradient
        is not what ``detach`` returned.
        """
        local = local_part(tensor)
        storage = _storage(local)
        held = None if storage is None else self._known.get(storage._cdata)
        if held is None:
            return None
        alike = [origin for origin in held[1] if origin.geometry == geometry(local)]
        if not alike:
            return None
        if tensor.requires_grad:
            alike = [origin for origin in alike if not origin.cut] or alike
        same = [origin for origin in alike if origin.address == local._cdata]
        return (same or alike)[-1]

    def around(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the events that left anything in a tensor's memory, in whatever view."""
        storage = _storage(local_part(tensor))
        held = None if storage is None else self._known.get(storage._cdata)
        return tuple(o.event for o in held[1] if o.event is not None) if held else ()

    def forget(self, tensor: torch.Tensor) -> None:
        """Note that something unseen writes to a tensor's memory."""
        storage = _storage(local_part(tensor))
        if storage is not None:
            self._known.pop(storage._cdata, None)

    def clear(self) -> None:
        """Let go of everything."""
        self._known.clear()


def geometry(local: torch.Tensor) -> Geometry:
    """Return how a tensor lies in its memory."""
    return int(local.storage_offset()), tuple(local.shape), tuple(local.stride()), local.dtype


def _storage(local: torch.Tensor) -> torch.UntypedStorage | None:
    if (
        local.layout != torch.strided
        or local.is_meta
        or type(local) not in (torch.Tensor, torch.nn.Parameter)
    ):
        return None
    return local.untyped_storage()
