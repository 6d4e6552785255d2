"""Wrong values in passes and inputs are named where they first stand, and nothing else is an origin."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tensortrace.tracer.types import Kind
from tests.integration.judged import (
    Judge,
    Place,
    codes,
    first,
    greatest_is_off,
    origins,
    place,
    tampering,
)
from tests.simulated import IGNORE, VOCABULARY, At, Documents, Program

LAYOUTS = pytest.mark.parametrize("layout", [{}, {"ranks": 2}, {"accumulate": 2}], ids=str)

PASSES: list[tuple[Kind, str, str]] = [
    (Kind.ACTIVATION, "embed", "out"),
    (Kind.ACTIVATION, "hidden", "out"),
    (Kind.ACTIVATION, "act", "out"),
    (Kind.ACTIVATION_GRAD, "act", "out"),
    (Kind.ACTIVATION_GRAD, "hidden", "out"),
    (Kind.LOCAL_GRAD, "hidden.weight", "grad"),
    (Kind.LOCAL_GRAD, "embed.weight", "grad"),
    (Kind.LOCAL_GRAD, "head.bias", "grad"),
]


def where(step: int, kind: Kind, name: str, slot: str, layout: dict[str, int]) -> Place:
    """Return the place of a boundary: of a microbatch where both runs have the same one."""
    whole = kind == Kind.LOCAL_GRAD or "accumulate" in layout
    return step, None if whole else 0, kind, name, slot


@LAYOUTS
@pytest.mark.parametrize(("kind", "name", "slot"), PASSES, ids=lambda part: str(part))
@pytest.mark.parametrize("step", [0, 2])
def test_one_element_off_by_1e_4_is_the_only_origin(
    judge: Judge, kind: Kind, name: str, slot: str, step: int, layout: dict[str, int]
) -> None:
    wrong = tampering(kind, name, slot, greatest_is_off, step=step, rank=0, microbatch=0)
    result = judge(Program(), wrong(**layout))
    assert place(result) == where(step, kind, name, slot, layout)
    assert origins(result) == {(kind, name)}


def test_the_rank_whose_rows_hold_the_wrong_element_is_named(judge: Judge) -> None:
    wrong = tampering(Kind.ACTIVATION, "hidden", "out", greatest_is_off, step=0, rank=1)
    assert first(judge(Program(), wrong(ranks=2))).ranks == (1,)


def test_one_element_of_a_reduced_gradient_off_by_1e_4_is_found(judge: Judge) -> None:
    wrong = tampering(Kind.REDUCED_GRAD, "hidden.weight", "grad", greatest_is_off, step=1)
    for reference in (1, 2):
        result = judge(Program(ranks=reference), wrong(ranks=2))
        assert place(result) == (1, None, "reduced_grad", "hidden.weight", "grad")
        assert origins(result) == {("reduced_grad", "hidden.weight")}


@LAYOUTS
@pytest.mark.parametrize(("kind", "name", "slot"), PASSES[1:6], ids=lambda part: str(part))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_element_that_is_not_finite_is_the_only_origin(
    judge: Judge, kind: Kind, name: str, slot: str, bad: float, layout: dict[str, int]
) -> None:
    def spoil(value: np.ndarray) -> np.ndarray:
        value.reshape(-1)[3] = bad
        return value

    if math.isinf(bad) and name == "hidden" and kind == Kind.ACTIVATION:
        pytest.skip("tanh of infinity is 1: what follows is finite, and wrong")
    wrong = tampering(kind, name, slot, spoil, step=0, rank=0, microbatch=0)
    with np.errstate(all="ignore"):
        result = judge(Program(), wrong(**layout))
    assert place(result) == where(0, kind, name, slot, layout)
    assert origins(result) == {(kind, name)}
    assert codes(result) == ["value.nonfinite"]
    assert result.causes[0].number == 1


@LAYOUTS
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_multiplied_by_what_is_not_finite_is_told_at_its_weight(
    judge: Judge, bad: float, layout: dict[str, int]
) -> None:
    wrong = tampering(Kind.LOSS, "cross_entropy", "weight", lambda value: value * bad, step=1)
    with np.errstate(all="ignore"):
        result = judge(Program(), wrong(**layout))
    assert place(result)[0] == 1
    assert place(result)[2:] == ("loss", "cross_entropy", "weight")
    assert codes(result) == ["value.nonfinite"]


def test_a_parameter_that_turns_nan_is_the_only_origin(judge: Judge) -> None:
    def spoil(value: np.ndarray) -> np.ndarray:
        value.reshape(-1)[3] = np.nan
        return value

    with np.errstate(all="ignore"):
        result = judge(Program(), tampering(Kind.PARAM, "hidden.weight", "model", spoil, step=1)(ranks=2))
    assert place(result) == (1, None, "param", "hidden.weight", "model")
    assert origins(result) == {("param", "hidden.weight")}
    assert codes(result) == ["value.nonfinite"]


@pytest.mark.parametrize(("kind", "name", "slot"), [PASSES[n] for n in (2, 3, 5)], ids=lambda part: str(part))
@LAYOUTS
@pytest.mark.parametrize(
    ("edit", "code", "number"),
    [
        (np.zeros_like, "value.zero", 0),
        (np.negative, "value.sign", -1),
        (lambda v: v * np.float32(1.5), "scale.other", 1.5),
    ],
    ids=["zero", "sign", "factor"],
)
def test_a_tensor_wrong_as_a_whole_is_named_with_how(
    judge: Judge, kind: Kind, name: str, slot: str, edit, code: str, number: float, layout: dict[str, int]
) -> None:  # type: ignore[no-untyped-def]
    result = judge(Program(), tampering(kind, name, slot, edit, step=1)(**layout))
    assert place(result) == where(1, kind, name, slot, layout)
    assert origins(result) == {(kind, name)}
    assert codes(result) == [code]
    assert result.causes[0].number == pytest.approx(number, rel=1e-6)


def test_a_constant_of_log_world_is_named(judge: Judge) -> None:
    # a log-sum-exp over ranks whose parts are equal is too large by log(ranks)
    shift = np.float32(math.log(2))
    wrong = tampering(Kind.ACTIVATION, "head", "out", lambda v: v + shift, step=0)
    result = judge(Program(), wrong(ranks=2))
    assert place(result) == (0, 0, "activation", "head", "out")
    assert codes(result) == ["value.offset"]
    assert result.causes[0].number == pytest.approx(math.log(2), rel=1e-5)
    assert result.causes[0].equals == "log of the world size (log(2))"


def to_bfloat16(value: np.ndarray) -> np.ndarray:
    bits = value.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


@LAYOUTS
@pytest.mark.parametrize(
    ("edit", "dtype"), [(to_bfloat16, "bfloat16"), (lambda v: v.astype(np.float16), "float16")]
)
@pytest.mark.parametrize(("kind", "name", "slot"), [PASSES[n] for n in (1, 2)], ids=lambda part: str(part))
def test_values_rounded_to_a_lower_precision_are_named_with_it(
    judge: Judge, kind: Kind, name: str, slot: str, edit, dtype: str, layout: dict[str, int]
) -> None:  # type: ignore[no-untyped-def]
    result = judge(Program(), tampering(kind, name, slot, edit, step=0)(**layout))
    assert place(result) == where(0, kind, name, slot, layout)
    assert origins(result) == {(kind, name)}
    assert codes(result) == ["precision.rounded"]
    assert result.causes[0].equals == dtype


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq"])
def test_a_moment_saved_in_a_lower_precision_is_named_with_it(judge: Judge, moment: str) -> None:
    kind = Kind.OPTIMIZER_STATE
    saved = tampering(kind, "hidden.weight", moment, to_bfloat16, step=-1)
    result = judge(Program(resumed=True), saved(resumed=True))
    assert place(result) == ("init", None, kind, "hidden.weight", moment)
    assert codes(result) == ["precision.rounded"]
    assert result.causes[0].equals == "bfloat16"


class Reading(Program):
    """Reads other documents in step 1."""

    def other(self, documents: Documents) -> Documents:
        raise NotImplementedError

    def documents(self, step: int) -> Documents:
        documents = super().documents(step)
        return self.other(documents) if step == 1 else documents


def other_token(documents: Documents) -> Documents:
    changed = documents[2].copy()
    changed[1] = changed[1] % (VOCABULARY - 1) + 1
    return [*documents[:2], changed, *documents[3:]]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "other",
    [other_token, lambda d: [*d[:-1], np.array([1, 2, 3, 4])]],
    ids=["one token", "one document"],
)
def test_a_different_row_is_named_at_the_input_and_the_diff_stops(judge: Judge, ranks: int, other) -> None:  # type: ignore[no-untyped-def]
    wrong = type("Other", (Reading,), {"other": staticmethod(other)})
    result = judge(Program(), wrong(ranks=ranks))
    assert place(result) == (1, 0, "input", "(root)", "in.0")
    assert origins(result) == {("input", "(root)")}
    assert codes(result) == ["input.different"]
    assert result.causes[0].number == 1  # row
    assert any("stopped at step 1" in note for note in result.notes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_only_one_run_was_given_are_named(judge: Judge, ranks: int) -> None:
    wrong = type("Fewer", (Reading,), {"other": staticmethod(lambda d: d[:-2])})
    result = judge(Program(), wrong(ranks=ranks))
    assert place(result) == (1, None, "input", "(root)", "rows")
    assert origins(result) == {("input", "(root)")}
    assert result.causes[0].code == "input.different"
    assert result.causes[0].number == 2


def test_rows_that_two_ranks_repeat_are_named(judge: Judge) -> None:
    class Repeating(Program):
        def share(self, documents: Documents, rank: int, microbatch: int) -> Documents:
            return documents[0::2]

    result = judge(Program(), Repeating(ranks=2))
    assert place(result)[:4] == (0, 0, "input", "(root)")
    assert origins(result) == {("input", "(root)")}
    assert codes(result) == ["input.duplicated_across_ranks"]


def test_rows_of_another_step_are_another_order_of_the_data(judge: Judge) -> None:
    class Shuffled(Program):
        def documents(self, step: int) -> Documents:
            return super().documents({1: 2, 2: 1}.get(step, step))

    result = judge(Program(), Shuffled())
    assert place(result)[:3] == (1, 0, "input")
    assert codes(result) == ["input.order"]
    assert result.causes[0].number == 8  # all rows of the step


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_label_is_named_with_its_rank_and_both_values(judge: Judge, ranks: int) -> None:
    def relabel(targets: np.ndarray) -> np.ndarray:
        valid = np.flatnonzero(targets != IGNORE)
        targets[valid[4]] = targets[valid[4]] % (VOCABULARY - 1) + 1
        return targets

    wrong = tampering(Kind.LOSS, "cross_entropy", "target", relabel, step=1, rank=ranks - 1)
    result = judge(Program(), wrong(ranks=ranks))
    assert place(result) == (1, 0, "loss", "cross_entropy", "target")
    assert origins(result) == {("loss", "cross_entropy")}
    assert {o.where.slot for o in result.origins} == {"target"}
    assert first(result).ranks == (ranks - 1,)
    assert codes(result) == ["input.different"]
    assert result.causes[0].number == 1
    assert f"rank {ranks - 1}" in result.causes[0].text


def test_what_follows_from_an_origin_is_a_receiver(judge: Judge) -> None:
    class Doubled(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            wrong = (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "hidden", "out")
            return value * np.float32(2) if wrong else value

    result = judge(Program(), Doubled(ranks=2))
    assert origins(result) == {("activation", "hidden")}
    followed = {(r.where.kind, r.where.name) for r in result.receivers if r.where.step == 0}
    assert {("activation", "act"), ("activation", "head"), ("loss", "cross_entropy")} <= followed
    assert {("activation_grad", "head"), ("local_grad", "head.weight")} <= followed
    assert {("optimizer_state", "head.weight"), ("param", "hidden.weight")} <= followed
    assert result.receivers_total == len(result.receivers)
