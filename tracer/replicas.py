"""Which copies of a tensor are stored: of ranks that declare equal copies, the first one's alone."""

from __future__ import annotations

from tensortrace.tracer.types import INIT_STEP, Boundary, Kind

_OFTEN_OTHERS = frozenset({Kind.INPUT, Kind.LOSS, Kind.BUFFER})
"""Kinds that every rank stores: small, or, as batch norm's averages, copies by name only."""

_BY_OPTIMIZER = frozenset({Kind.UNSCALED_GRAD, Kind.CLIPPED_GRAD, Kind.OPTIMIZER_STATE, Kind.PARAM})
"""Kinds that a rank has of the parameters which its own optimizers update."""

_REMEMBERED = 1 << 16

_GRADIENTS = frozenset({Kind.LOCAL_GRAD, Kind.REDUCED_GRAD})


def is_spare(boundary: Boundary) -> bool:
    """Tell whether a rank before this one, along an axis of replicas, declares the same tensor.

    A parameter's ``start`` is not: it is recorded where something unusual has changed it, maybe here alone.
    """
    shard = boundary.shard
    if shard is None or boundary.kind in _OFTEN_OTHERS or _is_start(boundary):
        return False
    places = zip(shard.placements, shard.coordinate, strict=True)
    return any(placement.kind == "replicate" and index > 0 for placement, index in places)


def _is_start(boundary: Boundary) -> bool:
    return boundary.kind is Kind.PARAM and boundary.slot == "start"


class Spares:
    """Decides what a rank leaves to another one; sees every boundary of the rank, in order.

    What an optimizer makes is left once this rank has had its kind of every parameter that has a gradient,
    so from the second step on: where ranks share the updates out (ZeRO, or by hand), each has what no
    other has. Parameters are left in the first step, too, if the state of all was there before them. What
    has the bytes of something that was left before is left, too.
    """

    def __init__(self) -> None:
        self._with_gradient: set[str] = set()
        self._had: dict[Kind, set[str]] = {kind: set() for kind in _BY_OPTIMIZER}
        self._left: set[str] = set()
        self._known: dict[Kind, tuple[int, int, bool]] = {}

    def forget(self) -> None:
        """Don't count on bytes that were left before: the other rank may have dropped them since."""
        self._left.clear()

    def leaves(self, boundary: Boundary, digest: str) -> bool:
        """Take note of a boundary, and tell whether its bytes are left to another rank."""
        kind = boundary.kind
        if kind in _GRADIENTS:
            self._with_gradient.add(boundary.name)
        by_all = kind not in _BY_OPTIMIZER or self._has_all(boundary)
        if not is_spare(boundary) or not (by_all or digest in self._left):
            return False
        if len(self._left) >= _REMEMBERED:
            self._left.clear()
        self._left.add(digest)
        return True

    def _has_all(self, boundary: Boundary) -> bool:
        if boundary.step == INIT_STEP:
            return boundary.kind is Kind.PARAM
        kind = boundary.kind
        found = self._covers(kind) or (kind is Kind.PARAM and self._covers(Kind.OPTIMIZER_STATE))
        self._had[kind].add(boundary.name)
        return found

    def _covers(self, kind: Kind) -> bool:
        """Tell whether this rank has had a kind of every parameter that has a gradient."""
        had = self._had[kind]
        sizes = len(self._with_gradient), len(had)
        if self._known.get(kind, (0, 0, False))[:2] != sizes:
            self._known[kind] = *sizes, bool(had) and bool(sizes[0]) and self._with_gradient <= had
        return self._known[kind][2]
