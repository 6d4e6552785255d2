"""What the ranks hold of a planned comparison: copies that disagree, no known layout, stored precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tensortrace.diff.catalog import Item, StepView
from tensortrace.diff.logical import Unplaceable, no_layout
from tensortrace.diff.plan.comparison import Comparison, coarser_eps
from tensortrace.diff.replicas import left_out, odd_members, odd_ranks, values_of
from tensortrace.tracer.types import Kind


def stored_eps(entry: Comparison) -> float:
    """Return the spacing in which a tensor was stored: its last rounding, whatever it was summed in."""
    return 0.0 if entry.slot.slot == "weight" else coarser_eps((*entry.items_a, *entry.items_b))


def without_layout(entry: Comparison) -> Unplaceable | None:
    """Return why a tensor cannot be compared whose copies are none: they differ and are of another shape."""
    sides = ((entry.copies_a, entry.items_b), (entry.copies_b, entry.items_a))
    for copies, others in sides:
        shapes = {item.entry.local_shape for item in copies}
        if others and others[0].entry.local_shape not in shapes and odd_ranks(copies):
            return no_layout(sorted({rank for item in copies for rank in item.ranks}))
    return None


def disagree(copies: Sequence[Item], items: Sequence[Item]) -> bool:
    """Tell whether ranks that should hold the same tensor do not."""
    return bool(odd_members(items) or odd_ranks(copies))


def odd_of(entry: Comparison, side: Literal["a", "b"]) -> tuple[int, ...]:
    """Return the ranks of a run whose replica is not the one that it should be; see ``odd_ranks``."""
    if side == "a":
        return odd_members(entry.items_a) or odd_ranks(entry.copies_a, like=entry.items_b)
    return odd_members(entry.items_b) or odd_ranks(entry.copies_b, like=entry.items_a)


def disagreement(entry: Comparison, side: Literal["a", "b"]) -> tuple[tuple[int, ...], str]:
    """Return the odd ranks of a run whose replicas disagree, and the sentence that says so."""
    odd = odd_of(entry, side)
    ranks = ", ".join(map(str, odd))
    others = ", ".join(str(rank) for rank in holders(entry, side) if rank not in odd)
    differs = f"differs from rank {others}" if others else "each hold another value"
    copies = entry.copies_a if side == "a" else entry.copies_b
    grouped = "" if others else values_of(copies)
    text = f"replicas disagree in {side}: {grouped or f'rank {ranks} {differs}'}"
    if left := left_out(copies):
        text += f"; the bytes of rank {', '.join(map(str, left))} were not stored (--dedup-replicas)"
    return odd, text


def holders(entry: Comparison, side: Literal["a", "b"] = "b") -> list[int]:
    """Return the ranks of a run that hold the tensor or a part of it."""
    held = (*entry.items_a, *entry.copies_a) if side == "a" else (*entry.items_b, *entry.copies_b)
    return sorted({rank for item in held for rank in item.ranks})


def compute_eps(view: StepView) -> float:
    """Return the spacing of the coarsest dtype in which the step's modules computed.

    Where nothing of them was recorded losses tell: of what a loss returned, its sum is kept in float64.
    """
    found = [coarser_eps(items) for _, items in view.find(Kind.ACTIVATION, phase="train")]
    if not found:
        losses = view.find(Kind.LOSS, phase="train")
        found = [coarser_eps(items) for slot, items in losses if slot.slot == "value"]
    return max(found, default=0.0)
