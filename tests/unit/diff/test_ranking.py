"""Of several accepted causes the one that leaves less stands first; within round-off, the simpler one."""

from __future__ import annotations

from tensortrace.diff.causes.ranking import Accepted, ranked
from tensortrace.diff.result import Cause, Judgement


class Outcome:
    """Stands for an origin of which a tolerance of 1e-6 was allowed."""

    judgement = Judgement("error-model", 1e-6, 0.5, 5e5, "")


class Case:
    """Stands for what a detector sees of it."""

    origin, floor = Outcome(), 1e-6


def accepted(code: str, left: float, *, simplicity: int = 0, fitted: int = 0, number: int = 0) -> Accepted:
    return Accepted(Cause(code, code, None, None, 0.5, left, 1e-3), simplicity, fitted, number)


def order(*found: Accepted) -> list[str]:
    return [cause.code for cause in ranked(found, Case())]  # type: ignore[arg-type]


def test_what_leaves_more_than_round_off_comes_behind_what_leaves_less() -> None:
    loose, close = accepted("loose", 5e-4, simplicity=-2), accepted("close", 1e-7, simplicity=3)
    assert order(loose, close) == ["close", "loose"]


def test_residuals_within_round_off_are_ties_and_the_simpler_cause_comes_first() -> None:
    assert order(accepted("b", 1e-9, simplicity=1), accepted("a", 9e-7)) == ["a", "b"]


def test_a_fitted_number_comes_behind_a_known_one() -> None:
    assert order(accepted("fit", 0.0, fitted=1), accepted("known", 9e-7, number=1)) == ["known", "fit"]


def test_the_fit_of_a_detector_is_left_out_where_it_knows_the_number() -> None:
    assert order(accepted("fit", 0.0, simplicity=2, fitted=1), accepted("known", 9e-7)) == ["known"]
