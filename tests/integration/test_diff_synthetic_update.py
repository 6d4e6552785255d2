"""Mistakes in schedule, optimizer and parameters are named where they act, with their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensortrace.tracer.types import Kind, Meta
from tests.integration.judged import (
    Judge,
    assert_equivalent,
    codes,
    first,
    greatest_is_off,
    origin_steps,
    origins,
    place,
    tampering,
)
from tests.simulated import BIASES, NAMES, Arrays, At, Program

DECAYED = tuple(n for n in NAMES if n not in BIASES)
Groups = list[tuple[tuple[str, ...], dict[str, float]]]
State = dict[str, Arrays]


class AfterForward(Program):
    """Meddles with the optimizer's state before the update of step 1."""

    meddle: Callable[[State], None]

    def before_update(self, step: int, rank: int) -> None:
        if step == 1:
            type(self).meddle(self.state[rank])


def meddling(how: Callable[[State], None]) -> type[AfterForward]:
    return type("Meddling", (AfterForward,), {"meddle": staticmethod(how)})


def test_a_scheduler_that_begins_to_be_stepped_per_microbatch(judge: Judge) -> None:
    class Slipping(Program):
        def position(self, step: int) -> int:
            return step if step < 2 else 2 * step - 1  # 0, 1, 3, 5, 7

    result = judge(Program(steps=5, accumulate=2), Slipping(steps=5, accumulate=2))
    assert place(result)[:4] == (2, None, "schedule", "scheduler.0")
    assert codes(result)[0] == "schedule.position"
    assert "once per microbatch" in result.causes[0].text
    assert result.causes[0].number == 2


@pytest.mark.parametrize("layout", [{"accumulate": 2}, {"ranks": 2, "accumulate": 2}], ids=str)
def test_a_scheduler_stepped_per_microbatch_is_named_with_the_count(
    judge: Judge, layout: dict[str, int]
) -> None:
    class Hasty(Program):
        def position(self, step: int) -> int:
            return 2 * step + 1  # stepped after both microbatches, the update in between

    result = judge(Program(), Hasty(**layout))
    assert place(result) == (0, None, "schedule", "scheduler.0", "position")
    assert origins(result) == {("schedule", "scheduler.0")}  # every lr is its receiver
    assert codes(result) == ["schedule.position"]
    assert result.causes[0].number == 2
    assert "1 for 0, 3 for 1, 5 for 2" in result.causes[0].text


def test_a_scheduler_off_by_one_is_named_with_its_shift(judge: Judge) -> None:
    class Ahead(Program):
        def position(self, step: int) -> int:
            return step + 1

    result = judge(Program(), Ahead(ranks=2))
    assert origins(result) == {("schedule", "scheduler.0")}
    assert codes(result) == ["schedule.position"]
    assert result.causes[0].number == 1
    # step 0 of b has the rate of a's step 1: 0.01 (1 + cos(π/20)) / 2
    assert any("0.0099384" in line and "equals" in line for line in result.causes[0].evidence)


@pytest.mark.parametrize(
    ("setting", "slot", "value", "groups"),
    [
        ({"lr": 2e-2}, "lr", 2e-2, {0, 1}),
        ({"weight_decay": 0.2}, "weight_decay", 0.2, {0}),
        ({"betas": (0.9, 0.999)}, "betas.1", 0.999, {0, 1}),
        ({"betas": (0.8, 0.99)}, "betas.0", 0.8, {0, 1}),
    ],
    ids=["lr", "weight decay", "second beta", "first beta"],
)
def test_a_setting_of_the_update_is_named_with_its_value(
    judge: Judge, setting: dict[str, float], slot: str, value: float, groups: set[int]
) -> None:
    result = judge(Program(), Program(ranks=2, **setting))
    assert place(result) == (0, None, "schedule", "optimizer.0.group.0", slot)
    assert origins(result) == {("schedule", f"optimizer.0.group.{n}") for n in groups}
    assert {o.where.slot for o in result.origins} == {slot}
    assert codes(result) == ["optimizer.hyperparameter"]
    assert result.causes[0].number == value


def test_groups_that_were_mixed_up_are_named_as_such(judge: Judge) -> None:
    class Swapped(Program):
        def groups(self) -> Groups:
            (decayed, yes), (plain, no) = super().groups()
            return [(decayed, no), (plain, yes)]

    result = judge(Program(), Swapped())
    assert place(result) == (0, None, "schedule", "optimizer.0.group.0", "weight_decay")
    assert {o.where.slot for o in result.origins} == {"weight_decay"}
    assert codes(result) == ["optimizer.hyperparameter"]
    assert result.causes[0].number == 0
    assert "groups are mixed up" in result.causes[0].text


def test_one_parameter_in_the_wrong_group_is_named_by_its_name(judge: Judge) -> None:
    class Moved(Program):
        def groups(self) -> Groups:
            (decayed, yes), (_, no) = super().groups()
            return [((*decayed, "hidden.bias"), yes), (("head.bias",), no)]

    result = judge(Program(), Moved(ranks=2))
    assert origins(result) == {("schedule", "optimizer.0.group.0")}
    assert codes(result) == ["optimizer.hyperparameter"]
    assert result.causes[0].number == pytest.approx(0.1)
    assert "hidden.bias" in result.causes[0].text


def test_groups_in_another_order_are_the_same_groups(judge: Judge) -> None:
    class Reordered(Program):
        def groups(self) -> Groups:
            return super().groups()[::-1]

    assert judge(Program(), Reordered()).verdict == "equivalent"


def test_a_parameter_that_no_optimizer_holds_is_named(judge: Judge) -> None:
    class Forgotten(Program):
        def groups(self) -> Groups:
            return [(tuple(n for n in m if n != "hidden.weight"), own) for m, own in super().groups()]

    result = judge(Program(), Forgotten(ranks=2))
    assert place(result) == (0, None, "schedule", "optimizer.0.group.0", "members")
    assert origins(result) == {("schedule", "optimizer.0.group.0")}
    assert result.causes[0].code == "optimizer.param_missing"
    assert "hidden.weight" in result.causes[0].text


def test_a_step_that_one_optimizer_leaves_out_is_no_parameter_without_optimizer(judge: Judge) -> None:
    class LeftOut(Program):
        def before_update(self, step: int, rank: int) -> None:
            self.left_out = step == 1

        def groups(self) -> Groups:
            return super().groups()[: 1 if self.left_out else 2]

    result = judge(Program(), LeftOut())
    assert place(result) == (1, None, "schedule", "optimizer.0.group.1", "members")
    assert codes(result)[0] == "boundary.missing"
    assert "makes no step in step 1 of b, as it does in step 0, 2" in result.causes[0].text


class Cycled(Program):
    """A schedule that moves the learning rate and one of the betas."""

    def _hypers(self, rate: float) -> dict[str, float]:
        return super()._hypers(rate) | {"betas.0": 0.8 + rate}


def test_what_a_scheduler_moves_follows_from_its_position(judge: Judge) -> None:
    class Ahead(Cycled):
        def position(self, step: int) -> int:
            return super().position(step) + (step > 0)

    result = judge(Cycled(), Ahead())
    assert place(result) == (1, None, "schedule", "scheduler.0", "position")
    assert codes(result) == ["schedule.position"]
    assert origin_steps(result) == {1}  # what it is in step 2 follows from that


@pytest.mark.parametrize("since", [0, 1])
def test_a_parameter_that_the_optimizer_passes_over_is_named(judge: Judge, since: int) -> None:
    class Passing(Program):
        def updates(self, step: int, rank: int, name: str) -> bool:
            return name != "hidden.weight" or step < since

    result = judge(Program(), Passing())
    assert place(result)[:4] == (since, None, "optimizer_state", "hidden.weight")
    assert {name for _, name in origins(result)} == {"hidden.weight"}
    assert result.causes[0].code == "optimizer.param_frozen"
    assert result.causes[0].number == 0


def test_a_parameter_without_a_gradient_is_named_as_frozen(judge: Judge) -> None:
    class Frozen(Program):
        def keeps(self, at: At) -> bool:
            return at.name != "hidden.weight" or at.kind == Kind.PARAM

        def updates(self, step: int, rank: int, name: str) -> bool:
            return name != "hidden.weight"

    result = judge(Program(), Frozen())
    assert place(result) == (0, None, "local_grad", "hidden.weight", "grad")
    assert {name for _, name in origins(result)} <= {"hidden.weight", "(clip)"}
    assert result.causes[0].code == "optimizer.param_frozen"


def test_a_parameter_whose_update_is_thrown_away_is_named_as_not_updated(judge: Judge) -> None:
    class Restored(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            mine = (at.kind, at.name) == (Kind.PARAM, "hidden.weight")
            return self.initial_params(0)[at.name] if mine else value

    result = judge(Program(), Restored())
    assert place(result) == (0, None, "param", "hidden.weight", "model")
    assert origins(result) == {("param", "hidden.weight")}
    assert codes(result) == ["value.not_updated"]


@pytest.mark.parametrize(
    ("optimizer", "slots"), [("AdamW", {"exp_avg", "exp_avg_sq", "step"}), ("SGD", {"momentum_buffer"})]
)
def test_state_that_a_resumed_run_lacks_is_named_at_init(
    judge: Judge, optimizer: str, slots: set[str]
) -> None:
    result = judge(Program(optimizer=optimizer, resumed=True), Program(optimizer=optimizer))
    assert first(result).where.step == "init"
    assert {o.where.slot for o in result.origins} == slots
    assert result.causes[0].code == "optimizer.lost_moment"
    assert any("stopped at init" in note for note in result.notes)


def test_first_moments_of_zero_in_a_resumed_run_are_named_at_init(judge: Judge) -> None:
    class Zeroed(Program):
        def initial_state(self, rank: int) -> State:
            return {n: s | {"exp_avg": 0 * s["exp_avg"]} for n, s in super().initial_state(rank).items()}

    result = judge(Program(resumed=True), Zeroed(resumed=True))
    assert place(result) == ("init", None, "optimizer_state", "embed.weight", "exp_avg")
    assert {o.where.slot for o in result.origins} == {"exp_avg"}
    assert codes(result) == ["optimizer.lost_moment"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
def test_a_moment_lost_in_the_middle_is_named_where_it_is_lost(judge: Judge, ranks: int, slot: str) -> None:
    def forget(state: State) -> None:
        for own in state.values():
            own[slot] = np.zeros_like(own[slot])

    result = judge(Program(), meddling(forget)(ranks=ranks))
    assert place(result) == (1, None, "optimizer_state", "embed.weight", slot)
    assert {o.where.slot for o in result.origins} == {slot}
    assert origin_steps(result) == {1}
    assert codes(result) == ["optimizer.lost_moment"]


def test_momentum_lost_in_the_middle_is_named(judge: Judge) -> None:
    result = judge(Program(optimizer="SGD"), meddling(dict.clear)(optimizer="SGD"))
    assert place(result) == (1, None, "optimizer_state", "embed.weight", "momentum_buffer")
    assert origin_steps(result) == {1}
    assert codes(result) == ["optimizer.lost_moment"]


def test_a_state_lost_as_a_whole_is_a_lost_moment_and_no_late_counter(judge: Judge) -> None:
    result = judge(Program(), meddling(dict.clear)())
    assert first(result).where.step == 1
    assert {o.where.kind for o in result.origins} == {"optimizer_state"}
    assert result.causes[0].code == "optimizer.lost_moment"
    assert "value.not_updated" not in codes(result)


def test_a_step_counter_that_is_off_is_named_with_its_shift(judge: Judge) -> None:
    def jump(state: State) -> None:
        for own in state.values():
            own["step"] = np.float32(5)  # 1 in the reference

    result = judge(Program(), meddling(jump)())
    assert place(result) == (1, None, "optimizer_state", "embed.weight", "step")
    assert {o.where.slot for o in result.origins} == {"step"}
    assert origin_steps(result) == {1}
    assert codes(result) == ["optimizer.step_counter"]
    assert result.causes[0].number == 4


def test_a_step_counter_that_restarts_on_resume_is_named_at_init(judge: Judge) -> None:
    class Restarted(Program):
        def initial_state(self, rank: int) -> State:
            return {n: s | {"step": np.float32(0)} for n, s in super().initial_state(rank).items()}

    result = judge(Program(resumed=True), Restarted(resumed=True))
    assert place(result) == ("init", None, "optimizer_state", "embed.weight", "step")
    assert codes(result) == ["optimizer.step_counter"]
    assert result.causes[0].number == -100


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq"])
def test_one_element_of_a_moment_off_by_1e_4_is_found(judge: Judge, slot: str) -> None:
    wrong = tampering(Kind.OPTIMIZER_STATE, "hidden.weight", slot, greatest_is_off, step=1)
    for layout in ({}, {"ranks": 2}):
        result = judge(Program(), wrong(**layout))
        assert place(result) == (1, None, "optimizer_state", "hidden.weight", slot)
        # the parameter was updated before the element went wrong: the recorded moment does not explain it
        assert origins(result) <= {("optimizer_state", "hidden.weight"), ("param", "hidden.weight")}


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_element_of_a_parameter_off_by_1e_4_is_found(judge: Judge, ranks: int) -> None:
    wrong = tampering(Kind.PARAM, "hidden.weight", "model", greatest_is_off, step=1)
    result = judge(Program(), wrong(ranks=ranks))
    assert place(result) == (1, None, "param", "hidden.weight", "model")
    assert origins(result) == {("param", "hidden.weight")}
    assert origin_steps(result) == {1}


@pytest.mark.parametrize("reference", [1, 2])
def test_a_stale_parameter_on_one_rank_names_the_rank(judge: Judge, reference: int) -> None:
    class Stale(Program):
        old: np.ndarray

        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.rank) != (Kind.PARAM, "hidden.weight", 1):
                return value
            if at.step == 1:
                return self.old
            self.old = value
            return value

    result = judge(Program(ranks=reference), Stale(ranks=2))
    assert place(result) == (1, None, "param", "hidden.weight", "model")
    assert first(result).ranks == (1,)
    assert origins(result) == {("param", "hidden.weight")}
    assert codes(result) == ["replica.disagrees"]
    assert result.causes[0].number == 1
    assert "rank 1 of b kept" in result.causes[0].text


@pytest.mark.parametrize("ranks", [1, 2])
def test_replicas_of_the_reference_that_disagree_are_told_where_they_do(judge: Judge, ranks: int) -> None:
    wrong = tampering(Kind.PARAM, "hidden.weight", "model", greatest_is_off, step=1, rank=1)
    result = judge(wrong(ranks=2), Program(ranks=ranks))
    assert place(result) == (1, None, "param", "hidden.weight", "model")
    assert codes(result) == ["replica.disagrees"]
    assert result.causes[0].text == "rank 1 of a holds another value than rank 0"


def test_a_rank_of_the_reference_with_a_learning_rate_of_its_own_is_named(judge: Judge) -> None:
    group = "optimizer.0.group.0"
    wrong = tampering(Kind.SCHEDULE, group, "lr", lambda lr: 2 * lr, step=1, rank=1)
    result = judge(wrong(ranks=2), Program())
    assert place(result) == (1, None, "schedule", group, "lr")
    assert codes(result) == ["optimizer.hyperparameter"]
    assert "on rank 1 of a" in result.headline


@pytest.mark.parametrize("odd", [0, 2])
def test_of_four_ranks_the_one_that_differs_is_the_odd_one(judge: Judge, odd: int) -> None:
    wrong = tampering(Kind.PARAM, "hidden.bias", "model", lambda v: v + np.float32(1e-3), step=0, rank=odd)
    result = judge(Program(), wrong(ranks=4))
    assert place(result) == (0, None, "param", "hidden.bias", "model")
    assert first(result).ranks == (odd,)
    assert codes(result) == ["replica.disagrees"]


def test_rows_that_changed_places_at_init_are_named_with_where_they_went(judge: Judge) -> None:
    class Swapped(Program):
        def initial_params(self, rank: int) -> Arrays:
            params = super().initial_params(rank)
            order = [6, 7, 8, 3, 4, 5, 0, 1, 2, 9, 10, 11]
            return params | {"hidden.weight": params["hidden.weight"][order]}

    result = judge(Program(), Swapped(ranks=2))
    assert place(result) == ("init", None, "param", "hidden.weight", "model")
    assert origins(result) == {("param", "hidden.weight")}
    assert codes(result) == ["layout.permuted_blocks", "init.differs"]
    assert result.causes[0].number == 6
    assert "0-2 hold a's 6-8; 6-8 hold a's 0-2" in result.causes[0].text


def test_columns_that_changed_places_at_init_are_named_too(judge: Judge) -> None:
    class Swapped(Program):
        def initial_params(self, rank: int) -> Arrays:
            params = super().initial_params(rank)
            return params | {"hidden.weight": params["hidden.weight"][:, [4, 5, 2, 3, 0, 1, 6, 7]]}

    result = judge(Program(), Swapped())
    assert result.causes[0].code == "layout.permuted_blocks"
    assert result.causes[0].number == 4
    assert "the last dimension" in result.causes[0].text


def test_one_element_off_by_1e_4_at_init_is_named_with_its_place(judge: Judge) -> None:
    wrong = tampering(Kind.PARAM, "hidden.weight", "model", greatest_is_off, step=-1)
    result = judge(Program(), wrong())
    assert place(result) == ("init", None, "param", "hidden.weight", "model")
    assert codes(result) == ["init.differs"]
    weight = Program().initial_params(0)["hidden.weight"]
    row, column = np.unravel_index(np.argmax(np.abs(weight)), weight.shape)
    assert f"1 of 96 elements differ, all within [{row}, {column}]" in result.causes[0].evidence[0]


class WithoutGradient(Program):
    """One bias has in theory no gradient: what is computed is round-off, other in each run."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if at.name == "hidden.bias" and at.kind in (Kind.LOCAL_GRAD, Kind.CLIPPED_GRAD):
            value = value.copy()
            value[0] = 1e-12 * (1 if (at.step + self.setup.order) % 2 else -1)
        return value


class Halved(WithoutGradient):
    """Updates the rest of that bias by half."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        value = super().tamper(at, value)
        if (at.step, at.kind, at.name, at.slot) == (1, Kind.OPTIMIZER_STATE, "hidden.bias", "exp_avg"):
            value = value / np.float32(2)
        return value


@pytest.mark.parametrize("optimizer", ["AdamW", "Normalising"])
def test_whole_steps_along_round_off_are_no_divergence(judge: Judge, optimizer: str) -> None:
    a, b = (WithoutGradient(order=n, optimizer=optimizer) for n in (0, 1))
    assert_equivalent(judge(a, b))


def test_what_has_a_gradient_is_still_judged_under_an_unknown_optimizer(judge: Judge) -> None:
    a, b = WithoutGradient(optimizer="Normalising"), Halved(order=1, optimizer="Normalising")
    assert place(judge(a, b)) == (1, None, "optimizer_state", "hidden.bias", "exp_avg")


def test_one_rank_that_reads_another_learning_rate_is_named(judge: Judge) -> None:
    wrong = tampering(Kind.SCHEDULE, "optimizer.0.group.0", "lr", lambda v: v / 2, step=1, rank=1)
    result = judge(Program(), wrong(ranks=2))
    assert place(result) == (1, None, "schedule", "optimizer.0.group.0", "lr")
    assert first(result).ranks == (1,)
    assert codes(result) == ["optimizer.hyperparameter"]


def test_one_rank_that_clips_to_another_maximum_is_named(judge: Judge) -> None:
    wrong = tampering(Kind.CLIPPED_GRAD, "(clip)", "max_norm", lambda v: v / 2, step=1, rank=1)
    result = judge(Program(), wrong(ranks=2))
    assert place(result) == (1, None, "clipped_grad", "(clip)", "max_norm")
    assert first(result).ranks == (1,)


class Staged(Program):
    """Two ranks whose optimizers hold other parameters, as stages of a pipeline do."""

    rates = (1.0, 1.0)

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        return value * self.rates[at.rank] if at.kind is Kind.SCHEDULE and at.slot == "lr" else value

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        meta = fields.get("meta")
        if at.kind is Kind.SCHEDULE and meta is not None and meta.members:
            own = tuple(n for i, n in enumerate(meta.members) if i % 2 == at.rank)
            fields["meta"] = Meta(members=own, optimizer=meta.optimizer)
        return super()._put(at, value, **fields)


def test_a_learning_rate_of_parameters_that_rank_0_does_not_have(judge: Judge) -> None:
    class Wrong(Staged):
        rates = (1.0, 0.5)

    assert judge(Program(), Staged(ranks=2)).verdict == "equivalent"
    result = judge(Program(), Wrong(ranks=2), kinds=(Kind.SCHEDULE,))
    assert place(result) == (0, None, "schedule", "optimizer.0.group.0", "lr")
    assert first(result).ranks == (1,)
    assert "on rank 1" in result.headline
