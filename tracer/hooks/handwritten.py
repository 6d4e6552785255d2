"""Finds losses written by hand, log_softmax and gather, in the graph that backward starts from."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import split
from tensortrace.tracer.types import PART_OF_LOSS, Kind, Meta

NAME = "log_softmax.gather"
MAX_NODES = 64
MAX_STEPS_BELOW = 4
"""Reshapes that may lie between the gather and the log_softmax."""

BLOCK = 1 << 18
"""Elements of all classes that are held in float64 at a time."""

SELECTING = ("GatherBackward0", "IndexBackward0")

LINEAR = frozenset(
    {"MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1", "NegBackward0", "MulBackward0",
     "DivBackward0"}
)  # fmt: skip
"""What smoothing of labels does with log-probabilities beside the gather, with one operand in the graph."""


class _Found(NamedTuple):
    """A gather of log-probabilities; ``beside`` are the nodes that use all of these too."""

    gather: Node
    logs: Node
    beside: tuple[Node, ...]

    @property
    def smoothed(self) -> bool:
        """Whether the log-probabilities are summed over all classes too, as smoothed labels are.

        Then the gather has a part of each token's loss only. An entropy is not linear in them.
        """
        return bool(self.beside) and all(
            node.name() in LINEAR and sum(below is not None for below, _ in node.next_functions) == 1
            for node in self.beside
        )


class _Place(NamedTuple):
    """When a loss was computed, which of its name it is, and the events of what it was computed from.

    ``whole`` tells whether it is all of its tokens' loss.
    """

    at: Moment
    call: int
    producers: tuple[int, ...]
    whole: bool


def find_losses(session: Session, root: torch.Tensor) -> None:
    """Watch each gather of log-probabilities on the way from the root: sum, count and weights follow.

    Which tokens are valid isn't written in the graph: they are those that weigh anything in backward.
    """
    if root.grad_fn is None or not session.wants(Kind.LOSS, NAME, session.clock.backward_moment()):
        return
    for found in _gathers(root.grad_fn):
        losses = _token_losses(found.gather, found.logs)
        if losses is None:
            continue
        at = session.clock.backward_moment()
        call = session.clock.take(at, Kind.LOSS, NAME, "value").number
        # what tokens weigh depends on all that is made of their losses, too
        producers = {*session.producers.find(root), *session.producers.by_node(found.logs)}
        whole = found.smoothed or not found.beside
        place = _Place(at, call, tuple(sorted(producers)), whole)
        if found.smoothed:
            _watch_smoothed(session, found.logs, place)
        else:
            _watch(session, found.gather, losses, place)


def _gathers(root: Node) -> list[_Found]:
    """Return the gathers of log-probabilities near the root, nearest first."""
    found: list[tuple[Node, Node]] = []
    readers: dict[Node, list[Node]] = defaultdict(list)
    todo, seen = deque([root]), {root}
    while todo and len(seen) < MAX_NODES:
        node = todo.popleft()
        if node.name() in SELECTING:
            logs = _log_softmax_below(node)
            if logs is not None:
                found.append((node, logs))
                continue
        for below, _ in node.next_functions:
            if below is None:
                continue
            readers[below].append(node)
            if below not in seen:
                seen.add(below)
                todo.append(below)
    return [_Found(gather, logs, tuple(readers.get(logs, ()))) for gather, logs in found]


def _log_softmax_below(node: Node) -> Node | None:
    for _ in range(MAX_STEPS_BELOW):
        below = node.next_functions[0][0] if node.next_functions else None
        if below is None or below.name() in SELECTING:  # what was gathered may be masked by choosing
            return None
        if below.name() == "LogSoftmaxBackward0":
            return below
        node = below
    return None


def _token_losses(gather: Node, logs: Node) -> torch.Tensor | None:
    """Return minus the gathered log-probabilities as a new float64 tensor, shaped like the gather's output.

    None where a reshape lies between the two and the shapes don't fit, and of DTensors that lie in parts.
    """
    result, spec = split(logs._saved_result)  # type: ignore[attr-defined]
    if spec is not None and not spec.replicated:
        return None
    result = result.detach()
    if gather.name() == "GatherBackward0":
        index = split(gather._saved_index)[0]  # type: ignore[attr-defined]
        dim = _signed(gather._saved_dim)  # type: ignore[attr-defined]
        if index.dim() != result.dim():
            return None
        return -result.gather(dim, index).to(torch.float64)
    indices = gather._saved_indices  # type: ignore[attr-defined]
    if len(indices) != result.dim() or any(index is None for index in indices):
        return None
    return -result[tuple(split(index)[0] for index in indices)].to(torch.float64)


def _signed(dim: int) -> int:
    """Undo the unsigned reading of a negative dimension that saved attributes have."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def _watch(session: Session, gather: Node, losses: torch.Tensor, place: _Place) -> None:
    """``losses`` is the recorder's own small tensor; it goes when the graph goes."""

    def hook(outputs: tuple[torch.Tensor | None, ...]) -> None:
        _record(session, outputs[0], losses, place)

    gather.register_prehook(hook)


def _watch_smoothed(session: Session, logs: Node, place: _Place) -> None:
    """Watch the gradient of all log-probabilities: a token's own add up to minus its weight.

    The log-probabilities are the graph's own; they are let go when backward has passed, since a program may
    hold a loss, and with it its graph, for long.
    """
    result, spec = split(logs._saved_result)  # type: ignore[attr-defined]
    dim = _signed(logs._saved_dim)  # type: ignore[attr-defined]
    if spec is not None and not spec.replicated:
        return
    held = [result.detach()]

    def hook(outputs: tuple[torch.Tensor | None, ...]) -> None:
        if held:
            _record_smoothed(session, outputs[0], held.pop(), dim, place)

    logs.register_prehook(hook)


@guard("handwritten loss")
def _record_smoothed(
    session: Session, gradient: torch.Tensor | None, logs: torch.Tensor, dim: int, place: _Place
) -> None:
    if gradient is None or session.muted:
        return
    local, _ = split(gradient)
    if local.shape != logs.shape or not logs.numel():
        return
    with unobserved():
        classes = logs.shape[dim]
        rows, values = (x.detach().movedim(dim, -1).reshape(-1, classes) for x in (local, logs))
        weights, losses = [], []
        for start in range(0, len(rows), step := max(BLOCK // max(classes, 1), 1)):
            # of each class: the label's probability times the weight of the token
            shares = -rows[start : start + step].to(torch.float64)
            weights.append(shares.sum(-1))
            known = values[start : start + step].to(torch.float64)
            losses.append(-(shares * known).nan_to_num(0.0).sum(-1))
        shape = logs.movedim(dim, -1).shape[:-1]
        weight, loss = (torch.cat(found).reshape(shape) for found in (weights, losses))
        _emit(session, weight, loss / torch.where(weight != 0, weight, 1.0), place)


@guard("handwritten loss")
def _record(session: Session, gradient: torch.Tensor | None, losses: torch.Tensor, place: _Place) -> None:
    if gradient is None or session.muted:
        return
    local, _ = split(gradient)
    if local.shape != losses.shape:
        return
    with unobserved():
        _emit(session, -local.detach().to(torch.float64), losses, place)


def _emit(session: Session, weight: torch.Tensor, losses: torch.Tensor, place: _Place) -> None:
    """Record what tokens weigh and lose; both are the recorder's own."""
    valid = weight != 0
    total, count = (losses * valid).sum(), valid.sum()
    text, op = "valid tokens are those that weigh anything", None if place.whole else PART_OF_LOSS
    meta = Meta(reduction="none", text=text, op=op)
    for slot, tensor in (("sum", total), ("count", count), ("weight", weight)):
        session.emit(
            tensor, place.at, Kind.LOSS, NAME, slot, call=place.call, producers=place.producers, meta=meta
        )
