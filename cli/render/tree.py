"""A tree of modules as text: one node a line, what it and all below it hold."""

from __future__ import annotations

from tensortrace.cli.modules import Node, fitting_depth, rows, steps_of
from tensortrace.cli.render.numbers import counted, number, size
from tensortrace.cli.render.page import Page
from tensortrace.cli.render.safe import safe
from tensortrace.tracer.types import Entry, Kind

LETTERS: dict[Kind, str] = {
    Kind.INPUT: "i", Kind.ACTIVATION: "a", Kind.LOSS: "l", Kind.ACTIVATION_GRAD: "A", Kind.LOCAL_GRAD: "L",
    Kind.REDUCED_GRAD: "R", Kind.UNSCALED_GRAD: "U", Kind.CLIPPED_GRAD: "C", Kind.SCHEDULE: "s",
    Kind.OPTIMIZER_STATE: "o", Kind.PARAM: "p", Kind.BUFFER: "b", Kind.RNG: "r", Kind.COLLECTIVE: "c",
    Kind.OPERATION: "x", Kind.OPERATION_GRAD: "X",
}  # fmt: skip
"""A letter for each kind, so that a node's kinds fit a column; gradients in capitals."""

GUIDES, PLAIN = ("├ ", "└ ", "│ ", "  "), ("|- ", "`- ", "|  ", "   ")
"""A child, the last one, and what leads past each to nodes below; the second where a stream has no lines."""


def tree(page: Page, root: Node, *, depth: int | None) -> None:
    """Draw the tree to a depth, by default as deep as fits a page, and what its letters and norms mean."""
    deepest = depth if depth is not None else fitting_depth(root)
    kinds = [kind for kind in Kind if kind in root.total.kinds]
    drawn: list[tuple[str, ...]] = []
    open_above: list[bool] = []
    hidden = 0
    guides = GUIDES if page.look.unicode else PLAIN
    for level, is_last, node in rows(root, deepest):
        del open_above[level:]
        lead = "".join(guides[3] if closed else guides[2] for closed in open_above[1:])
        own = (guides[1] if is_last else guides[0]) if level else ""
        open_above.append(is_last)
        below = bool(node.children) and level + 1 == deepest
        hidden += below
        label = f"{lead}{own}{safe(node.label, limit=60)}{'.*' if below else ''}"
        drawn.append((label, *_cells(node, kinds)))
    drawn.append(("total", *_cells(root, kinds)))
    heads = ["name", "kinds", "boundaries", "raw", "steps", "L2"]
    page.table(heads, drawn, right="boundaries,raw,steps,L2")
    page.blank()
    legend = ", ".join(f"{LETTERS[kind]} {kind}" for kind in kinds)
    page.line(("kinds:", "bold"), f" {legend}")
    page.line(("L2:", "bold"), " of the parameter, output or gradient, in its last step on its lowest rank")
    if hidden:
        text = f" what lies below {counted(hidden, 'node')} is summed: --depth {deepest + 1}"
        page.line((".*:", "bold"), text)


def _cells(node: Node, kinds: list[Kind]) -> tuple[str, ...]:
    total = node.total
    letters = "".join(LETTERS[kind] if kind in total.kinds else "-" for kind in kinds)
    norm = "" if total.last is None else _norm(total.last[1])
    return letters, f"{total.boundaries:,}", size(total.raw_bytes), str(steps_of(total)), norm


def _norm(entry: Entry) -> str:
    """Return the norm of a tensor, or how much of it is not finite."""
    stats = entry.stats
    if stats is None:
        return "-"
    if stats.nan or stats.inf:
        return f"{stats.nan:,} NaN" if stats.nan else f"{stats.inf:,} Inf"
    return number(stats.l2) if stats.l2 is not None else "-"
