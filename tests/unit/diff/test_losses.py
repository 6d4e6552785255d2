"""One loss function goes by one name in both runs, and other terms of an objective by names of their own."""

from __future__ import annotations

from tensortrace.diff.losses import Names, one_name, under_name
from tensortrace.tracer.types import Entry, Kind, Meta

LABELS, VALUES = ("target", "sum"), ("sum",)


def losses(*calls: tuple[str, int, tuple[str, ...]]) -> list[Entry]:
    """Return the entries of losses (name, call, slots) in the order in which they are computed."""
    found = []
    for name, call, slots in calls:
        for slot in slots:
            found.append(
                Entry(
                    step=0, microbatch=0, kind=Kind.LOSS, name=name, slot=slot, call=call, event=len(found),
                    recompute=False, dtype="float32", local_shape=(), digest="0" * 32, meta=Meta(),
                    producers=(),
                )
            )  # fmt: skip
    return found


def under(names: Names, entries: list[Entry]) -> list[tuple[str, int]]:
    named = [under_name(entry, names) for entry in entries]
    return [(e.name, e.call) for e in named if e is not None and e.slot == "sum"]


def test_two_calls_of_one_function_meet_where_one_is_written_in_two_steps() -> None:
    a = losses(("cross_entropy", 0, LABELS), ("cross_entropy", 1, LABELS))
    b = losses(("nll_loss", 0, LABELS), ("cross_entropy", 0, LABELS))
    in_a, in_b = one_name(a, b)
    assert under(in_a, a) == under(in_b, b) == [("cross_entropy", 0), ("cross_entropy", 1)]


def test_a_loss_that_one_run_lacks_stays_under_its_own_name() -> None:
    a = losses(("cross_entropy", 0, LABELS), ("nll_loss", 0, LABELS))
    b = losses(("cross_entropy", 0, LABELS))
    assert one_name(a, b) == (Names(), Names())


def test_other_numbers_of_calls_with_labels_and_with_probabilities_are_other_terms() -> None:
    a = losses(("cross_entropy", 0, VALUES))
    b = losses(("cross_entropy", 0, LABELS), ("cross_entropy", 1, LABELS))
    in_a, in_b = one_name(a, b)
    assert under(in_a, a) == [("cross_entropy of values", 0)]
    assert under(in_b, b) == [("cross_entropy of labels", 0), ("cross_entropy of labels", 1)]


def test_one_call_with_labels_and_one_with_probabilities_are_one_loss() -> None:
    assert one_name(losses(("cross_entropy", 0, LABELS)), losses(("cross_entropy", 0, VALUES))) == (
        Names(),
        Names(),
    )


def test_a_loss_in_chunks_of_tokens_is_the_same_loss() -> None:
    a = losses(("cross_entropy", 0, LABELS))
    b = losses(*(("cross_entropy", call, LABELS) for call in range(4)))
    assert one_name(a, b) == (Names(), Names())
