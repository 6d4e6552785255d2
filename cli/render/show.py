"""What is in a trace as text: its summary, a list of tensors, or one tensor in full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tensortrace.cli.contents import Contents, RankRow, Run, Sizes
from tensortrace.cli.render import window
from tensortrace.cli.render.numbers import counted, moment, ranks, size, spans
from tensortrace.cli.render.page import Page
from tensortrace.cli.render.safe import safe
from tensortrace.cli.tensors import TensorRow
from tensortrace.tracer.types import INIT_STEP, Environment, LevelRule, Placement, Promise

SENTENCE = 600
SHORT = 160
RANKS = 16
"""Rows of the table of ranks."""

_LISTED = 8
"""Producers or parameters that are named in one line."""

_VALUES = 200
"""A tensor of more values is printed by its corners."""


def summary(page: Page, contents: Contents) -> None:
    """Write what a trace holds: ranks, steps, kinds with counts and sizes, how it ended, what is absent."""
    page.line((safe(contents.path, limit=SHORT), "bold"), f": {_extent(contents)}")
    if contents.run:
        page.line(("ran:", "bold"), f" {_run(contents.run)}")
    page.blank()
    _ranks(page, contents)
    page.blank()
    _kinds(page, contents)
    page.blank()
    for rung in contents.absent:
        text = f" {safe(rung.kind, limit=20)}: {safe(rung.reason, limit=SHORT)} ({ranks(rung.ranks)})"
        page.line(("absent:", "bold"), text)
    for title, text in window.lines(contents):
        page.line((title, "bold"), f" {text}")
    page.line(("selected:", "bold"), f" {_promise(contents.promise)}")
    page.line(("environment:", "bold"), f" {_environment(contents.environment)}")
    for problem in contents.problems:
        page.line(("problem:", "bold yellow"), f" {safe(problem, limit=SENTENCE)}")


def listing(page: Page, rows: Sequence[TensorRow], *, left_out: int) -> None:
    """Write one line per tensor: when, on which rank, what it is, its dtype, shape and L2 norm.

    A kind that all have is said once, above them.
    """
    kinds = {row.kind for row in rows}
    title = f"{next(iter(kinds))}" if len(kinds) == 1 else "boundary"
    page.table(
        ["step", "mb", "rank", "L2", "tensor", title],
        [
            (
                str(row.step),
                "-" if row.microbatch is None else str(row.microbatch),
                str(row.rank),
                "-" if row.stats is None or row.stats.l2 is None else f"{row.stats.l2:.6g}",
                f"{safe(row.dtype, limit=20)}{_shape(row.shape)}",
                _key(row) if len(kinds) > 1 else _key(row).removeprefix(f"{row.kind} "),
            )
            for row in rows
        ],
        right="step,mb,rank,L2",
    )
    leave_out(page, left_out)


def leave_out(page: Page, count: int) -> None:
    """Say how many tensors were left out, if any, and how to see them."""
    if count:
        page.line(f"… {count:,} more: narrow with --step, --kind, --name, --rank, or use --json", indent=2)


def tensor(page: Page, row: TensorRow, values: NDArray[np.generic] | None) -> None:
    """Write all that is known of one tensor, and its values where given."""
    part = "" if row.microbatch is None else f", microbatch {row.microbatch}"
    moment = "init" if row.step == "init" else f"step {row.step}"
    page.line((f"{moment}{part}: {_key(row)}", "bold"), f" on rank {row.rank}, event {row.event}")
    held = f"{safe(row.dtype, limit=20)} {_shape(row.shape)}, {size(row.raw_bytes)}, {_kept(row)}"
    page.line(held, indent=2)
    page.line(_stats(row), indent=2)
    page.line(f"digest {row.digest}", indent=2)
    for line in (_shard(row), _context(row), _members(row), _producers(row)):
        if line:
            page.line(line, indent=2)
    if values is not None:
        for line in _drawn(values).splitlines():
            page.line(line, indent=2, hang=1)


def _extent(contents: Contents) -> str:
    steps = counted(len(contents.steps), "step")
    if contents.steps:
        steps += f" ({spans(contents.steps)})"
    init = " and init" if contents.init else ""
    have = counted(len(contents.ranks), "rank")
    of = f" of {contents.world_size}" if contents.world_size != len(contents.ranks) else ""
    return f"{have}{of}, {steps}{init}, {counted(contents.microbatches, 'microbatch')} a step at most"


def _run(run: Run) -> str:
    command = safe(" ".join(run.command), limit=400) or "?"
    took = "had not ended" if run.seconds is None else f"took {run.seconds:.1f} s"
    code = "" if run.exit_code is None else f", exit code {run.exit_code}"
    return f"{command} ({moment(run.started_at)}, {took}{code})"


def _ranks(page: Page, contents: Contents) -> None:
    rows = [_rank(row) for row in contents.ranks[:RANKS]]
    title = ["rank", "device", "steps", "boundaries", "raw", "stored", "ended"]
    page.table(title, rows, right="rank,steps,boundaries,raw,stored")
    page.more(len(contents.ranks) - len(rows))


def _rank(row: RankRow) -> tuple[str, ...]:
    attempt = f", attempt {row.attempt}" if row.attempt else ""
    dropped = f", {counted(row.drops.count, 'boundary')} dropped" if row.drops.count else ""
    ended = safe(row.ended or "did not finish", limit=80) + attempt + dropped
    return (str(row.rank), safe(row.device or "?", limit=20), str(row.steps), *_sizes(row.sizes), ended)


def _kinds(page: Page, contents: Contents) -> None:
    rows = [(kind.kind.value, f"{kind.names:,}", *_sizes(kind.sizes)) for kind in contents.kinds]
    if len(rows) > 1:
        rows.append(("total", "", *_sizes(contents.total)))
    page.table(["kind", "names", "boundaries", "raw", "stored"], rows, right="names,boundaries,raw,stored")
    total = contents.total
    if total.sketches or total.statistics:
        page.line(
            f"of {total.sketches:,} boundaries a sketch was kept in place of values, "
            f"of {total.statistics:,} digest and statistics alone"
        )
    if total.copies:
        page.line(f"the bytes of {counted(total.copies, 'boundary')} were left to a rank that has a copy")


def _sizes(sizes: Sizes) -> tuple[str, str, str]:
    return f"{sizes.boundaries:,}", size(sizes.raw_bytes), size(sizes.stored_bytes)


def _promise(promise: Promise) -> str:
    parts = [f"level {safe(promise.level, limit=20)}", *map(_rule, promise.levels)]
    if promise.steps:
        parts.append(_steps(promise.steps))
    for title, texts in (("kinds", promise.kinds), ("names", promise.include), ("not", promise.exclude)):
        if texts:
            parts.append(f"{title} {safe(', '.join(texts), limit=SHORT)}")
    if promise.dedup_replicas:
        parts.append("copies of several ranks once")
    return "everything" if len(parts) == 1 and promise.level == "full" else "; ".join(parts)


def _rule(rule: LevelRule) -> str:
    scope = " ".join(part for part in (", ".join(rule.kinds), _steps(rule.steps)) if part)
    return f"{safe(scope, limit=SHORT)} at level {safe(rule.level, limit=20)}"


def _steps(ranges: Sequence[tuple[int, int]]) -> str:
    shown = (
        ("init" if first == INIT_STEP else str(first)) + ("" if first == last else f"-{last}")
        for first, last in ranges
    )
    return "steps " + ", ".join(shown) if ranges else ""


def _environment(environment: Environment) -> str:
    parts = [f"{name} {version}" for name, version in environment.versions.items()]
    if environment.commit:
        parts.append(f"commit {environment.commit[:12]}{' (dirty)' if environment.dirty else ''}")
    return safe(", ".join(parts), limit=SENTENCE) or "not recorded"


def _shape(shape: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _key(row: TensorRow) -> str:
    call = f" [{row.call}]" if row.call else ""
    again = " (recomputed)" if row.recompute else ""
    return f"{row.kind} {safe(row.name, limit=120)} {safe(row.slot, limit=60)}{call}{again}"


def _kept(row: TensorRow) -> str:
    if row.same_as is not None:
        return f"the same bytes as event {row.same_as}"
    if row.stored and row.raw_bytes and not row.stored_bytes:
        return "stored by another rank, which has a copy"
    if row.stored:
        return f"{size(row.stored_bytes)} stored"
    if row.stored_bytes:
        return "its bytes are lost"
    sketch = f", statistics and a sketch of {row.sketch}" if row.sketch else " and statistics"
    return f"only digest{sketch} were kept"


def _stats(row: TensorRow) -> str:
    stats = row.stats
    if stats is None:
        return "no statistics were kept"
    bad = f"; {stats.nan:,} NaN, {stats.inf:,} Inf" if stats.nan or stats.inf else ""
    named = (("min", stats.minimum), ("max", stats.maximum), ("mean", stats.mean), ("L2", stats.l2))
    figures = ", ".join(f"{name} {value:.6g}" for name, value in named if value is not None)
    return f"{stats.finite:,} finite elements{bad}" + (f": {figures}" if figures else "")


def _shard(row: TensorRow) -> str:
    shard = row.shard
    if shard is None:
        return ""
    axes = row.mesh.axes if row.mesh else tuple("?" * len(shard.placements))
    sizes = row.mesh.shape if row.mesh else (0,) * len(shard.placements)
    named = [
        f"{_placement(place)} over {safe(axis, limit=20)} ({index} of {count})"
        for place, axis, index, count in zip(shard.placements, axes, shard.coordinate, sizes, strict=False)
    ]
    whole = f", global {_shape(shard.global_shape)}" if shard.global_shape is not None else ""
    boxes = "".join(f", at {_shape(box.offset)}" for box in shard.boxes[:4])
    return f"layout: {', '.join(named)}{whole}{boxes}"


def _placement(place: Placement) -> str:
    argument = place.op if place.dim is None else str(place.dim)
    return f"{place.kind}({safe(argument, limit=20)})" if argument else place.kind


def _context(row: TensorRow) -> str:
    meta = row.meta
    parts = [
        f"called at {safe(meta.source, limit=SHORT)}" if meta.source else "",
        f"in {safe(meta.module, limit=60)}" if meta.module else "",
        "" if meta.training is None else ("training" if meta.training else "eval mode"),
        "no grad" if meta.grad_enabled is False else "",
        f"autocast {safe(meta.autocast, limit=20)}" if meta.autocast else "",
        f"by {safe(meta.op, limit=40)}" if meta.op else "",
        f"over {ranks(meta.ranks)}" if meta.ranks else "",
        safe(meta.optimizer, limit=40) if meta.optimizer else "",
        f"also named {safe(', '.join(meta.aliases), limit=SHORT)}" if meta.aliases else "",
    ]
    return ", ".join(part for part in parts if part)


def _producers(row: TensorRow) -> str:
    named = [f"{each.kind} {safe(each.name, limit=80)} {safe(each.slot, limit=40)}" for each in row.producers]
    more = f" and {len(named) - _LISTED} more" if len(named) > _LISTED else ""
    assumed = " (assumed)" if row.meta.assumed else ""
    return f"computed from {', '.join(named[:_LISTED])}{more}{assumed}" if named else ""


def _members(row: TensorRow) -> str:
    members = row.meta.members
    shown = safe(", ".join(members[:_LISTED]), limit=SHORT)
    return f"of {counted(len(members), 'parameter')}: {shown}" if members else ""


def _drawn(values: NDArray[np.generic]) -> str:
    return np.array2string(values, threshold=_VALUES, max_line_width=76, separator=", ")
