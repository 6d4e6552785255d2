"""Tells of a gradient whether one call of a module brought all of it, so that a formula gives it alone.

A gradient that only one node of the graph brings arrives as the very tensor that the node made; where several
bring some, autograd adds them up, in a new tensor or by changing one of them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable

import torch
from torch.autograd.graph import Node

from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.walk import tensors_of_result
from tensortrace.tracer.types import SOLE

CAST = "ToCopyBackward0"
"""Autocast casts a weight once for all its uses; a use's own part is upstream of the cast."""

MAX_NODES = 64
"""How many nodes are looked at behind a result: a module of torch.nn makes few."""

Gradients = tuple[torch.Tensor | None, ...]
_Brought = tuple[weakref.ref[torch.Tensor], int]


class Soles:
    """Knows, while a backward runs, what nodes brought; holds no tensor and no graph."""

    def __init__(self) -> None:
        self._brought: dict[Hashable, _Brought] = {}

    def forget(self) -> None:
        """Let go of what nobody asked for."""
        self._brought.clear()

    def is_sole(self, key: Hashable, gradient: torch.Tensor) -> bool:
        """Tell whether the gradient that arrives at a watched tensor is what its one call brought."""
        return _is_it(self._brought.pop(key, None), gradient)

    def watch(self, result: object, targets: Iterable[tuple[Hashable, torch.Tensor]]) -> None:
        """After a module's forward, watch the edge of its graph that leads to each target, if it is one."""
        nodes, leaves = dict[tuple[Node, int], Hashable](), dict[int, Hashable]()
        for key, tensor in targets:
            if tensor.grad_fn is not None:
                nodes[tensor.grad_fn, tensor.output_nr] = key
            else:
                leaves[id(tensor)] = key
        todo = deque(t.grad_fn for _, t in tensors_of_result(result) if t.grad_fn is not None)
        edges: dict[Hashable, list[tuple[Node, int]]] = {}
        seen: set[Node] = set()
        while todo:
            node = todo.popleft()
            if node in seen:
                continue
            if len(seen) == MAX_NODES:
                return
            seen.add(node)
            for index, (below, output) in enumerate(node.next_functions):
                if below is None:
                    continue
                key = nodes.get((below, output))
                if key is None and leaves:
                    key = leaves.get(id(getattr(below, "variable", None)))
                if key is not None:
                    edges.setdefault(key, []).append((node, index))
                else:
                    todo.append(below)
        for key, found in edges.items():
            if len(found) == 1:
                self._watch_edge(key, *found[0], seen)

    def _watch_edge(self, key: Hashable, node: Node, index: int, seen: set[Node]) -> None:
        if node.name() != CAST:
            node.register_hook(self._hook(key, index))
            return
        above = [(n, i) for n in seen for i, (below, _) in enumerate(n.next_functions) if below == node]
        if len(above) == 1:  # a cast may be shared: autocast casts a weight once for all its uses
            upper, at = above[0]
            upper.register_hook(self._hook((key, CAST), at))
            node.register_prehook(self._before_cast(key))
            node.register_hook(self._after_cast(key))

    def _hook(self, key: Hashable, index: int) -> Callable[[Gradients, Gradients], None]:
        def hook(inputs: Gradients, outputs: Gradients) -> None:
            self._note(key, inputs[index])

        return hook

    def _before_cast(self, key: Hashable) -> Callable[[Gradients], None]:
        def hook(outputs: Gradients) -> None:
            self._cast_begins(key, outputs[0])

        return hook

    def _after_cast(self, key: Hashable) -> Callable[[Gradients, Gradients], None]:
        def hook(inputs: Gradients, outputs: Gradients) -> None:
            self._cast_ends(key, inputs[0])

        return hook

    @guard("sole gradient")
    def _note(self, key: Hashable, gradient: torch.Tensor | None) -> None:
        if gradient is not None and not gradient.is_inference():
            self._brought[key] = weakref.ref(gradient), gradient._version

    @guard("sole gradient")
    def _cast_begins(self, key: Hashable, gradient: torch.Tensor | None) -> None:
        one = self._brought.pop((key, CAST), None)
        if gradient is None or not _is_it(one, gradient):
            self._brought.pop((key, SOLE), None)
        elif one is not None:
            self._brought[key, SOLE] = one

    @guard("sole gradient")
    def _cast_ends(self, key: Hashable, gradient: torch.Tensor | None) -> None:
        if self._brought.pop((key, SOLE), None) is not None:
            self._note(key, gradient)


def _is_it(found: _Brought | None, gradient: torch.Tensor) -> bool:
    return found is not None and found[0]() is gradient and found[1] == gradient._version
