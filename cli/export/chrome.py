"""A Chrome trace, which Perfetto opens: the boundaries of each rank as slices, a track for each rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from tensortrace.cli.export.chosen import nothing
from tensortrace.diff.opened import OpenTrace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.request import Request
from tensortrace.tracer.safe import safe
from tensortrace.tracer.types import INIT_STEP, Entry

CLOCK = "ordinal: a boundary lasts 1 µs, at its number on its rank; a trace holds no times"

_STEPS, _MICROBATCHES, _BOUNDARIES = 0, 1, 2
_LONGEST = 300

Event = dict[str, object]


def write(trace: OpenTrace, request: Request, about: dict[str, str], target: Path) -> int:
    """Write the events line by line and return the number of boundaries; raises BadRequest for none."""
    count = 0
    with target.open("x", encoding="utf-8") as out:
        head = {"displayTimeUnit": "ns", "otherData": about | {"time": CLOCK}}
        out.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        separator = ""
        for event in _events(trace, request):
            out.write(separator + json.dumps(event, allow_nan=False))
            separator = ",\n"
            count += event.get("tid") == _BOUNDARIES and event["ph"] == "X"
        out.write("\n]}\n")
    if not count:
        raise nothing(trace, request)
    return count


def _events(trace: OpenTrace, request: Request) -> Iterator[Event]:
    of_rank: dict[int, tuple[RankTrace, list[Entry]]] = {}
    for rank, entry in trace.recorded():
        if request.wants(rank.rank, entry):
            of_rank.setdefault(rank.rank, (rank, []))[1].append(entry)
    for rank, entries in of_rank.values():
        entries.sort(key=lambda entry: entry.event)
        yield _named("process_name", rank.rank, None, f"rank {rank.rank}")
        for tid, name in ((_STEPS, "steps"), (_MICROBATCHES, "microbatches"), (_BOUNDARIES, "boundaries")):
            yield _named("thread_name", rank.rank, tid, name)
        yield from _spans(rank.rank, _STEPS, entries, _step)
        yield from _spans(rank.rank, _MICROBATCHES, entries, _microbatch)
        for entry in entries:
            yield _boundary(rank.rank, entry)


def _named(what: str, rank: int, tid: int | None, name: str) -> Event:
    track = {} if tid is None else {"tid": tid}
    return {"ph": "M", "name": what, "pid": rank, **track, "args": {"name": name}}


def _spans(rank: int, tid: int, entries: list[Entry], label: Callable[[Entry], str]) -> Iterator[Event]:
    """Yield a slice for each run of boundaries of one label; a pipeline's microbatches come in several."""
    for name, held in groupby(entries, key=label):
        if name:
            run = list(held)
            first, last = run[0].event, run[-1].event
            yield {"ph": "X", "name": name, "pid": rank, "tid": tid, "ts": first, "dur": last - first + 1}


def _step(entry: Entry) -> str:
    return "init" if entry.step == INIT_STEP else f"step {entry.step}"


def _microbatch(entry: Entry) -> str:
    return "" if entry.microbatch is None else f"{_step(entry)}, microbatch {entry.microbatch}"


def _boundary(rank: int, entry: Entry) -> Event:
    stats = entry.stats
    shown = {
        "step": _step(entry).removeprefix("step "), "microbatch": entry.microbatch, "call": entry.call,
        "dtype": entry.dtype, "shape": list(entry.local_shape), "digest": entry.digest,
        "norm": stats.l2 if stats else None, "not finite": stats.nan + stats.inf if stats else None,
        "source": entry.meta.source and safe(entry.meta.source, limit=_LONGEST),
        "recompute": entry.recompute or None,
    }  # fmt: skip
    return {
        "ph": "X", "name": safe(f"{entry.kind} {entry.name} {entry.slot}", limit=_LONGEST), "cat": entry.kind,
        "pid": rank, "tid": _BOUNDARIES, "ts": entry.event, "dur": 1,
        "args": {name: value for name, value in shown.items() if value is not None},
    }  # fmt: skip
