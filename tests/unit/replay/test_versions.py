"""Which recorded value a call computed with, by the order of events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tensortrace.diff.catalog import Catalog
from tensortrace.replay.modules.given import NoFormula
from tensortrace.replay.modules.versions import At, Versions
from tensortrace.tracer.types import Entry, Kind, Meta

HELD = ("w",)


def record(event: int, step: int, slot: str, digest: str, kind: Kind = Kind.PARAM, **meta: Any) -> Entry:
    name = "bn.running_mean" if kind == Kind.BUFFER and not meta else "w"
    return entry(event, step, kind, name, slot, digest, **meta)


def call(event: int, step: int, microbatch: int | None = 0, *, training: bool = True) -> Entry:
    return entry(event, step, Kind.ACTIVATION, "bn", "in.0", "x", microbatch, training=training)


def entry(
    event: int, step: int, kind: Kind, name: str, slot: str, digest: str, microbatch: int | None = None,
    **meta: Any,
) -> Entry:  # fmt: skip
    return Entry(
        event=event, step=step, microbatch=microbatch, kind=kind, name=name, slot=slot, dtype="float32",
        local_shape=(1,), meta=Meta(**meta), digest=digest,
    )  # fmt: skip


def versions(*entries: Entry, held: bool) -> Versions:
    extra = [entry(999, 0, Kind.SCHEDULE, "optimizer.0.group.0", "lr", "l", members=HELD)] if held else []
    steps = sorted({e.step for e in entries})

    def recorded(step: int) -> list[tuple[object, Entry]]:
        return [(SimpleNamespace(rank=0), e) for e in (*entries, *extra) if e.step == step]

    catalog = SimpleNamespace(steps=[s for s in steps if s >= 0], has_init=-1 in steps, recorded=recorded)
    return Versions(cast(Catalog, catalog))


def found(of: Versions, event: int, *, trains: bool = True, name: str = "w") -> str | None:
    try:
        return of.at(name, At(0, "bn", event, trains)).digest
    except NoFormula:
        return None


COPY: dict[str, Any] = {"kind": Kind.BUFFER, "text": "copy"}
UPDATED = (record(0, -1, "model", "a"), call(2, 0), record(5, 0, "model", "b"))


@pytest.mark.parametrize(
    ("entries", "held", "event", "trains", "digest"),
    [
        (UPDATED, True, 2, True, "a"),
        (UPDATED, True, 7, False, "b"),  # no optimizer has stepped since
        (UPDATED, False, 7, False, None),  # anything may have written it since
        ((*UPDATED, record(9, 1, "start", "c"), call(10, 1)), True, 7, False, None),  # when is not told
        ((*UPDATED, record(9, 1, "start", "c"), call(10, 1)), True, 10, True, "c"),
        ((*UPDATED, call(10, 1)), False, 7, False, "b"),  # the next window found it as it was
        ((record(3, 0, "start", "a"), record(5, 0, "model", "b"), call(8, 1)), True, 8, True, "b"),
        ((record(3, 0, "start", "a"), record(9, 0, "model", "b", **COPY)), False, 7, False, None),
        ((record(3, 0, "start", "a"), record(9, 0, "model", "a", **COPY)), False, 7, False, "a"),
        ((record(5, 0, "model", "b"),), True, 2, True, None),  # nothing was recorded before
        ((record(0, -1, "model", "a"), record(1, 0, "start", "b")), True, 7, False, None),  # others write it
    ],
)  # fmt: skip
def test_a_parameter_is_known_where_no_write_can_have_come_between(
    entries: tuple[Entry, ...], held: bool, event: int, trains: bool, digest: str | None
) -> None:
    assert found(versions(*entries, held=held), event, trains=trains) == digest


@pytest.mark.parametrize(
    ("others", "event", "digest"),
    [
        ((), 7, "a"),
        ((call(4, 0),), 7, None),  # it has been called in training since it was recorded
        ((call(9, 1), record(12, 1, "model", "b", Kind.BUFFER)), 7, "a"),
        ((record(12, 1, "model", "b", Kind.BUFFER),), 7, None),  # the program wrote it, nobody knows when
        ((call(7, 1), record(12, 1, "model", "b", Kind.BUFFER)), 7, "a"),  # the call that writes it itself
    ],
)
def test_running_statistics_are_known_where_their_module_has_not_trained(
    others: tuple[Entry, ...], event: int, digest: str | None
) -> None:
    held = versions(record(0, -1, "model", "a", Kind.BUFFER), *others, held=False)
    assert found(held, event, trains=False, name="bn.running_mean") == digest
