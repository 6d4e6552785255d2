"""What a diff is asked about (--kinds, --include, --exclude): no alarm more, no mistake less than without."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, codes, first, place, tampering
from tests.simulated import NAMES, At, Program

STATE = (Kind.PARAM, Kind.OPTIMIZER_STATE)
SELECTIONS = [
    (Kind.PARAM,), (Kind.ACTIVATION,), (Kind.LOSS,), (Kind.ACTIVATION_GRAD,), (Kind.CLIPPED_GRAD,), STATE,
    (Kind.LOCAL_GRAD, Kind.PARAM),
]  # fmt: skip


@pytest.mark.parametrize("kinds", SELECTIONS, ids=",".join)
def test_correct_runs_are_equivalent_whatever_is_asked_about(judge: Judge, kinds: tuple[Kind, ...]) -> None:
    result = judge(Program(noise=1e-7), Program(ranks=2, order=3, steps=3), kinds=kinds)
    assert result.verdict == "equivalent", result.headline
    assert set(result.coverage.by_kind) <= set(kinds)


@pytest.mark.parametrize("kinds", SELECTIONS, ids=",".join)
def test_another_learning_rate_shows_in_whatever_is_asked_about(
    judge: Judge, kinds: tuple[Kind, ...]
) -> None:
    result = judge(Program(), Program(ranks=2, lr=2e-2), kinds=kinds)
    assert place(result)[2] in kinds
    (begins,) = first(result).unseen
    assert begins.startswith("schedule optimizer.0.group.0 lr of step 0: diverges")
    assert set(result.coverage.by_kind) <= set(kinds)


def test_a_mistake_that_what_is_asked_about_does_not_depend_on_is_not_told(judge: Judge) -> None:
    off = tampering(Kind.BUFFER, "none", "model", lambda v: v)
    wrong = tampering(Kind.PARAM, "hidden.weight", "model", lambda v: v * np.float32(1.1), step=2)
    result = judge(off(), wrong(), kinds=(Kind.ACTIVATION, Kind.LOSS))  # the last update: nothing follows
    assert result.verdict == "equivalent", result.headline
    assert place(judge(off(), wrong(), kinds=(Kind.PARAM,)))[:4] == (2, None, "param", "hidden.weight")


def test_an_origin_that_was_asked_about_is_one_with_its_cause(judge: Judge) -> None:
    result = judge(Program(), Program(lr=2e-2), kinds=(Kind.SCHEDULE, Kind.PARAM))
    assert place(result)[2:] == ("schedule", "optimizer.0.group.0", "lr")
    assert first(result).role == "origin"
    assert first(result).unseen == ()
    assert codes(result) == ["optimizer.hyperparameter"]


def test_names_are_included_and_excluded(judge: Judge) -> None:
    only = judge(Program(), Program(ranks=2), include=("hidden*",))
    assert only.verdict == "equivalent"
    assert 0 < only.coverage.compared < judge(Program(), Program(ranks=2)).coverage.compared
    wrong = tampering(Kind.ACTIVATION, "head", "out", lambda v: v * np.float32(1.1), step=2)
    assert place(judge(Program(), wrong(), include=("head",)))[:4] == (2, 0, "activation", "head")
    without = judge(Program(), wrong(), exclude=("head", "(root)"), kinds=(Kind.ACTIVATION,))
    assert without.verdict == "equivalent", without.headline
    assert all(m.kind != "step" for m in without.coverage.missing)


def test_a_glob_that_fits_no_name_is_told(judge: Judge) -> None:
    result = judge(
        Program(), Program(order=1), include=("hidden*", "heda*"), exclude=("nothing",), allow_missing=("x*",)
    )
    assert [note for note in result.notes if "fits no name" in note] == [
        "--include 'heda*' fits no name of either run; did you mean head?",
        "--exclude 'nothing' fits no name of either run",
        "--allow-missing 'x*' fits no name of either run",
    ]
    assert result.verdict == "equivalent"


def test_nothing_selected_is_trouble(judge: Judge) -> None:
    for options in ({"include": ("nothing*",)}, {"kinds": (Kind.BUFFER,)}, {"exclude": ("*",)}):
        with pytest.raises(BadRequest, match="nothing to compare"):
            judge(Program(), Program(), **options)


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ("b:9=a:0", "b has no step 9"),
        ("b:0=a:7", "a has no step 7"),
        ("a:0=b:0", "expected b:STEP=a:STEP"),
        ("b:-1=a:0", "expected b:STEP=a:STEP"),
        ("", "found ''"),
    ],
)
def test_steps_that_cannot_be_aligned_are_refused_in_one_line(
    judge: Judge, request_: str, complaint: str
) -> None:
    with pytest.raises(BadRequest, match=complaint) as caught:
        judge(Program(), Program(), align=request_)
    assert "\n" not in str(caught.value)


def test_declared_differences_that_were_not_asked_about_excuse_what_follows(judge: Judge) -> None:
    options = {"kinds": (Kind.PARAM,), "expect": ("schedule * lr factor=2",)}
    result = judge(Program(), Program(lr=2e-2), **options)
    assert result.headline.startswith("equivalent but for what was declared"), result.headline
    wrong = tampering(Kind.PARAM, "hidden.weight", "model", lambda v: v * np.float32(1.1), step=2)
    assert place(judge(Program(), wrong(lr=2e-2), **options))[:4] == (2, None, "param", "hidden.weight")


class Late(Program):
    """Is recorded from step 2 on, with the parameters that it begins with there."""

    def _step(self, step: int) -> None:
        if step == 2:
            for rank, params in enumerate(self.params):
                for name in NAMES:
                    at = At(step, rank, None, Kind.PARAM, name, "start")
                    self._put(at, params[name], shard="replicate")
        super()._step(step)

    def keeps(self, at: At) -> bool:
        return at.step >= 2


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_moments_of_a_recording_that_begins_late_are_not_taken_for_new(judge: Judge, optimizer: str) -> None:
    a, b = (Late(optimizer=optimizer, steps=4, noise=1e-7, ranks=n, order=n) for n in (1, 2))
    result = judge(a, b)
    assert result.verdict == "equivalent", result.headline
    assert result.coverage.by_kind["optimizer_state"] > 0
