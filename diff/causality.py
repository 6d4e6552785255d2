"""The causal graph over global tensors, and the order in which divergences are told."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from tensortrace.diff.catalog import Slot
from tensortrace.tracer.types import Kind

_RUNG = {kind: number for number, kind in enumerate(tuple(Kind))}
_LATE = 1 << 30


class Node(NamedTuple):
    """A boundary of the global program at an aligned step (a's numbering)."""

    step: int
    microbatch: int | None
    slot: Slot


class Graph:
    """Parents of each node; nodes may be added with parents that are not (yet) nodes."""

    def __init__(self) -> None:
        self._parents: dict[Node, tuple[Node, ...]] = {}
        self._depth: dict[Node, int] = {}
        self._early: set[Node] = set()
        self._late: set[Node] = set()
        self._leads: dict[Node, tuple[Node, ...]] = {}
        self._of_step: dict[int, dict[Node, None]] = {}

    def add(self, node: Node, parents: Iterable[Node]) -> None:
        """Add a node that depends on ``parents``, unknown ones included."""
        self._parents[node] = tuple(dict.fromkeys(p for p in parents if p != node))
        self._of_step.setdefault(node.step, {})[node] = None

    def add_leads(self, node: Node, leads: Iterable[Node]) -> None:
        """Let a node come after others, and diverge because they do, without any error of theirs."""
        self._leads[node] = tuple(p for p in leads if p != node)

    def leads(self, node: Node) -> tuple[Node, ...]:
        """Return the known nodes that a node diverges with."""
        return tuple(p for p in self._leads.get(node, ()) if p in self._parents)

    def parents(self, node: Node) -> tuple[Node, ...]:
        """Return the known parents of a node, nearest recorded ancestors where a parent was not recorded."""
        return tuple(p for p in self._parents.get(node, ()) if p in self._parents)

    def __contains__(self, node: object) -> bool:
        return node in self._parents

    def ordered(self, step: int) -> list[Node]:
        """Return one step's nodes, every parent before its children; a cycle is broken where it closes."""
        done: dict[Node, None] = {}
        for root in sorted(self._of_step.get(step, ()), key=_rung_order):
            self._visit(root, done)
        for node in done:  # parents come first, so one pass gives the longest path within the step
            before = (*self.parents(node), *self.leads(node))
            within = (self._depth.get(p, 0) for p in before if p.step == step)
            self._depth[node] = 1 + max(within, default=0)
        return list(done)

    def _visit(self, root: Node, done: dict[Node, None]) -> None:
        stack: list[tuple[Node, int]] = [(root, 0)]
        open_nodes: set[Node] = set()
        before: dict[Node, list[Node]] = {}  # a node is come back to once for each of its parents
        while stack:
            node, index = stack.pop()
            if index == 0 and (node in done or node in open_nodes):
                continue
            open_nodes.add(node)
            if index == 0:
                above = (*self.parents(node), *self.leads(node))
                before[node] = [p for p in above if p.step == root.step]
            parents = before[node]
            if index == len(parents):
                done[node] = None
                open_nodes.discard(node)
                del before[node]
                continue
            stack.append((node, index + 1))
            if parents[index] not in done and parents[index] not in open_nodes:
                stack.append((parents[index], 0))

    def add_early(self, node: Node) -> None:
        """Note that a pass without gradients came before the first loss of its step."""
        self._early.add(node)

    def add_late(self, node: Node) -> None:
        """Note that a pass without gradients came after the update of its step."""
        self._late.add(node)

    def order_key(self, node: Node) -> tuple[int, int, int, int, str, str, int]:
        """Return the sort key of the headline: step, microbatch, longest path from the input, name."""
        microbatch = _LATE if node.microbatch is None else node.microbatch
        if node in self._early:
            microbatch = 0
        if node in self._late:
            microbatch = _LATE + 1
        if node.slot.slot in ("start", "copy"):  # found before the window's first backward
            microbatch = -1
        return (
            node.step, microbatch, self._depth.get(node, 0), _RUNG[node.slot.kind],
            node.slot.name, node.slot.slot, node.slot.call,
        )  # fmt: skip


def _rung_order(node: Node) -> tuple[int, int, int]:
    return node.step, _LATE if node.microbatch is None else node.microbatch, _RUNG[node.slot.kind]
