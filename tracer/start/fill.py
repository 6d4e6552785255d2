"""``--consistent-init``: gives parameters values that depend on their names and global indices alone."""

from __future__ import annotations

import torch
from torch import nn

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.notices import say
from tensortrace.tracer.start.places import Parts, indices
from tensortrace.tracer.start.refusal import rank, refuse
from tensortrace.tracer.start.values import RUNNING, draw, recipe


def fill(parts: Parts, seed: int, *, adversarial: bool) -> None:
    """Set every parameter, and the running statistics of norms; ends the program where one can't be set."""
    session = parts.session
    session.names.adopt(owned_by_optimizers(session))
    with torch.no_grad(), unobserved():
        _refuse_copies(session)
        filled, left = 0, 0
        for own, tensor, places in parts.owned():
            if not isinstance(tensor, nn.Parameter) and own not in RUNNING:
                left += 1
                continue
            for place in places:
                if not place.local.is_floating_point():
                    refuse(f"{place.name} holds {place.local.dtype}, which has no values to draw")
                how = recipe(place.name.rpartition(".")[2], place.global_shape)
                drawn = draw(seed, place.name, how, indices(place.region), adversarial=adversarial)
                place.write(drawn)
                filled += 1
    say(f"rank {rank()}: --consistent-init {seed} set {filled} tensors{_rest(left)}; this changes the run")
    if session.pipeline and not parts.renames:
        say(
            f"rank {rank()}: a weight that stages share under two names was drawn apart, if there is any: "
            "a layout file that renames one to the other (--layout) draws it once"
        )


def owned_by_optimizers(session: Session) -> list[torch.Tensor]:
    """Return the parameters of all live optimizers."""
    return [p for o in session.optimizers for group in o.param_groups for p in group["params"]]


def _refuse_copies(session: Session) -> None:
    """End the program where an optimizer updates copies (masters): they would overwrite what was set."""
    owned = {id(tensor) for _, _, tensor in session.names.owned()}
    copies = [p for p in owned_by_optimizers(session) if id(p) not in owned and not session.flats.holds(p)]
    if copies:
        name = session.names.tensor(copies[0]).name
        refuse(
            f"{name}: an optimizer updates {len(copies)} tensors that no module owns (master copies?), "
            "which --consistent-init cannot set"
        )


def _rest(left: int) -> str:
    return f" and left {left} buffers as they were" if left else ""
