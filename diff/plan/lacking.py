"""Why a run need not have a boundary of a pass that the other has."""

from __future__ import annotations

from collections.abc import Iterable

from tensortrace.diff.catalog import Slot, StepView
from tensortrace.diff.objective import has_unknown_loss
from tensortrace.diff.plan.edges import Edges
from tensortrace.diff.plan.weights import UNKNOWN_LOSS
from tensortrace.tracer.types import ROOT, STAGE, Kind

_BESIDE = "the other run's call returns fewer tensors, and nothing is computed from this one"


def excuse_of(slot: Slot, lacking: StepView, other: StepView) -> str:
    """Return why a run does not have a boundary that it need not have, "" where it should."""
    if slot.kind == Kind.LOSS and has_unknown_loss(lacking, other):
        return UNKNOWN_LOSS
    if slot.name.startswith(STAGE):
        return "what pipeline stages exchange"
    if slot.slot.startswith("in") and _is_called_within(slot, lacking, other):
        return "the runs call the model at other modules: what is given to the one around is not seen in both"
    if slot.kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD) and _is_inside(slot.name, lacking.compiled):
        return "inside a graph of torch.compile, which is not observed"
    of_loss = {s.slot for s in lacking.named(Kind.LOSS, slot.name)} if slot.kind == Kind.LOSS else set()
    if "sum" in of_loss and not of_loss & {"target", "value"} and slot.slot in ("target", "value"):
        return "a loss written by hand is its sum, its count and its weights"
    if slot.slot == "target" and "sum" in of_loss and "target" not in of_loss:
        return (
            "one run gives the loss classes, the other probabilities: sum, count and gradients are compared"
        )
    return ""


def _is_called_within(slot: Slot, lacking: StepView, other: StepView) -> bool:
    """Tell whether a module that one run calls from outside is called by one around it in the other run.

    So where a wrapper calls what computes the loss, and a plain run calls the model from there.
    """
    if slot.kind == Kind.INPUT:
        if slot._replace(kind=Kind.ACTIVATION) in lacking.items:
            return True
    elif slot.kind != Kind.ACTIVATION or not other.named(Kind.INPUT, slot.name):
        return False
    outermost = {s.name for s, _ in lacking.find(Kind.INPUT, phase=slot.phase)}
    called = lacking.named(Kind.ACTIVATION, slot.name)
    return not called and bool(outermost) and all(_is_inside(name, (slot.name,)) for name in outermost)


def beside(slot: Slot, microbatch: int | None, lacking: StepView, edges: Edges) -> str:
    """Return why an output beside the first need not be in both runs, such as an implementation's scores.

    The other run makes the same call and returns fewer tensors, and nothing else is computed from this one.
    """
    if slot.kind not in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD) or not slot.slot.startswith("out."):
        return ""
    output, first = slot._replace(kind=Kind.ACTIVATION), slot._replace(kind=Kind.ACTIVATION, slot="out.0")
    users = {user for _, user in edges.consumers.get((microbatch, output), {})}
    others = {user for user in users if user.name != slot.name}
    return "" if output == first or first not in lacking.items or others else _BESIDE


def _is_inside(name: str, modules: Iterable[str]) -> bool:
    return any(name != module and (module == ROOT or name.startswith(f"{module}.")) for module in modules)
