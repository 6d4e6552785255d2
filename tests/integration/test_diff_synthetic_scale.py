"""Mistakes in scale, reduction, accumulation and clipping are named where they act, with their number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.integration.judged import Judge, assert_equivalent, codes, origins, place
from tests.simulated import NAMES, Program, collate

Counts = dict[tuple[int, int], int]

EVERY_LOSS = {("loss", "cross_entropy")}


def every(kind: str) -> set[tuple[str, str]]:
    return {(kind, name) for name in NAMES}


def valid_tokens(parts: int) -> list[int]:
    """Return the valid tokens of step 0 in rows 0, n, 2n …, in rows 1, n+1 …: a document's tokens but one."""
    documents = Program().documents(0)
    return [sum(len(d) - 1 for d in documents[part::parts]) for part in range(parts)]


class LocalMeans(Program):
    """Every rank and microbatch averages over its own tokens."""

    def token_weight(self, counts: Counts, rank: int, microbatch: int) -> float:
        return 1 / counts[(rank, microbatch)] / self.setup.accumulate


class Scaled(Program):
    """The loss is multiplied by a factor too much."""

    factor = 1.0

    def token_weight(self, counts: Counts, rank: int, microbatch: int) -> float:
        return self.factor * super().token_weight(counts, rank, microbatch)


def scaled(by: float) -> type[Scaled]:
    return type("ScaledBy", (Scaled,), {"factor": by})


class Reducing(Program):
    """One parameter, or all of them, are reduced in another way."""

    name: str | None = "hidden.weight"
    how: Sequence[str] = ()

    def reductions(self, name: str) -> Sequence[str]:
        return self.how if self.name in (None, name) else super().reductions(name)


def reducing(how: Sequence[str], name: str | None = "hidden.weight") -> type[Reducing]:
    return type("ReducingSo", (Reducing,), {"how": how, "name": name})


@pytest.mark.parametrize(
    ("reference", "layout"),
    [({}, {"ranks": 2}), ({"ranks": 2}, {"ranks": 2}), ({}, {"accumulate": 2})],
    ids=["1 rank and 2", "2 ranks", "1 microbatch and 2"],
)
def test_a_mean_of_local_means_is_named_with_both_weights(
    judge: Judge, reference: dict[str, int], layout: dict[str, int]
) -> None:
    result = judge(Program(**reference), LocalMeans(**layout))
    microbatch = None if layout.get("accumulate") else 0  # of 1 and 2 microbatches none is the other's
    assert place(result) == (0, microbatch, "loss", "cross_entropy", "weight")
    assert origins(result) == EVERY_LOSS
    cause = result.causes[0]
    n = valid_tokens(2)
    assert n[0] != n[1]
    assert cause.code == "scale.token_ratio"
    assert cause.number == pytest.approx(max(n) / min(n), rel=1e-6)
    # in the gradient a token of part p weighs 1/(2 n_p): DDP halves, or the program divides by 2 microbatches
    for denominator in (2 * n[0], 2 * n[1], sum(n)):
        assert f"1/{denominator}" in cause.text


def test_a_mean_of_local_means_over_microbatches_is_named_within_one_split(judge: Judge) -> None:
    result = judge(Program(accumulate=2), LocalMeans(accumulate=2))
    assert place(result) == (0, 0, "loss", "cross_entropy", "weight")
    assert origins(result) == EVERY_LOSS
    n = valid_tokens(2)
    assert codes(result) == ["scale.token_ratio"]
    assert result.causes[0].number == pytest.approx(max(n) / min(n), rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_missing_factor_of_the_world_size_is_named_across_world_sizes(judge: Judge, ranks: int) -> None:
    # DDP divides by the ranks; a loss that is not multiplied by them leaves 1/ranks of the gradient
    result = judge(Program(), scaled(1 / ranks)(ranks=ranks))
    assert place(result)[:3] == (0, None, "reduced_grad")
    assert origins(result) == every("reduced_grad")
    assert result.causes[0].code == "scale.world_size"
    assert result.causes[0].number == pytest.approx(1 / ranks, rel=1e-6)


def test_the_world_size_multiplied_twice_is_named(judge: Judge) -> None:
    result = judge(Program(), scaled(2)(ranks=2))
    assert origins(result) == every("reduced_grad")
    assert result.causes[0].code == "scale.world_size"
    assert result.causes[0].number == pytest.approx(2, rel=1e-6)


def test_within_one_scheme_a_factor_is_named_at_the_loss_that_supplies_it(judge: Judge) -> None:
    result = judge(Program(ranks=2), scaled(1 / 2)(ranks=2))
    assert place(result) == (0, 0, "loss", "cross_entropy", "weight")
    assert origins(result) == EVERY_LOSS
    assert codes(result) == ["scale.world_size"]
    assert result.causes[0].number == pytest.approx(0.5, rel=1e-6)


def test_a_loss_not_divided_by_the_microbatches_is_named(judge: Judge) -> None:
    across = judge(Program(), scaled(4)(accumulate=4))
    assert place(across)[:3] == (0, None, "clipped_grad")
    assert origins(across) == every("clipped_grad")
    within = judge(Program(accumulate=4), scaled(4)(accumulate=4))
    assert place(within) == (0, 0, "loss", "cross_entropy", "weight")
    for result in (across, within):
        assert result.causes[0].code == "scale.accumulation"
        assert result.causes[0].number == pytest.approx(4, rel=1e-6)


def test_four_percent_too_much_are_found_within_a_scheme_and_across(judge: Judge) -> None:
    within = judge(Program(), scaled(1.04)())
    across = judge(Program(), scaled(1.04)(ranks=2))
    assert origins(within) == EVERY_LOSS
    assert origins(across) == EVERY_LOSS  # sums over ranks make no 1.04
    for result in (within, across):
        assert codes(result) == ["scale.other"]
        assert result.causes[0].number == pytest.approx(1.04, rel=1e-6)


def test_a_loss_scale_left_in_the_gradient_is_named(judge: Judge) -> None:
    class NotUnscaled(Program):
        def tamper(self, at, value):  # type: ignore[no-untyped-def]
            return value * np.float32(1024) if (at.kind, at.slot) == ("clipped_grad", "before") else value

    result = judge(Program(loss_scale=1024.0), NotUnscaled(loss_scale=1024.0))
    assert place(result)[:3] == (0, None, "clipped_grad")
    assert result.causes[0].code == "scale.loss_scale"
    assert result.causes[0].number == pytest.approx(1024, rel=1e-6)


@pytest.mark.parametrize("how", [("alone",), ()], ids=["a reduction over one rank", "no reduction"])
def test_a_parameter_that_is_not_reduced_is_named_at_its_reduction(judge: Judge, how: Sequence[str]) -> None:
    result = judge(Program(ranks=2), reducing(how)(ranks=2))
    assert place(result) == (0, None, "reduced_grad", "hidden.weight", "grad")
    assert origins(result) == {("reduced_grad", "hidden.weight")}
    assert result.causes[0].code == "reduction.missing"
    assert result.causes[0].number == pytest.approx(1, rel=1e-6)  # each rank's own gradient as it is


def test_a_parameter_that_is_not_reduced_is_named_where_a_had_nothing_to_reduce(judge: Judge) -> None:
    result = judge(Program(), reducing(())(ranks=2))
    assert place(result) == (0, None, "clipped_grad", "hidden.weight", "before")
    assert origins(result) == {("clipped_grad", "hidden.weight")}
    assert result.causes[0].code == "reduction.missing"


@pytest.mark.parametrize(("ranks", "kind"), [(1, "clipped_grad"), (2, "reduced_grad")])
def test_ranks_that_train_alone_are_named_as_such(judge: Judge, ranks: int, kind: str) -> None:
    result = judge(Program(ranks=ranks), reducing((), None)(ranks=2))
    assert place(result)[:3] == (0, None, kind)
    assert origins(result) == every(kind)
    assert result.causes[0].code == "reduction.missing"


@pytest.mark.parametrize("reference", [1, 2])
@pytest.mark.parametrize("name", ["hidden.weight", None], ids=["one parameter", "all"])
def test_a_second_reduction_is_named_with_its_factor(judge: Judge, reference: int, name: str | None) -> None:
    # the mean is equal on both ranks: adding it up over 2 ranks doubles it
    result = judge(Program(ranks=reference), reducing(("mean", "sum"), name)(ranks=2))
    assert place(result)[:3] == (0, None, "reduced_grad")
    assert origins(result) == ({("reduced_grad", name)} if name else every("reduced_grad"))
    assert result.causes[0].code == "reduction.double"
    assert result.causes[0].number == pytest.approx(2, rel=1e-6)
    assert result.causes[0].equals == "the world size (2)"


def test_a_sum_over_ranks_in_place_of_a_mean_is_the_world_size(judge: Judge) -> None:
    result = judge(Program(ranks=2), reducing(("sum",), "hidden.bias")(ranks=2))
    assert origins(result) == {("reduced_grad", "hidden.bias")}
    assert codes(result) == ["scale.world_size"]


@pytest.mark.parametrize("layout", [{}, {"ranks": 2}, {"ranks": 2, "accumulate": 2}], ids=str)
def test_gradients_that_are_never_zeroed_are_named_when_step_one_opens(
    judge: Judge, layout: dict[str, int]
) -> None:
    class Forgetful(Program):
        def zeroes(self, step: int) -> bool:
            return False

    result = judge(Program(**layout), Forgetful(**layout))
    assert place(result) == (1, None, "local_grad", "embed.weight", "start")
    assert {o.where.slot for o in result.origins} == {"start"}
    assert origins(result) == every("local_grad")
    assert codes(result) == ["grad.not_zeroed"]
    assert result.causes[0].number == 1.0


@pytest.mark.parametrize(
    ("layout", "kind"), [({"accumulate": 2}, "clipped_grad"), ({"ranks": 2, "accumulate": 3}, "reduced_grad")]
)
def test_gradients_zeroed_between_microbatches_are_dropped_microbatches(
    judge: Judge, layout: dict[str, int], kind: str
) -> None:
    class Forgetful(Program):
        def forgets(self, step: int, microbatch: int) -> bool:
            return microbatch < self.setup.accumulate - 1

    result = judge(Program(**layout), Forgetful(**layout))
    assert place(result)[:3] == (0, None, kind)
    assert origins(result) == every(kind)
    assert codes(result) == ["grad.dropped_microbatch"]
    assert result.causes[0].number == layout["accumulate"] - 1  # only the last is left
    assert f"microbatch {layout['accumulate'] - 1} of" in result.causes[0].text


@pytest.mark.parametrize("layout", [{"accumulate": 2}, {"ranks": 2, "accumulate": 2}], ids=str)
@pytest.mark.parametrize("split", [True, False], ids=["the same split", "1 rank"])
def test_clipping_before_the_accumulation_ends_is_one_event_of_b(
    judge: Judge, layout: dict[str, int], split: bool
) -> None:
    class Eager(Program):
        def clips_after(self, step: int, microbatch: int) -> bool:
            return True

    result = judge(Program(**(layout if split else {})), Eager(**layout))
    assert place(result) == (0, 0, "clipped_grad", "(clip)", "total_norm")
    assert origins(result) == {("clipped_grad", "(clip)")}
    assert {o.where.microbatch for o in result.origins} == {0}
    assert result.causes[0].code == "clip.before_accumulation"
    assert result.causes[0].number == 1  # of 2 microbatches the first is clipped alone


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_clip_that_never_happens_is_named_with_the_coefficient_left_out(judge: Judge, ranks: int) -> None:
    class Unclipped(Program):
        def clips_after(self, step: int, microbatch: int) -> bool:
            return False

    reference = Program()
    result = judge(reference, Unclipped(ranks=ranks))
    assert place(result) == (0, None, "clipped_grad", "(clip)", "total_norm")
    assert origins(result) == {("clipped_grad", "(clip)")}
    assert result.causes[0].code == "clip.skipped"
    assert result.causes[0].number == pytest.approx(0.1 / (norm_of_step_0() + 1e-6), rel=1e-6)


def norm_of_step_0() -> float:
    """Return the norm of the first gradient in float64, from the formulas of the model."""
    params = {n: p.astype(np.float64) for n, p in Program().initial_params(0).items()}
    part = collate(Program().documents(0))
    x = params["embed.weight"][part.ids]
    a = np.tanh(x @ params["hidden.weight"].T + params["hidden.bias"])
    z = a @ params["head.weight"].T + params["head.bias"]
    valid = part.targets != -100
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    p[valid, part.targets[valid]] -= 1
    dz = p * valid[..., None] / part.count
    dh = (dz @ params["head.weight"]) * (1 - a * a)
    table = np.zeros_like(params["embed.weight"])
    np.add.at(table, part.ids, dh @ params["hidden.weight"])
    grads = [table, dz.sum((0, 1)), dh.sum((0, 1))]
    grads += [np.einsum("rto,rti->oi", dz, a), np.einsum("rto,rti->oi", dh, x)]
    return float(np.sqrt(sum(np.sum(g * g) for g in grads)))


@pytest.mark.parametrize(
    ("setting", "slot", "value"),
    [("max_norm", "max_norm", 0.2), ("norm_type", "norm_type", 1.0), ("norm_type", "norm_type", np.inf)],
)
def test_another_norm_or_maximum_is_named_with_its_value(
    judge: Judge, setting: str, slot: str, value: float
) -> None:
    result = judge(Program(), Program(ranks=2, **{setting: value}))
    assert place(result) == (0, None, "clipped_grad", "(clip)", slot)
    assert {o.where.slot for o in result.origins} == {slot}
    assert codes(result) == ["clip.wrong_norm"]
    assert result.causes[0].number == value


def test_a_norm_of_each_rank_s_own_gradients_is_named_as_such(judge: Judge) -> None:
    class OwnNorm(Program):
        """Clips what was reduced by the norm of what each rank contributed."""

        def _record_local(self, rank: int) -> float:
            parts = [v for f, v in self.records[rank] if f["kind"] == "local_grad" and f["step"] == 0]
            return float(np.sqrt(sum(np.sum(v.astype(np.float64) ** 2) for v in parts[-len(NAMES) :])))

        def tamper(self, at, value):  # type: ignore[no-untyped-def]
            if (at.name, at.slot, at.step) == ("(clip)", "total_norm", 0):
                return np.asarray(self._record_local(0))
            return value

    result = judge(Program(ranks=2, steps=1), OwnNorm(ranks=2, steps=1))
    assert place(result) == (0, None, "clipped_grad", "(clip)", "total_norm")
    assert result.causes[0].code == "clip.local_norm"
    assert result.causes[0].equals == "rank 0's local norm"


class ClipsScaled(Program):
    """Clips what backward left, and divides the loss scale out afterwards."""

    def _reduce(self, step: int) -> None:
        setup, self.setup = self.setup, replace(self.setup, loss_scale=None)
        super()._reduce(step)
        self.setup = setup

    def _clip(self, step: int, microbatch: int, call: int) -> None:
        super()._clip(step, microbatch, call)
        self._unscale(step)


@pytest.mark.parametrize("ranks", [1, 2])
def test_clipping_before_unscaling_is_named_at_the_norm_with_the_loss_scale(judge: Judge, ranks: int) -> None:
    result = judge(Program(loss_scale=1024.0), ClipsScaled(loss_scale=1024.0, ranks=ranks))
    assert place(result) == (0, None, "clipped_grad", "(clip)", "total_norm")
    assert origins(result) == {("clipped_grad", "(clip)")}
    assert result.causes[0].code == "clip.before_unscale"
    assert result.causes[0].number == pytest.approx(1024, rel=1e-6)


def test_two_runs_that_clip_before_unscaling_are_alike(judge: Judge) -> None:
    assert_equivalent(judge(ClipsScaled(loss_scale=1024.0), ClipsScaled(loss_scale=1024.0, ranks=2)))


def test_a_correct_program_with_two_clips_in_both_runs_has_no_cause(judge: Judge) -> None:
    class Eager(Program):
        def clips_after(self, step: int, microbatch: int) -> bool:
            return True

    assert_equivalent(judge(Eager(accumulate=2), Eager(accumulate=2, order=5)))


@pytest.mark.parametrize(("factor", "code"), [(0.5, "scale.world_size"), (1.3, "scale.other")])
@pytest.mark.parametrize("reference", [1, 2])
def test_tokens_that_weigh_wrong_on_one_rank(judge: Judge, factor: float, code: str, reference: int) -> None:
    class OneRank(Program):
        def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
            right = super().token_weight(counts, rank, microbatch)
            return right * factor if rank == 1 else right

    result = judge(Program(ranks=reference), OneRank(ranks=2))
    assert place(result) == (0, 0, "loss", "cross_entropy", "weight")
    assert codes(result)[0] == code
    assert result.causes[0].number == pytest.approx(factor, rel=1e-3)
    assert "the tokens of rank 1 of b weigh" in result.causes[0].text


@pytest.mark.parametrize("factor", [1.0001, 1.00002])
def test_a_small_factor_on_the_loss_of_one_rank_is_told_with_the_rank(judge: Judge, factor: float) -> None:
    class Heavier(Program):
        def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
            return super().token_weight(counts, rank, microbatch) * (factor if rank == 1 else 1.0)

    result = judge(Program(), Heavier(ranks=2))
    assert place(result) == (0, 0, "loss", "cross_entropy", "weight")
    assert codes(result) == ["scale.other"]
    assert result.causes[0].number == pytest.approx(factor, rel=1e-6)
    assert result.causes[0].text == (
        f"the tokens of rank 1 of b weigh {factor:g} times the reference, all others as much"
    )


class Forgetful(Program):
    """From step 2 on the loss is not divided by the number of microbatches."""

    at_step = 0

    def _step(self, step: int) -> None:
        self.at_step = step
        super()._step(step)

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        weight = super().token_weight(counts, rank, microbatch)
        return weight * self.setup.accumulate if self.at_step >= 2 else weight


@pytest.mark.parametrize("reference", [{}, {"accumulate": 4}, {"ranks": 2}, {"ranks": 4}])
def test_a_loss_that_weighs_otherwise_than_before_is_told_at_the_loss_whatever_the_schemes(
    judge: Judge, reference: dict[str, int]
) -> None:
    result = judge(Program(steps=3, **reference), Forgetful(steps=3, ranks=2, accumulate=2))
    assert place(result)[:1] + place(result)[2:] == (2, "loss", "cross_entropy", "weight")
    assert codes(result) == ["scale.accumulation"]
