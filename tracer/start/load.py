"""``--init-from``: gives parameters, buffers and optimizer state the values that another run began with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.optim import Optimizer

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.notices import say
from tensortrace.tracer.placements import local_part
from tensortrace.tracer.placements.zero import stepping
from tensortrace.tracer.start.origin import Origin
from tensortrace.tracer.start.places import Place, indices, locate
from tensortrace.tracer.start.refusal import rank, refuse, world_size
from tensortrace.tracer.types import Kind


def load(session: Session, path: Path) -> None:
    """Set all state from the trace, resharded to where it lies; ends the program where that can't be done."""
    session.names.adopt(p for o in session.optimizers for p in _parameters(o))
    try:
        with torch.no_grad(), unobserved():
            origin = Origin(path)
            states = _set_states(session, origin)
            tensors = _set_tensors(session, origin)
    except TraceError as error:
        refuse(f"--init-from {path}: {error}")
    say(
        f"rank {rank()}: --init-from {path} set {tensors} tensors and {states} of optimizer state; "
        "this changes the run"
    )


def _set_tensors(session: Session, origin: Origin) -> int:
    """Set parameters and buffers after all of them were found to fit."""
    wanted = list(_wanted(session, origin))
    _refuse_left_over(origin, {(kind, found) for kind, found, _ in wanted})
    for kind, found, place in wanted:
        whole = origin.whole(kind, found, "model").flatten()
        place.write(whole[index] for index in indices(place.region))
    return len(wanted)


def _wanted(session: Session, origin: Origin) -> Iterator[tuple[Kind, str, Place]]:
    for module, own, tensor in session.names.owned():
        name = session.names.tensor(tensor)
        kind = Kind.BUFFER if own in module._buffers else Kind.PARAM
        found = origin.find(kind, (name.name, *name.aliases))
        if found is None:
            raise TraceError(f"{name.name}: no such {kind.value} there")
        place = locate(name.name, tensor)
        have = _global_shape(origin, kind, found, "model")
        if have != place.global_shape:
            raise TraceError(f"{name.name}", found=f"shape {have}", expected=f"shape {place.global_shape}")
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


def _set_states(session: Session, origin: Origin) -> int:
    count = 0
    for optimizer in map(stepping, session.optimizers):
        for group in optimizer.param_groups:
            on_device = bool(group.get("capturable") or group.get("fused"))
            for parameter in group["params"]:
                name = session.names.tensor(parameter)
                found = origin.find(Kind.OPTIMIZER_STATE, (name.name, *name.aliases))
                optimizer.state.pop(parameter, None)
                if found is not None:
                    state = dict(_state(origin, found, optimizer, parameter, on_device=on_device))
                    optimizer.state[parameter] = state
                    count += len(state)
    return count


def _state(
    origin: Origin, name: str, optimizer: Optimizer, parameter: torch.Tensor, *, on_device: bool
) -> Iterator[tuple[str, torch.Tensor | float]]:
    """Yield (key, value) of one parameter's state, each laid out as the parameter where as big."""
    like = locate(name, parameter)
    for slot in origin.slots(Kind.OPTIMIZER_STATE, name):
        entry, whole = origin.entry(Kind.OPTIMIZER_STATE, name, slot), None
        if entry.meta.optimizer not in (None, type(optimizer).__name__):
            raise TraceError(
                f"{name}: {slot}", found=f"state of {entry.meta.optimizer}",
                expected=f"state of {type(optimizer).__name__}",
            )  # fmt: skip
        if "." in slot:
            raise TraceError(f"{name}: the state {slot!r} of {entry.meta.optimizer} can't be set")
        whole = origin.whole(Kind.OPTIMIZER_STATE, name, slot)
        dtype = getattr(torch, entry.dtype)
        if whole.dim() == 0 and dtype is torch.float64:
            yield slot, int(whole) if float(whole).is_integer() else float(whole)
        elif tuple(whole.shape) == like.global_shape and whole.dim():
            filled = torch.zeros_like(parameter, dtype=dtype).detach()
            part = Place(name, local_part(filled), like.region)
            part.write(whole.flatten()[index] for index in indices(like.region))
            yield slot, filled
        elif like.region.whole or whole.dim() == 0:
            yield slot, whole.to(dtype).to(parameter.device if on_device or whole.dim() else "cpu")
        else:
            raise TraceError(f"{name}: the state {slot!r} has its own shape, and {name} lies in parts")


def _global_shape(origin: Origin, kind: Kind, name: str, slot: str) -> tuple[int, ...]:
    entry = origin.entry(kind, name, slot)
    return (entry.shard.global_shape if entry.shard else None) or entry.local_shape


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
