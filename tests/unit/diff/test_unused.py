"""Losses that are computed to be looked at are told from terms of the objective."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tensortrace.diff.unused import Kept, without_unused
from tensortrace.tracer.types import Entry, Kind, Meta

Call = tuple[str, int, int | None, bool]
"""Name, call, microbatch, and whether a gradient came through it."""


def entries(calls: Sequence[Call]) -> list[tuple[int, Entry]]:
    """Return what one rank records of these calls in step 0."""
    found = []
    for name, call, microbatch, used in calls:
        for slot in ("value", "sum", "count", *(("weight",) if used else ())):
            entry = Entry(
                event=len(found), step=0, microbatch=microbatch, kind=Kind.LOSS, name=name, slot=slot,
                dtype="float64", local_shape=(), call=call, meta=Meta(), digest="", stats=None,
            )  # fmt: skip
            found.append((0, entry))
    return found


def kept(keep: Kept, held: Sequence[tuple[int, Entry]]) -> list[tuple[str, int]]:
    """Return (name, call) of the calls that are left, by their values."""
    left = (keep(rank, entry) for rank, entry in held if entry.slot == "value")
    return [(entry.name, entry.call) for entry in left if entry is not None]


PLAIN = [("cross_entropy", 0, 0, True)]


def test_a_call_that_is_logged_before_the_loss_gives_its_number_to_it() -> None:
    logging = [("cross_entropy", 0, 0, False), ("cross_entropy", 1, 0, True), ("mse_loss", 0, 0, False)]
    a, b = entries(PLAIN), entries(logging)
    keep_a, keep_b, notes = without_unused(a, b)
    assert kept(keep_a, a) == [("cross_entropy", 0)]
    assert kept(keep_b, b) == [("cross_entropy", 0)]
    assert len(notes) == 2


def test_a_loss_under_no_grad_in_one_run_alone_is_left_out() -> None:
    a, b = entries(PLAIN), entries([*PLAIN, ("cross_entropy", 0, None, False)])
    keep_a, keep_b, notes = without_unused(a, b)
    assert kept(keep_a, a) == kept(keep_b, b) == [("cross_entropy", 0)]
    assert "without gradients" in notes[0]
    same, other, none = without_unused(b, b)
    assert kept(same, b) == kept(other, b) == [("cross_entropy", 0), ("cross_entropy", 0)]
    assert none == ()


def test_a_term_that_lost_its_gradient_is_no_logging() -> None:
    both = [*PLAIN, ("mse_loss", 0, 0, True)]
    a, b = entries(both), entries([*PLAIN, ("mse_loss", 0, 0, False)])
    _, keep_b, notes = without_unused(a, b)
    assert kept(keep_b, b) == [("cross_entropy", 0), ("mse_loss", 0)]
    assert notes == ()


def test_chunks_of_a_loss_all_count() -> None:
    a, b = entries(PLAIN), entries([("cross_entropy", n, 0, True) for n in range(4)])
    _, keep_b, notes = without_unused(a, b)
    assert kept(keep_b, b) == [("cross_entropy", n) for n in range(4)]
    assert notes == ()


def test_where_no_weight_was_recorded_nothing_is_left_out() -> None:
    a, b = (
        entries([("cross_entropy", 0, 0, False)]),
        entries([("cross_entropy", n, 0, False) for n in (0, 1)]),
    )
    _, keep_b, _ = without_unused(a, b)
    assert kept(keep_b, b) == [("cross_entropy", 0), ("cross_entropy", 1)]


def test_a_call_in_the_passes_of_one_optimizer_alone_is_left_out() -> None:
    """As the saturating loss of a generator, computed beside the one that is descended."""
    bce = "binary_cross_entropy_with_logits"
    both = [(bce, 0, 0, True), (bce, 1, 0, True), (bce, 0, 1, True)]
    a, b = entries(both), entries([*both[:2], (bce, 0, 1, False), (bce, 1, 1, True)])
    _, keep_b, notes = without_unused(a, b)
    assert kept(keep_b, b) == [(bce, 0), (bce, 1), (bce, 0)]
    assert len(notes) == 1


def test_a_loss_that_is_cut_into_rows_may_be_logged_too() -> None:
    rows = [("cross_entropy", n, 0, True) for n in range(4)]
    a, b = entries(PLAIN), entries([*rows, ("cross_entropy", 4, 0, False)])
    _, keep_b, _ = without_unused(a, b)
    assert kept(keep_b, b) == [("cross_entropy", n) for n in range(4)]


def test_one_of_two_terms_that_lost_its_gradient_in_some_steps_is_no_logging() -> None:
    both = [("cross_entropy", n, m, True) for m in (0, 1) for n in (0, 1)]
    a, b = entries(both), entries([*both[:3], ("cross_entropy", 1, 1, False)])
    _, keep_b, notes = without_unused(a, b)
    assert len(kept(keep_b, b)) == 4
    assert notes == ()


def test_what_both_runs_log_is_compared() -> None:
    a = entries([*PLAIN, ("cross_entropy", 1, 0, False)])
    b = entries([("cross_entropy", 0, 0, False), ("cross_entropy", 1, 0, True)])
    keep_a, keep_b, notes = without_unused(a, b)
    assert len(kept(keep_a, a)) == len(kept(keep_b, b)) == 2
    assert notes == ()


def test_a_loss_of_training_scores_without_gradients_is_no_evaluation() -> None:
    def scored(microbatch: int | None, number: int) -> tuple[int, Entry]:
        entry = entries([("cross_entropy", number, microbatch, False)])[0][1]
        return 0, replace(entry, kind=Kind.ACTIVATION, name="head", slot="out", event=100 + number)

    def of(scores: tuple[int, Entry], number: int) -> list[tuple[int, Entry]]:
        loss = entries([("cross_entropy", number, None, False)])
        return [(rank, replace(e, producers=(scores[1].event,))) for rank, e in loss]

    trained, evaluated = scored(0, 0), scored(None, 1)
    a = [*entries(PLAIN), trained, evaluated, *of(evaluated, 0)]
    b = [*entries(PLAIN), trained, *of(trained, 0), evaluated, *of(evaluated, 1)]
    keep_a, keep_b, notes = without_unused(a, b)
    assert kept(keep_a, a) == [("cross_entropy", 0), ("cross_entropy", 0)]
    assert kept(keep_b, b) == [("cross_entropy", 0), ("cross_entropy", 1)]
    assert len(notes) == 1
