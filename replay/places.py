"""In which module each boundary is computed that errs by itself: a module, or code between modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from tensortrace.diff.catalog import enclosing
from tensortrace.diff.causality import Node
from tensortrace.diff.execute import Execution
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.plan.comparison import OneSided
from tensortrace.replay.forced import Part
from tensortrace.tracer.types import ROOT, Kind

MODULES = (Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD)
UPDATES = (Kind.SCHEDULE, Kind.OPTIMIZER_STATE, Kind.PARAM, Kind.BUFFER)


_ROUND_OFF = 1e-3
"""Of a factor's distance from 1, what may remain beside it: far below what a second, right part leaves."""


class Place(NamedTuple):
    """What computes a boundary."""

    part: Part
    name: str


class Places:
    """The modules that both runs call, and who uses what they exchange."""

    def __init__(self, execution: Execution) -> None:
        self._graph = execution.graph
        nodes = [node for node in execution.errors if node.slot.kind in (Kind.ACTIVATION, Kind.LOSS)]
        self._called = {node.slot.name for node in nodes if node.slot.kind is Kind.ACTIVATION}
        self._containers = {around for name in self._called for around in _around(name)} & self._called
        self._users: dict[Node, list[Node]] = defaultdict(list)
        for node in nodes:
            for parent in self._graph.parents(node):
                if parent.slot.kind is Kind.ACTIVATION and parent.step == node.step:
                    self._users[parent].append(node)
        self._same: dict[tuple[int, int | None, str], list[Node]] = defaultdict(list)
        for outcome in execution.outcomes:
            if outcome.node.slot.kind is Kind.ACTIVATION_GRAD and (digest := _digest(outcome)):
                self._same[outcome.node.step, outcome.node.microbatch, digest].append(outcome.node)

    def of(self, outcome: Outcome) -> Place:
        """Return what computes a boundary.

        What a call is given is made by the code around it. A gradient is made by the backward of all that
        use the tensor.
        """
        slot = outcome.node.slot
        if slot.kind is Kind.ACTIVATION_GRAD:
            return self._of_gradient(outcome)
        if slot.kind is Kind.ACTIVATION:
            return self._of_user(outcome.node)
        if slot.kind is Kind.LOCAL_GRAD:
            return self._module(self.owner(slot.name))
        if slot.kind in UPDATES:
            return Place("update", slot.name)
        if slot.kind is Kind.LOSS:
            return Place("loss", slot.name)
        return Place("input" if slot.kind is Kind.INPUT else "gradients", slot.name)

    def owner(self, parameter: str) -> str:
        """Return the module that computes with a parameter, as far as it is called."""
        return next((name for name in _around(parameter) if name in self._called), ROOT)

    def _of_gradient(self, outcome: Outcome) -> Place:
        """Return the module whose backward makes a gradient: the innermost with all users of the tensor.

        Where no module returned it, the code that made it may use it again, unless the whole gradient is off
        by one factor: then it has no second part that is right.
        """
        node, digest = outcome.node, _digest(outcome)
        alike = self._same.get((node.step, node.microbatch, digest), [node]) if digest else [node]
        tensors = [n._replace(slot=n.slot._replace(kind=Kind.ACTIVATION)) for n in alike]
        users = {user for tensor in tensors for user in self._users[tensor] if user not in tensors}
        places = {self._of_user(user) for user in users}
        made = any(tensor.slot.slot.startswith("out") for tensor in tensors)
        if not made and not _is_multiple(outcome):
            places |= {self._of_user(tensor) for tensor in tensors if tensor.slot.name != ROOT}
        if len(places) == 1:
            return places.pop()
        names = [place.name for place in places if place.part != "loss"]
        if not names:
            return self._module(node.slot.name)
        around = [[found, *_around(found)] for found in names]
        return self._module(next(n for n in around[0] if all(n in others for others in around)))

    def _of_user(self, node: Node) -> Place:
        if node.slot.kind is Kind.LOSS:
            return Place("loss", node.slot.name)
        if node.slot.slot.startswith("out"):
            return self._module(node.slot.name)
        around = (name for name in _around(node.slot.name) if name in self._called)
        return Place("between", next(around, ROOT))

    def _module(self, name: str) -> Place:
        return Place("between" if name in self._containers or name == ROOT else "module", name)


def _is_multiple(outcome: Outcome) -> bool:
    """Tell whether a tensor is a multiple of the recorded one, within round-off."""
    found = outcome.metrics
    if found is None or found.projection is None or found.projection_error is None or not found.rel_l2:
        return False
    return found.projection != 0 and found.projection_error <= _ROUND_OFF * abs(found.projection - 1)


def lacks_gradient(outcome: Outcome) -> bool:
    """Tell whether a gradient that was recorded does not come about in the live run."""
    entry, kind = outcome.comparison, outcome.node.slot.kind
    gradient = kind in (Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD)
    return gradient and isinstance(entry, OneSided) and entry.side == "a"


def _around(name: str) -> Iterator[str]:
    return enclosing(name) if name != ROOT else iter(())


def _digest(outcome: Outcome) -> str:
    """Return what tells the live run's tensor from others, "" where it is not known."""
    entry = outcome.comparison
    items = () if isinstance(entry, OneSided) else entry.items_b
    return " ".join(f"{item.source.rank} {item.entry.digest}" for item in items)
