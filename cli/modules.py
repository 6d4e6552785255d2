"""The boundaries of a trace as a tree of modules: what each node and all below it hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tensortrace.tracer.codec_dtypes import size_bytes
from tensortrace.tracer.types import INIT_STEP, Entry, Kind

NORMS: tuple[tuple[Kind, str], ...] = (
    (Kind.PARAM, "model"), (Kind.ACTIVATION, "out"), (Kind.LOSS, "value"), (Kind.CLIPPED_GRAD, "total_norm"),
    (Kind.CLIPPED_GRAD, "grad"), (Kind.UNSCALED_GRAD, "grad"), (Kind.REDUCED_GRAD, "grad"),
    (Kind.LOCAL_GRAD, "grad"), (Kind.ACTIVATION_GRAD, "out"), (Kind.BUFFER, "model"), (Kind.INPUT, "in"),
)  # fmt: skip
"""Of which tensor a node's norm is told: the first of these that it has; ``out`` is ``out.0``, too."""

ROWS = 60
"""Rows that a tree has at most, unless its depth is asked for."""

DEEPEST = 64
"""Levels of a tree: what a name has more of stays together, since a name is not ours to trust."""


@dataclass(slots=True)
class Tally:
    """What entries hold together. ``last`` is the one whose norm is told, with its rank."""

    boundaries: int = 0
    raw_bytes: int = 0
    kinds: set[Kind] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)
    last: tuple[int, Entry] | None = None

    def add(self, rank: int, entry: Entry) -> None:
        """Count an entry of a rank."""
        self.boundaries += 1
        self.raw_bytes += size_bytes(entry.dtype, entry.local_shape)
        self.kinds.add(entry.kind)
        self.steps.add(entry.step)
        if _rung(entry) < len(NORMS) and (self.last is None or _order(rank, entry) > _order(*self.last)):
            self.last = rank, entry

    def add_all(self, other: Tally) -> None:
        """Count what another tally counted; whose norm is told stays."""
        self.boundaries += other.boundaries
        self.raw_bytes += other.raw_bytes
        self.kinds |= other.kinds
        self.steps |= other.steps


@dataclass(slots=True)
class Node:
    """A module, or what else has a name; ``total`` holds its own boundaries and those of all nodes below."""

    label: str
    total: Tally = field(default_factory=Tally)
    children: dict[str, Node] = field(default_factory=dict)


def tree_of(entries: Iterable[tuple[int, Entry]]) -> Node:
    """Return the tree of entries, each with its rank; children stand in the order of their first events.

    Names are split at their dots. What has one child and nothing of its own is one node with that child.
    """
    own: dict[str, Tally] = {}
    for rank, entry in entries:
        own.setdefault(entry.name, Tally()).add(rank, entry)
    root = Node("")
    for name, tally in own.items():
        root.total.add_all(tally)
        at = root
        for part in name.split(".", DEEPEST):
            at = at.children.setdefault(part, Node(part))
            at.total.add_all(tally)
        at.total.last = tally.last
    _join(root)
    return root


def rows(node: Node, depth: int, level: int = 0) -> Iterator[tuple[int, bool, Node]]:
    """Yield the nodes below one, down to a depth: each with its level, and whether it is the last there."""
    if level < depth:
        for number, child in enumerate(node.children.values(), 1):
            yield level, number == len(node.children), child
            yield from rows(child, depth, level + 1)


def fitting_depth(node: Node) -> int:
    """Return the greatest depth at which the tree has no more than ``ROWS`` rows, and at least 1."""
    depth, level = 0, list(node.children.values())
    count = len(level)
    while level and (depth == 0 or count <= ROWS):
        depth += 1
        level = [child for each in level for child in each.children.values()]
        count += len(level)
    return depth


def steps_of(tally: Tally) -> int:
    """Return in how many steps entries were recorded, ``init`` aside."""
    return len(tally.steps - {INIT_STEP})


def _join(node: Node) -> None:
    for part, child in node.children.items():
        while len(child.children) == 1 and not _has_own(child):
            [(below, only)] = child.children.items()
            child = Node(f"{child.label}.{below}", only.total, only.children)
        node.children[part] = child
        _join(child)


def _has_own(node: Node) -> bool:
    return node.total.boundaries > sum(child.total.boundaries for child in node.children.values())


def _order(rank: int, entry: Entry) -> tuple[int, int, int, int]:
    return -_rung(entry), entry.step, -rank, entry.event


def _rung(entry: Entry) -> int:
    key = entry.kind, entry.slot.split(".")[0]
    return NORMS.index(key) if key in NORMS else len(NORMS)
