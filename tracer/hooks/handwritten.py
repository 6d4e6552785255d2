"""Finds losses written by hand, log_softmax and gather, in the graph that backward starts from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
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

SELECTING = ("GatherBackward0", "IndexBackward0")

LINEAR = frozenset(
    {"MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1", "NegBackward0", "MulBackward0",
     "DivBackward0"}
)  # fmt: skip
"""What smoothing of labels does with log-probabilities beside the gather, with one operand in the graph."""


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
    objective = session.producers.find(root)  # what tokens weigh depends on all that is made of their losses
    for gather, logs, whole in _pairs(root.grad_fn):
        losses = _token_losses(gather, logs)
        if losses is None:
            continue
        at = session.clock.backward_moment()
        call = session.clock.take(at, Kind.LOSS, NAME, "value").number
        producers = {*objective, *session.producers.by_node(logs)}
        place = _Place(at, call, tuple(sorted(producers)), whole)
        if _smoothed(root.grad_fn, gather, logs):
            _watch_smoothed(session, logs, place._replace(whole=True))
        else:
            _watch(session, gather, losses, place)


def _pairs(root: Node) -> list[tuple[Node, Node, bool]]:
    """Return (gather, log_softmax) nodes near the root, nearest first, with whether nothing else uses these.

    Where the log-probabilities are used otherwise, what is gathered of them is a part of a token's loss.
    """
    found: list[tuple[Node, Node]] = []
    todo, seen = deque([root]), {root}
    while todo and len(seen) < MAX_NODES:
        node = todo.popleft()
        if node.name() in SELECTING:
            logs = _log_softmax_below(node)
            if logs is not None:
                found.append((node, logs))
                continue
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
    return [(gather, logs, logs not in seen) for gather, logs in found]


def _log_softmax_below(node: Node) -> Node | None:
    for _ in range(MAX_STEPS_BELOW):
        below = node.next_functions[0][0] if node.next_functions else None
        if below is None:
            return None
        if below.name() == "LogSoftmaxBackward0":
            return below
        node = below
    return None


def _smoothed(root: Node, gather: Node, logs: Node) -> bool:
    """Tell whether the log-probabilities are summed over all classes too, as smoothed labels are.

    Then the gather has a part of each token's loss only. Of an entropy, which is not linear in them, it has
    all.
    """
    beside = [node for node in _near(root) if _reads(node, logs) and not _leads(gather, node)]
    return bool(beside) and all(
        node.name() in LINEAR and sum(below is not None for below, _ in node.next_functions) == 1
        for node in beside
    )


def _near(root: Node) -> Iterator[Node]:
    """Yield the nodes near the root, nearest first."""
    todo, seen = deque([root]), {root}
    while todo:
        node = todo.popleft()
        yield node
        for below, _ in node.next_functions:
            if below is not None and below not in seen and len(seen) < MAX_NODES:
                seen.add(below)
                todo.append(below)


def _reads(node: Node, logs: Node) -> bool:
    return any(below == logs for below, _ in node.next_functions)


def _leads(gather: Node, wanted: Node) -> bool:
    """Tell whether a node lies on the way from the gather to its log-probabilities."""
    node: Node | None = gather
    for _ in range(MAX_STEPS_BELOW + 1):
        if node is None or node == wanted:
            return node is not None
        node = node.next_functions[0][0] if node.next_functions else None
    return False


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
    """Watch the gradient of all log-probabilities: a token's own add up to minus its weight."""
    result, spec = split(logs._saved_result)  # type: ignore[attr-defined]
    dim = _signed(logs._saved_dim)  # type: ignore[attr-defined]
    if spec is not None and not spec.replicated:
        return
    values = result.detach()

    def hook(outputs: tuple[torch.Tensor | None, ...]) -> None:
        _record_smoothed(session, outputs[0], values, dim, place)

    logs.register_prehook(hook)


@guard("handwritten loss")
def _record_smoothed(
    session: Session, gradient: torch.Tensor | None, logs: torch.Tensor, dim: int, place: _Place
) -> None:
    if gradient is None or session.muted:
        return
    local, _ = split(gradient)
    if local.shape != logs.shape:
        return
    with unobserved():
        shares = -local.detach().to(torch.float64)  # of each class: the label's probability times the weight
        weight = shares.sum(dim)
        losses = -(shares * logs.to(torch.float64)).nan_to_num(0.0).sum(dim)
        _emit(session, weight, losses / torch.where(weight != 0, weight, 1.0), place)


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
