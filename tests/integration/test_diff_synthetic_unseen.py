"""Where what a divergent boundary was computed from was not recorded, no origin is in view: that is said."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.diff.result import Result
from tensortrace.tracer.selection import Selection
from tensortrace.tracer.types import Kind, Promise
from tests.integration.judged import Judge, first, place
from tests.simulated import At, Program

GRADIENTS = (Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.CLIPPED_GRAD, Kind.SCHEDULE, Kind.OPTIMIZER_STATE)


class Mistaken(Program):
    """A program whose activation act out is wrong by noise, in step 1."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.name, at.slot, at.step) == (Kind.ACTIVATION, "act", "out", 1):
            noise = np.random.default_rng(3).normal(size=value.shape)
            return np.asarray(value + noise, value.dtype)
        return value


def judged(judge: Judge, promise: Promise, both: bool = True, wrong: type[Program] = Mistaken) -> Result:
    """Compare a correct program with a wrong one, of both of which only what was promised is recorded."""

    def selected(program: type[Program]) -> Program:
        class Selected(program):  # type: ignore[misc, valid-type]
            def keeps(self, at: At) -> bool:
                return Selection(promise).wants(at.kind, at.name, step=at.step)

        return Selected()

    paths = (
        judge.write(selected(Program), promise=promise) if both else judge.write(Program()),
        judge.write(selected(wrong), promise=promise),
    )
    return judge(*paths)


def test_a_complete_recording_has_its_origin_in_view(judge: Judge) -> None:
    result = judge(Program(), Mistaken())
    assert place(result) == (1, 0, "activation", "act", "out")
    assert first(result).unseen == ()
    assert "view" not in result.headline
    assert not any("in view" in hint for hint in result.hints)


def test_of_gradients_alone_the_passes_are_out_of_view(judge: Judge) -> None:
    result = judged(judge, Promise(kinds=GRADIENTS))
    assert place(result)[:3] == (1, None, "local_grad")
    assert first(result).unseen == ("activation_grad, loss, activation: not recorded in a and b (--kinds)",)
    assert "unexplained; no origin in view; " in result.headline
    assert "record with --kinds activation,loss,activation_grad,local_grad," in result.hints[-1]


def test_one_run_that_left_a_kind_out_is_named(judge: Judge) -> None:
    kinds = tuple(k for k in Kind if k not in (Kind.ACTIVATION, Kind.INPUT, Kind.LOSS))
    result = judged(judge, Promise(kinds=kinds), both=False)
    assert any("not recorded in b (--kinds)" in text for text in first(result).unseen)


def test_a_module_left_out_between_two_that_were_recorded_is_named(judge: Judge) -> None:
    class Hidden(Program):
        """Its hidden layer is wrong, and so is what is computed from it."""

        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot, at.step) == (Kind.ACTIVATION, "hidden", "out", 1):
                noise = np.random.default_rng(3).normal(size=value.shape)
                return np.asarray(value + noise, value.dtype)
            return value

    result = judged(judge, Promise(exclude=("hidden*",)), wrong=Hidden)
    assert place(result) == (1, 0, "activation", "act", "in.0")
    (text,) = {t.replace("in a", "in X").replace("in b", "in X") for t in first(result).unseen}
    assert text.startswith("hidden: not recorded in X (--exclude hidden*)")
    assert "record without --exclude 'hidden*'" in result.hints[-1]


def test_a_module_left_out_elsewhere_is_no_matter(judge: Judge) -> None:
    result = judged(judge, Promise(exclude=("embed*",)))
    assert place(result) == (1, 0, "activation", "act", "out")
    assert first(result).unseen == ()


def test_a_module_whose_parameters_were_left_out_is_not_in_view(judge: Judge) -> None:
    class Head(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot, at.step) == (Kind.ACTIVATION, "head", "out", 1):
                return np.asarray(value + np.random.default_rng(3).normal(size=value.shape), value.dtype)
            return value

    kinds = tuple(k for k in Kind if k != Kind.PARAM)
    result = judged(judge, Promise(kinds=kinds), wrong=Head)
    assert place(result) == (1, 0, "activation", "head", "out")
    assert first(result).unseen == ("param: not recorded in a and b (--kinds)",)


def test_a_recording_that_begins_later_does_not_show_the_state_before_it(judge: Judge) -> None:
    class Earlier(Program):
        """A parameter is wrong after step 0."""

        def before_update(self, step: int, rank: int) -> None:
            if step == 0:
                self.params[rank]["hidden.weight"] = self.params[rank]["hidden.weight"] * np.float32(1.1)

    result = judged(judge, Promise(steps=((1, 2),)), wrong=Earlier)
    assert place(result) == (1, 0, "activation", "hidden", "out")
    assert first(result).unseen == ("the state before step 1: not compared (hidden.weight, hidden.bias)",)


def test_what_the_diff_was_told_to_leave_out_is_named(judge: Judge) -> None:
    result = judge(Program(), Mistaken(), kinds=(Kind.LOCAL_GRAD,))
    [text] = first(result).unseen  # where it comes from is compared all the same
    assert text.endswith("diverges, and was left out here")
    assert "compare without --kinds and --include" in result.hints[-1]


class Updated(Program):
    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.name, at.step) == (Kind.PARAM, "hidden.weight", 1):
            return np.asarray(value + np.random.default_rng(3).normal(size=value.shape), value.dtype)
        return value


def test_an_update_that_its_inputs_do_not_explain_is_in_view(judge: Judge) -> None:
    kinds = (Kind.CLIPPED_GRAD, Kind.SCHEDULE, Kind.OPTIMIZER_STATE, Kind.PARAM)
    result = judged(judge, Promise(kinds=kinds), wrong=Updated)
    assert place(result) == (1, None, "param", "hidden.weight", "model")
    assert first(result).unseen == ()


@pytest.mark.parametrize(
    "kinds", [(Kind.ACTIVATION,), (Kind.PARAM, Kind.OPTIMIZER_STATE), (Kind.LOCAL_GRAD,)]
)
def test_noise_of_updates_is_no_divergence_of_what_is_chosen(judge: Judge, kinds: tuple[Kind, ...]) -> None:
    setups = {"steps": 8, "lr": 0.1}
    assert judge(Program(**setups), Program(ranks=2, **setups), kinds=kinds).verdict == "equivalent"
    recorded = [
        judge.write(Program(ranks=n, **setups), promise=Promise(kinds=(*kinds, Kind.INPUT))) for n in (1, 2)
    ]
    assert judge(*recorded).verdict == "equivalent"


def test_a_difference_far_above_the_noise_of_updates_is_found_whatever_was_recorded(judge: Judge) -> None:
    kinds = (Kind.ACTIVATION, Kind.INPUT)
    result = judged(judge, Promise(kinds=kinds), wrong=Updated)
    assert place(result)[:3] == (2, 0, "activation")
    assert first(result).unseen
