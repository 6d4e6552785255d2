"""Forward passes before the first backward, as microbatches of their own."""

from __future__ import annotations

from typing import Any

from tensortrace.diff.forwards import Held, apart
from tensortrace.tracer.types import ROOT, Entry, Kind, Meta


def entry(event: int, kind: Kind, name: str, slot: str, call: int, **fields: Any) -> tuple[int, Entry]:
    base: dict[str, Any] = {"step": 0, "microbatch": 0, "recompute": False, "dtype": "float32"}
    base |= {"local_shape": (), "digest": f"{event:032x}", "meta": Meta(), "producers": ()}
    made = {"event": event, "kind": kind, "name": name, "slot": slot, "call": call}
    return 0, Entry(**(base | made | fields))


def one_by_one() -> Held:
    """Return two microbatches, each forward and back."""
    found = []
    for number in range(2):
        at = 10 * number
        found += [
            entry(at, Kind.INPUT, ROOT, "in.0", 0, microbatch=number),
            entry(at + 1, Kind.ACTIVATION, "m", "out", 0, microbatch=number),
            entry(at + 2, Kind.LOSS, "mse_loss", "sum", 0, microbatch=number, producers=(at + 1,)),
            entry(at + 3, Kind.LOCAL_GRAD, "m.weight", "grad", 0, microbatch=number),
        ]
    return found


def forwards_first(*, loss_of_both: bool = False, calls_of_m: int = 1) -> Held:
    """Return two forward passes, then two backward passes; ``m`` is called some times in each."""
    found, event = [], 0

    def add(kind: Kind, name: str, slot: str, call: int, **fields: Any) -> int:
        nonlocal event
        found.append(entry(event, kind, name, slot, call, **fields))
        event += 1
        return event - 1

    last: list[int] = []
    for number in range(2):
        add(Kind.INPUT, ROOT, "in.0", number)
        for call in range(calls_of_m):
            last.append(add(Kind.ACTIVATION, "m", "out", number * calls_of_m + call))
        if not loss_of_both:
            add(Kind.LOSS, "mse_loss", "sum", number, producers=(last[-1],))
    if loss_of_both:
        add(Kind.LOSS, "mse_loss", "sum", 0, producers=tuple(last))
    for number in range(2):
        add(Kind.LOSS, "mse_loss", "weight", number)
        for call in reversed(range(calls_of_m)):
            add(Kind.ACTIVATION_GRAD, "m", "out", number * calls_of_m + call)
        add(Kind.LOCAL_GRAD, "m.weight", "grad", number)
    add(Kind.REDUCED_GRAD, "m.weight", "grad", 0)
    add(Kind.CLIPPED_GRAD, "m.weight", "grad", 0, microbatch=None)
    return found


def keys(entries: list[Entry]) -> list[tuple[str, str, int | None, int]]:
    return [(e.kind, e.slot, e.microbatch, e.call) for e in entries]


def test_every_forward_pass_with_a_loss_is_a_microbatch() -> None:
    left, right = apart([one_by_one()], [forwards_first()])
    assert left is None
    assert right is not None
    assert keys(right[0]) == [
        (Kind.INPUT, "in.0", 0, 0), (Kind.ACTIVATION, "out", 0, 0), (Kind.LOSS, "sum", 0, 0),
        (Kind.INPUT, "in.0", 1, 0), (Kind.ACTIVATION, "out", 1, 0), (Kind.LOSS, "sum", 1, 0),
        (Kind.LOSS, "weight", 0, 0), (Kind.ACTIVATION_GRAD, "out", 0, 0), (Kind.LOCAL_GRAD, "grad", 0, 0),
        (Kind.LOSS, "weight", 1, 0), (Kind.ACTIVATION_GRAD, "out", 1, 0), (Kind.LOCAL_GRAD, "grad", 1, 0),
        (Kind.REDUCED_GRAD, "grad", 1, 0), (Kind.CLIPPED_GRAD, "grad", None, 0),
    ]  # fmt: skip


def test_calls_within_a_pass_are_counted_from_0() -> None:
    _, right = apart([one_by_one()], [forwards_first(calls_of_m=2)])
    assert right is not None
    made = [(e.microbatch, e.call) for e in right[0] if e.kind is Kind.ACTIVATION]
    assert made == [(0, 0), (0, 1), (1, 0), (1, 1)]
    back = [(e.microbatch, e.call) for e in right[0] if e.kind is Kind.ACTIVATION_GRAD]
    assert back == [(0, 1), (0, 0), (1, 1), (1, 0)]


def test_calls_for_one_objective_are_one_microbatch() -> None:
    assert apart([one_by_one()], [forwards_first(loss_of_both=True)]) == (None, None)


def test_runs_that_call_the_model_alike_stay_as_they_are() -> None:
    assert apart([forwards_first()], [forwards_first()]) == (None, None)
    assert apart([one_by_one()], [one_by_one()]) == (None, None)


def test_what_an_earlier_call_returned_is_no_microbatch() -> None:
    held = list(forwards_first())
    second = next(n for n, (_, e) in enumerate(held) if e.kind is Kind.INPUT and e.call == 1)
    held[second] = entry(held[second][1].event, Kind.INPUT, ROOT, "in.0", 1, producers=(1,))
    assert apart([one_by_one()], [held]) == (None, None)
