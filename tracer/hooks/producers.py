"""Finds which recorded tensors a tensor came from, without keeping any of them alive."""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from tensortrace.tracer.placements import local_part

MAX_NODES = 256
"""How far the autograd graph is searched; between two modules lie a dozen nodes, not hundreds."""

KEEPING = frozenset(
    {
        "AliasBackward0", "AsStridedBackward0", "CatBackward0", "CloneBackward0", "ExpandBackward0",
        "IndexBackward0", "IndexSelectBackward0", "PermuteBackward0", "ReshapeAliasBackward0",
        "SelectBackward0", "SliceBackward0", "SplitBackward0", "SqueezeBackward0", "SqueezeBackward1",
        "TBackward0", "ToCopyBackward0", "TransposeBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0",
        "ViewBackward0",
    }
)  # fmt: skip
"""Operations that choose and arrange values, or cast them."""

ORDERLY = frozenset(
    {"AliasBackward0", "CloneBackward0", "ReshapeAliasBackward0", "ToCopyBackward0", "UnsafeViewBackward0",
     "ViewBackward0"}
)  # fmt: skip
"""Operations that keep all values in their order, or cast them."""

NodeKey = tuple[int, str, int]
Extent = tuple[int, int]


class _Seen(NamedTuple):
    """A recorded tensor: valid while it lives (then its memory is not reused) and is not written to.

    A view of an ordinary tensor keeps it alive; one of an inference tensor keeps nothing but its memory.
    """

    alive: weakref.ref[torch.Tensor] | StorageWeakRef
    version: int
    extent: Extent
    shape: tuple[int, ...]
    event: int
    is_output: bool


class Producers:
    """Maps storage and autograd nodes to event numbers, for the present and the previous microbatch.

    Nodes are known by their sequence number, name and output, so that no graph is kept alive.
    """

    def __init__(self) -> None:
        self._storages: dict[int, list[_Seen]] = {}
        self._nodes: dict[NodeKey, int] = {}
        self._old_storages: dict[int, list[_Seen]] = {}
        self._old_nodes: dict[NodeKey, int] = {}

    def turn(self) -> None:
        """Forget what is older than the microbatch that just ended."""
        self._old_storages, self._storages = self._storages, {}
        self._old_nodes, self._nodes = self._nodes, {}

    def add(self, tensor: torch.Tensor, event: int, *, is_output: bool) -> None:
        """Remember that ``event`` recorded this tensor; an input only where no output claims it."""
        local = local_part(tensor)
        key = _storage(local)
        if key is not None:
            seen = self._storages.setdefault(key, [])
            version = _version(local)
            if len(seen) > 8:
                seen[:] = [item for item in seen if _is_held(item, key) and item.version == version]
            seen.append(_Seen(_holder(local), version, _extent(local), tuple(local.shape), event, is_output))
        if tensor.grad_fn is not None and is_output:
            self._nodes[_node_key(tensor.grad_fn, tensor.output_nr)] = event

    def find(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the events this tensor came from: by storage and version, else by the autograd graph."""
        return self._by_storage(tensor) or self.by_graph(tensor)

    def computed(self, tensor: torch.Tensor) -> bool:
        """Tell whether recorded calls computed the tensor, rather than were given it too."""
        extent = _extent(local_part(tensor))
        returned = (item for item in self._alive(tensor) if item.is_output)
        return any(_overlap(item.extent, extent) for item in returned) or bool(self.by_graph(tensor))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor's values are those of recorded ones, chosen, arranged or cast up."""
        if self._by_storage(tensor):
            return True
        if tensor.grad_fn is None or tensor.dtype not in (torch.float32, torch.float64):
            return False  # a cast down rounds
        todo: list[tuple[Node | None, int]] = [(tensor.grad_fn, tensor.output_nr)]
        for _ in range(MAX_NODES):
            if not todo:
                return True
            node, output = todo.pop()
            if node is None:
                return False
            key = _node_key(node, output)
            if key in self._nodes or key in self._old_nodes:
                continue
            if node.name() not in KEEPING:
                return False
            todo.extend(node.next_functions)
        return False

    def in_order(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor holds all values of one recorded result in their order, maybe cast up."""
        node, output, casts = tensor.grad_fn, tensor.output_nr, 0
        wide = tensor.dtype in (torch.float32, torch.float64)
        for _ in range(MAX_NODES):
            if node is None:
                return False
            key = _node_key(node, output)
            if key in self._nodes or key in self._old_nodes:
                return wide or not casts  # a cast down rounds
            casts += node.name() == "ToCopyBackward0"
            if node.name() not in ORDERLY or len(node.next_functions) != 1 or casts > 1:
                return False
            node, output = node.next_functions[0]
        return False

    def by_graph(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the nearest recorded tensors on each path of the autograd graph."""
        return self.by_node(tensor.grad_fn, tensor.output_nr) if tensor.grad_fn is not None else ()

    def by_node(self, node: Node, output: int = 0) -> tuple[int, ...]:
        """Return the nearest recorded tensors on each path of the graph from what a node made."""
        if not self._nodes and not self._old_nodes:
            return ()  # as where the step isn't recorded: there is nothing to search for
        found: set[int] = set()
        visited: set[NodeKey] = set()
        todo: deque[tuple[Node, int]] = deque([(node, output)])
        while todo and len(visited) < MAX_NODES:
            node, output = todo.popleft()
            key = _node_key(node, output)
            if key in visited:
                continue
            visited.add(key)
            event = self._nodes.get(key, self._old_nodes.get(key))
            if event is not None:
                found.add(event)
            else:
                todo.extend((below, number) for below, number in node.next_functions if below is not None)
        return tuple(sorted(found))

    def _by_storage(self, tensor: torch.Tensor) -> tuple[int, ...]:
        alive = self._alive(tensor)
        if not alive:
            return ()
        tensor = local_part(tensor)
        extent, shape = _extent(tensor), tuple(tensor.shape)
        alive = [item for item in alive if item.is_output] or alive
        exact = [item for item in alive if item.extent == extent and item.shape == shape]
        same = exact or [item for item in alive if item.extent == extent]
        if same:
            return (max(item.event for item in same),)
        return tuple(sorted({item.event for item in alive if _overlap(item.extent, extent)}))

    def _alive(self, tensor: torch.Tensor) -> list[_Seen]:
        """Return what was recorded of the tensor's storage as it is now."""
        tensor = local_part(tensor)
        key = _storage(tensor)
        if key is None:
            return []
        version = _version(tensor)
        return [
            item
            for item in (*self._old_storages.get(key, ()), *self._storages.get(key, ()))
            if item.version == version and _is_held(item, key)
        ]


def _holder(tensor: torch.Tensor) -> weakref.ref[torch.Tensor] | StorageWeakRef:
    """Return what tells whether the tensor's memory is still its own."""
    if tensor.is_inference():
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return weakref.ref(tensor)


def _is_held(item: _Seen, storage: int) -> bool:
    """Tell whether the memory is still the recorded tensor's."""
    if isinstance(item.alive, StorageWeakRef):
        return not item.alive.expired()  # type: ignore[no-untyped-call]
    return _storage(item.alive()) == storage


def _storage(tensor: torch.Tensor | None) -> int | None:
    if tensor is None or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _extent(tensor: torch.Tensor) -> Extent:
    """Return the byte range within the storage that the elements lie in."""
    if tensor.numel() == 0:
        return 0, 0
    first = int(tensor.storage_offset())
    span = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    return first * tensor.element_size(), (first + span + 1) * tensor.element_size()


def _overlap(a: Extent, b: Extent) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _node_key(node: Node, output: int) -> NodeKey:
    return node._sequence_nr(), node.name(), output
