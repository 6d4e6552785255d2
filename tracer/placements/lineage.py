"""Tells where a plain tensor lies that was computed from the local part of a DTensor."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import Node

from tensortrace.tracer.placements.dtensor import Spec, is_dtensor, spec_of
from tensortrace.tracer.types import Placement

TO_LOCAL = "_ToTorchTensorBackward"

ELEMENTWISE = frozenset(
    f"{name}Backward0"
    for name in (
        "Add", "Sub", "Mul", "Div", "Neg", "Pow", "Gelu", "Silu", "Relu", "Tanh", "Sigmoid", "NativeDropout",
        "ToCopy", "Clone", "Alias",
    )
)  # fmt: skip
"""Operations that keep every element in its place."""

HANDED_ON = frozenset({"RegisterPostBackwardFunctionBackward", "RegisterPreBackwardFunctionBackward"})
"""Nodes whose outputs are their inputs, one by one: fully_shard's."""

MAX_NODES = 24


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies, and where its gradient does."""

    own: Spec
    gradient: Spec


def place_of(tensor: torch.Tensor) -> Place | None:
    """Return the place of a plain tensor as the autograd graph tells it, None where it doesn't.

    What ``to_local`` returned lies as its DTensor did. What was computed from that element by element lies
    so too where it is sharded; of replicas nobody knows whether the ranks still do the same.
    """
    if tensor.grad_fn is None or is_dtensor(tensor):
        return None
    node: Any = tensor.grad_fn
    if node.name() == TO_LOCAL:
        own = spec_of(node.dtensor_spec)
        return None if own is None else Place(own, _of_gradient(node, own))
    own = _of_operand(tensor)
    return None if own is None else Place(own, own)


def _of_operand(tensor: torch.Tensor) -> Spec | None:
    """Return the place of the nearest sharded operand that has the tensor's shape."""
    assert tensor.grad_fn is not None
    todo: deque[tuple[Any, int]] = deque([(tensor.grad_fn, tensor.output_nr)])
    seen: set[Node] = set()
    while todo and len(seen) < MAX_NODES:
        node, output = todo.popleft()
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name == TO_LOCAL:
            spec = spec_of(node.dtensor_spec)
            if spec is not None and _is_sharded(spec) and _local_shape(spec) == tuple(tensor.shape):
                return spec
        elif name in HANDED_ON:
            todo.extend(edge for edge in node.next_functions[output : output + 1] if edge[0] is not None)
        elif name in ELEMENTWISE:
            todo.extend(edge for edge in node.next_functions if edge[0] is not None)
    return None


def _of_gradient(node: Any, own: Spec) -> Spec:
    """Return where the gradient of a ``to_local`` lies: as declared there, else as torch takes it to lie."""
    if node.grad_placements is not None:
        return spec_of(node.dtensor_spec, node.grad_placements) or own
    return gradient_of(own)


def gradient_of(own: Spec) -> Spec:
    """Return where torch takes the gradient of a local part to lie, unless it is told."""
    placements = tuple(
        Placement(kind="replicate") if placement.kind == "partial" else placement
        for placement in own.placements
    )
    return replace(own, placements=placements)


def _is_sharded(spec: Spec) -> bool:
    kinds = {placement.kind for placement in spec.placements}
    return "shard" in kinds and kinds <= {"shard", "replicate"}


def _local_shape(spec: Spec) -> tuple[int, ...]:
    """Return the shape of this rank's part: chunks of equal size, the last ones shorter."""
    shape = list(spec.global_shape)
    for placement, size, index in zip(spec.placements, spec.mesh.shape, spec.coordinate, strict=True):
        if placement.dim is not None:
            chunk = -(-shape[placement.dim] // size)
            shape[placement.dim] = max(0, min(chunk, shape[placement.dim] - index * chunk))
    return tuple(shape)
