"""Where tensors lie of which the program says so itself, in the terms of layout files."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from msgspec.structs import replace

from tensortrace.tracer.explicit import STATES
from tensortrace.tracer.mesh import coordinate
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.rules import LayoutFileError, RunLayout
from tensortrace.tracer.rules.pattern import BadPattern, Pattern, parse_pattern
from tensortrace.tracer.rules.run import MESH
from tensortrace.tracer.types import Entry, Mesh


def states(entry: Entry) -> bool:
    """Tell whether the program says in words how an entry's tensor lies."""
    return (entry.meta.text or "").startswith(STATES)


def with_stated(trace: Trace, layout: RunLayout | None) -> tuple[Trace, tuple[str, ...]]:
    """Return a trace in which tensors lie as the program says, and what it says in vain.

    The axes are those of ``layout``, else of a mesh that the rank has declared. What cannot be honoured is
    left as it is: it must not stand in the way of all else.
    """
    if not any(states(entry) for rank in trace.ranks for entry in rank.entries):
        return trace, ()
    why: dict[tuple[str, str], str] = {}
    ranks = tuple(_with_shards(rank, layout, why) for rank in trace.ranks)
    return Trace(trace.path, trace.manifest, ranks, trace.problems), tuple(why.values())


def _with_shards(rank: RankTrace, layout: RunLayout | None, why: dict[tuple[str, str], str]) -> RankTrace:
    entries = []
    for entry in rank.entries:
        if states(entry) and entry.shard is None:
            text = (entry.meta.text or "").removeprefix(STATES)
            try:
                entry = _placed(entry, text, rank, layout)
            except (BadPattern, LayoutFileError) as error:
                why.setdefault(
                    (entry.name, text), f"layout {text!r} of {entry.name} is not honoured: {error}"
                )
        entries.append(entry)
    found = copy.copy(rank)
    found.entries = tuple(entries)
    return found


def _placed(entry: Entry, text: str, rank: RankTrace, layout: RunLayout | None) -> Entry:
    pattern = parse_pattern(text)
    if layout is not None and pattern.axes() <= set(layout.mesh.axes):
        shard = layout.stated(text, entry.kind, entry.name, rank.rank, entry.local_shape)
        return replace(entry, shard=shard)
    for name, mesh in _meshes(rank, pattern):
        others = tuple(axis for axis in mesh.axes if axis not in pattern.axes())
        own = RunLayout(rank.folder, mesh, others, (), (), ())
        shard = own.stated(text, entry.kind, entry.name, rank.rank, entry.local_shape)
        return replace(entry, shard=replace(shard, mesh=name))
    if not pattern.axes():
        return entry
    raise BadPattern(
        f"no mesh of axes {', '.join(sorted(pattern.axes()))} is known, expected 'mesh' beside 'layout' or a "
        "layout file that has them"
    )


def _meshes(rank: RankTrace, pattern: Pattern) -> Iterator[tuple[str, Mesh]]:
    """Yield the declared meshes that have a pattern's axes and this rank, those of the fewest axes first."""
    meshes = rank.manifest.meshes if rank.manifest else {}
    fitting = [
        (name, mesh)
        for name, mesh in meshes.items()
        if name != MESH and pattern.axes() <= set(mesh.axes) and coordinate(mesh, rank.rank) is not None
    ]
    yield from sorted(fitting, key=lambda found: len(found[1].axes)) if pattern.axes() else ()
