"""``--init-from``: gives parameters, buffers and optimizer state the values that another run began with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.notices import say
from tensortrace.tracer.placements.zero import stepping
from tensortrace.tracer.start.fill import owned_by_optimizers
from tensortrace.tracer.start.origin import Origin
from tensortrace.tracer.start.places import Parts, Place, indices
from tensortrace.tracer.start.refusal import rank, refuse, world_size
from tensortrace.tracer.types import Kind


def load(parts: Parts, path: Path) -> None:
    """Set all state from the trace, resharded to where it lies; ends the program where that can't be done."""
    session = parts.session
    session.names.adopt(owned_by_optimizers(session))
    try:
        with torch.no_grad(), unobserved():
            origin = Origin(path)
            states = _set_states(parts, origin)
            tensors = _set_tensors(parts, origin)
    except TraceError as error:
        refuse(f"--init-from {path}: {error}")
    say(
        f"rank {rank()}: --init-from {path} set {tensors} tensors and {states} of optimizer state; "
        "this changes the run"
    )


def _set_tensors(parts: Parts, origin: Origin) -> int:
    """Set parameters and buffers after all of them were found to fit."""
    wanted = list(_wanted(parts, origin))
    _refuse_left_over(origin, {(kind, found) for kind, found, _ in wanted})
    for kind, found, place in wanted:
        whole = origin.whole(kind, found, "model").flatten()
        place.write(whole[index] for index in indices(place.region))
    return len(wanted)


def _wanted(parts: Parts, origin: Origin) -> Iterator[tuple[Kind, str, Place]]:
    for _, tensor, places in parts.owned():
        kind = Kind.PARAM if isinstance(tensor, torch.nn.Parameter) else Kind.BUFFER
        for place in places:
            found = origin.find(kind, (place.name, *parts.names(tensor)))
            if found is None:
                raise TraceError(f"{place.name}: no such {kind.value} there")
            have = origin.shape(kind, found, "model")
            if have != place.global_shape:
                raise TraceError(place.name, found=f"shape {have}", expected=f"shape {place.global_shape}")
            yield kind, found, place


def _refuse_left_over(origin: Origin, used: set[tuple[Kind, str]]) -> None:
    """Refuse what this program has no place for; of several ranks another may hold it (a stage)."""
    left = [
        n for kind in (Kind.PARAM, Kind.BUFFER) for n in sorted(origin.names(kind)) if (kind, n) not in used
    ]
    if left and world_size() == 1:
        raise TraceError(f"{left[0]}: there, but not in this program ({len(left)} such tensors)")
    if left:
        say(f"rank {rank()}: {len(left)} tensors of the trace are not on this rank, such as {left[0]}")


def _set_states(parts: Parts, origin: Origin) -> int:
    count = 0
    for optimizer in map(stepping, parts.session.optimizers):
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
                held, aliases = parts.of(parameter), parts.names(parameter)
                found = [origin.find(Kind.OPTIMIZER_STATE, (place.name, *aliases)) for place in held]
                known = [name for name in found if name is not None]
                if known:
                    _check_class(origin, known[0], optimizer)
                    owner = _Owner(parts, parameter, held, known, on_device=on_device)
                    optimizer.state[parameter] = dict(_state(origin, owner))
                    count += len(optimizer.state[parameter])
    return count


class _Owner(NamedTuple):
    """A parameter whose state is set: its places, and the names in the trace, one for each."""

    parts: Parts
    parameter: torch.Tensor
    held: tuple[Place, ...]
    names: list[str]
    on_device: bool


def _check_class(origin: Origin, name: str, optimizer: Optimizer) -> None:
    for slot in origin.slots(Kind.OPTIMIZER_STATE, name):
        theirs, ours = origin.entry(Kind.OPTIMIZER_STATE, name, slot).meta.optimizer, type(optimizer).__name__
        if theirs not in (None, ours):
            raise TraceError(f"{name}: {slot}", found=f"state of {theirs}", expected=f"state of {ours}")
        if "." in slot:
            raise TraceError(f"{name}: the state {slot!r} of {theirs} can't be set")


def _state(origin: Origin, owner: _Owner) -> Iterator[tuple[str, torch.Tensor | float]]:
    """Yield (key, value) of one parameter's state, each laid out as the parameter where as big."""
    name, parameter, first = owner.names[0], owner.parameter, owner.held[0]
    for slot in origin.slots(Kind.OPTIMIZER_STATE, name):
        dtype = getattr(torch, origin.entry(Kind.OPTIMIZER_STATE, name, slot).dtype)
        shape = origin.shape(Kind.OPTIMIZER_STATE, name, slot)
        if shape and shape == first.global_shape:
            filled = torch.zeros_like(parameter, dtype=dtype).detach()
            for place, found in zip(owner.parts.of(parameter, filled), owner.names, strict=True):
                whole = origin.whole(Kind.OPTIMIZER_STATE, found, slot).flatten()
                place.write(whole[index] for index in indices(place.region))
            yield slot, filled
            continue
        if shape and not (first.region.whole and len(owner.held) == 1):
            raise TraceError(f"{name}: the state {slot!r} has its own shape, and {name} lies in parts")
        whole = origin.whole(Kind.OPTIMIZER_STATE, name, slot)
        if not shape and dtype is torch.float64:
            yield slot, int(whole) if float(whole).is_integer() else float(whole)
        else:
            yield slot, whole.to(dtype).to(parameter.device if owner.on_device or shape else "cpu")
