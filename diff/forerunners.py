"""Which step passes without gradients belong to that ran between an update and the next step's first forward.

A recording counts them to the step that has ended, since nobody knows then whether another one follows. A
teacher's or a reference model's pass is what the next step begins with, and so is what a generator computes,
in training mode, for a critic whose forward comes first. An evaluation is not: it ends with another pass of
what is trained, or with a loss of no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import INIT_STEP, ROOT, Entry, Kind

_UPDATES = frozenset({Kind.PARAM, Kind.OPTIMIZER_STATE, Kind.SCHEDULE})
_OF_PASSES = frozenset({Kind.INPUT, Kind.ACTIVATION})


def steps_of_passes(ranks: Iterable[RankTrace]) -> Callable[[int, Entry], Entry]:
    """Return what gives an entry of a rank the step that it belongs to."""
    found = {rank.rank: _moved(rank.entries) for rank in ranks}
    return lambda rank, entry: replace(entry, step=step) if (step := found[rank].get(entry.event)) else entry


def _moved(entries: Iterable[Entry]) -> Mapping[int, int]:
    """Return the step of each event of one rank that belongs to the step after its own."""
    entries = tuple(entries)
    passes = [
        e
        for e in entries
        if e.microbatch is None
        and (e.kind == Kind.LOSS or (e.kind in _OF_PASSES and not e.meta.grad_enabled))
    ]
    roots = {e.name for e in passes if e.kind == Kind.INPUT}
    if not roots:
        return {}
    of_gradients = [e for e in entries if e.kind == Kind.INPUT and e.microbatch is not None]
    known = roots | {e.name for e in of_gradients}
    trained = {_root(e.name, known) for e in entries if e.kind == Kind.LOCAL_GRAD} | {ROOT}
    first = {e.step: e.name for e in reversed(of_gradients)}  # the root whose forward begins a step
    in_training = {e.name for e in passes if e.kind == Kind.ACTIVATION and e.meta.training}

    names = {e.event: e.name for e in passes if e.kind in _OF_PASSES}

    def is_evaluation(entry: Entry) -> bool:
        if entry.kind == Kind.LOSS:  # of a model that is not trained it may be what tokens are worth to it
            roots_of = {_root(names[e], known) for e in entry.producers if e in names}
            return not roots_of or not roots_of.isdisjoint(trained)
        root = _root(entry.name, known)
        helps = root in in_training and first.get(entry.step + 1, root) != root
        return root in trained and not helps

    since: dict[int, int] = {}  # the event after which what a step holds belongs to the next one
    for entry in entries:
        if entry.kind in _UPDATES and entry.slot != "start" and entry.step != INIT_STEP:
            since[entry.step] = entry.event
    for entry in passes:
        if is_evaluation(entry) and entry.event > since.get(entry.step, entry.event):
            since[entry.step] = entry.event
    steps = {entry.step for entry in entries}
    return {
        e.event: e.step + 1
        for e in passes
        if e.step in since and e.event > since[e.step] and e.step + 1 in steps
    }


def _root(name: str, roots: Iterable[str]) -> str:
    """Return the root that a module or a parameter belongs to: the longest name that it begins with."""
    fitting = (root for root in roots if name == root or name.startswith(f"{root}."))
    return max(fitting, key=len, default=ROOT)
