"""A gradient that is not what its own run gave before is found where comparing the runs cannot see it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, assert_equivalent, codes, lacking, origins, place, tampering
from tests.simulated import CLIP, NAMES, At, Program

RATE = ("schedule * lr factor=2",)
"""What is declared: from step 1 on every gradient differs by far more than round-off."""


class Hooked(Program):
    """A tensor hook multiplies one parameter's gradient."""

    def hook(self, step: int, rank: int, name: str, value: np.ndarray) -> np.ndarray:
        return value * np.float32(1.25) if name == "hidden.weight" else value


class HookedOnce(Program):
    """The same, by 1.05 and in step 1 alone."""

    def hook(self, step: int, rank: int, name: str, value: np.ndarray) -> np.ndarray:
        return value * np.float32(1.05) if (step, name) == (1, "hidden.weight") else value


class Cut(Program):
    """Hooks cut gradients off at a magnitude that one of hidden.weight reaches at one rate alone (step 1)."""

    def hook(self, step: int, rank: int, name: str, value: np.ndarray) -> np.ndarray:
        return np.clip(value, -0.0992, 0.0992)


def more(value: np.ndarray) -> np.ndarray:
    return value * np.float32(1.05)


def last_third_more(value: np.ndarray) -> np.ndarray:
    value[2 * len(value) // 3 :] *= np.float32(1.05)
    return value


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", [Program, Hooked, Cut])
def test_correct_programs_of_another_rate_differ_by_nothing_else(
    judge: Judge, program: type[Program], ranks: int
) -> None:
    result = judge(program(ranks=ranks), program(ranks=ranks, lr=2e-2), expect=RATE)
    assert result.verdict == "equivalent", result.headline
    assert result.declared is not None
    assert result.declared.total == 6  # the rate of two groups in three steps


def test_hooks_of_both_runs_are_no_difference_whatever_the_number_of_ranks(judge: Judge) -> None:
    assert_equivalent(judge(Hooked(), Hooked(ranks=2)))


@pytest.mark.parametrize(
    ("kind", "slot", "setup", "window"),
    [
        (Kind.REDUCED_GRAD, "grad", {"ranks": 2}, False),
        (Kind.UNSCALED_GRAD, "grad", {"loss_scale": 1024.0}, False),
        (Kind.CLIPPED_GRAD, "before", {}, False),
        (Kind.CLIPPED_GRAD, "grad", {}, True),
    ],
    ids=["reduced", "unscaled", "before clipping", "consumed"],
)
def test_a_factor_at_any_rung_is_found_behind_a_declared_rate(
    judge: Judge, kind: Kind, slot: str, setup: dict[str, Any], window: bool
) -> None:
    mistake = tampering(kind, "hidden.weight", slot, more, step=1)
    if window:

        class AtTheEnd(Program):
            def tamper(self, at: Any, value: np.ndarray) -> np.ndarray:
                wanted = (at.step, at.microbatch, at.kind, at.name) == (1, None, kind, "hidden.weight")
                return more(value) if wanted else value

        mistake = AtTheEnd
    result = judge(Program(**setup), mistake(lr=2e-2, **setup), expect=RATE)
    assert place(result) == (1, None, kind.value, "hidden.weight", slot)
    assert origins(result) == {(kind.value, "hidden.weight")}
    assert codes(result)[:1] == ["scale.other"]
    assert result.causes[0].number == pytest.approx(1.05, rel=1e-6)


def test_the_run_that_is_the_reference_may_be_the_odd_one(judge: Judge) -> None:
    mistake = tampering(Kind.REDUCED_GRAD, "hidden.weight", "grad", more, step=1)
    result = judge(mistake(ranks=2), Program(ranks=2, lr=2e-2), expect=RATE)
    assert place(result) == (1, None, "reduced_grad", "hidden.weight", "grad")
    assert "of a itself" in result.origins[0].text
    assert result.causes[0].number == pytest.approx(1 / 1.05, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_hook_is_told_from_the_reduction(judge: Judge, ranks: int) -> None:
    for options in ({}, {"expect": RATE}):
        rate = 2e-2 if options else 1e-2
        result = judge(Program(ranks=ranks), HookedOnce(ranks=ranks, lr=rate), **options)
        assert place(result) == (1, None, "local_grad", "hidden.weight", "hooked")
        assert origins(result) == {("local_grad", "hidden.weight")}
        assert codes(result)[:1] == ["scale.other"]
        assert result.causes[0].number == pytest.approx(1.05, rel=1e-6)


class Forgetful(Program):
    """The optimizer is given no gradient of one parameter in step 1, and leaves it as it is."""

    def keeps(self, at: At) -> bool:
        return (at.step, at.microbatch, at.kind, at.name) != (1, None, Kind.CLIPPED_GRAD, "head.weight")

    def updates(self, step: int, rank: int, name: str) -> bool:
        return (step, name) != (1, "head.weight")


@pytest.mark.parametrize("rate", [1e-2, 2e-2])
def test_a_gradient_that_no_optimizer_is_given_freezes_its_parameter(judge: Judge, rate: float) -> None:
    result = judge(Program(), Forgetful(lr=rate), expect=RATE if rate != 1e-2 else ())
    assert ("clipped_grad", "head.weight") in origins(result)
    assert place(result)[3] == "head.weight"
    assert codes(result)[:1] == ["optimizer.param_frozen"]


class Emptied(Program):
    """One gradient is set to zeros before the update of step 1."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        wanted = (at.step, at.microbatch, at.kind, at.name) == (1, None, Kind.CLIPPED_GRAD, "head.weight")
        return np.zeros_like(value) if wanted else value


@pytest.mark.parametrize("rate", [1e-2, 2e-2])
def test_a_gradient_set_to_zeros_is_named(judge: Judge, rate: float) -> None:
    result = judge(Program(), Emptied(lr=rate), expect=RATE if rate != 1e-2 else ())
    assert place(result) == (1, None, "clipped_grad", "head.weight", "grad")
    assert codes(result)[:1] == ["value.zero"]


def test_what_may_be_missing_is_no_divergence(judge: Judge) -> None:
    forgetful = judge.write(Forgetful(steps=2))
    alone = judge(Program(steps=2), forgetful, allow_missing=("head.weight",))
    assert {o.where.kind for o in alone.origins} == {"optimizer_state"}  # its update differs still
    result = judge(Program(), lacking(Kind.BUFFER)(), allow_missing=("*",))
    assert_equivalent(result)


def test_a_part_of_a_tensor_is_told(judge: Judge) -> None:
    mistake = tampering(Kind.CLIPPED_GRAD, "hidden.bias", "before", last_third_more, step=1)
    result = judge(Program(), mistake(lr=2e-2), expect=RATE)
    assert place(result) == (1, None, "clipped_grad", "hidden.bias", "before")
    assert result.origins[0].location is not None


def test_noise_hides_no_factor_of_one_gradient(judge: Judge) -> None:
    noisy = [judge.write(Program(noise=0.02, order=n, max_norm=1e9)) for n in range(5)]
    mistake = tampering(Kind.CLIPPED_GRAD, "hidden.weight", "before", more, step=0)
    wrong = judge.write(mistake(noise=0.02, order=9, max_norm=1e9))
    assert judge(noisy[0], noisy[1], floor=tuple(noisy[2:])).verdict == "equivalent"
    result = judge(noisy[0], wrong, floor=tuple(noisy[2:]))
    assert place(result) == (0, None, "clipped_grad", "hidden.weight", "before")
    assert codes(result)[:1] == ["scale.other"]


class Unclipped(Program):
    """Calls nothing that clips."""

    def keeps(self, at: At) -> bool:
        return at.name != CLIP


def test_a_clip_within_its_limit_need_not_be_in_both(judge: Judge) -> None:
    for a, b in ((Program, Unclipped), (Unclipped, Program)):
        result = judge(a(max_norm=1e3), b(max_norm=1e3, ranks=2))
        assert result.verdict == "equivalent", result.headline
        assert {"left the gradients as they were" in gap.reason for gap in result.coverage.missing} == {True}


def test_what_lies_behind_a_clip_within_its_limit_is_told(judge: Judge) -> None:
    class Halved(Unclipped):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            return value / 2 if at.kind == Kind.REDUCED_GRAD else value

    result = judge(Program(max_norm=1e3), Halved(max_norm=1e3, ranks=2))
    assert place(result)[2] == "reduced_grad"
    assert codes(result) == ["scale.world_size"]


class InGroups(Program):
    """Clips its parameters in two calls, both by the norm of all."""

    own_norms = False

    def _clip(self, step: int, microbatch: int, call: int) -> None:
        given = self.grads
        whole = [dict(grads) for grads in given]
        for number, names in enumerate((NAMES[:2], NAMES[2:])):
            self.names = names
            self.grads = [{n: g[n] for n in names} if self.own_norms else dict(g) for g in given]
            super()._clip(step, microbatch, number)
            for grads, clipped in zip(whole, self.grads, strict=True):
                grads.update({n: clipped[n] for n in names})
        self.grads, self.names = whole, NAMES
        for rank, grads in enumerate(whole):
            for name in NAMES:  # what the optimizer is given
                at = At(step, rank, microbatch, Kind.CLIPPED_GRAD, name, "grad")
                super()._put(at, grads[name], call=2, shard="replicate")

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        if at.kind == Kind.CLIPPED_GRAD and at.name == CLIP:
            fields["meta"] = replace(fields["meta"], members=tuple(self.names))
        if at.kind == Kind.CLIPPED_GRAD and at.name != CLIP and at.name not in self.names:
            return value
        return super()._put(at, value, **fields)


def test_groups_that_are_clipped_by_the_norm_of_all_are_clipped_alike(judge: Judge) -> None:
    assert_equivalent(judge(Program(), InGroups(ranks=2)))
    assert_equivalent(judge(InGroups(), Program(ranks=2)))


def test_groups_that_are_clipped_by_their_own_norms_are_told_at_the_norm(judge: Judge) -> None:
    class Own(InGroups):
        own_norms = True

    result = judge(Program(), Own(ranks=2))
    assert place(result)[2:] == ("clipped_grad", CLIP, "total_norm")


class HookedOnOne(Program):
    """The same hook, on the last rank alone and by 1.0001."""

    def hook(self, step: int, rank: int, name: str, value: np.ndarray) -> np.ndarray:
        last = rank == self.setup.ranks - 1
        return value * np.float32(1.0001) if last and name == "hidden.weight" else value


@pytest.mark.parametrize("layout", [{"ranks": 2}, {"ranks": 2, "accumulate": 2}, {"ranks": 4}])
def test_a_hook_on_one_rank_is_told_where_it_acts(judge: Judge, layout: dict[str, int]) -> None:
    result = judge(Program(), HookedOnOne(**layout))
    assert place(result)[2:] == ("local_grad", "hidden.weight", "hooked")
    assert codes(result) == ["scale.other"]
    assert result.causes[0].number == pytest.approx(1.0001, rel=1e-6)
    assert f"rank {layout['ranks'] - 1} of b" in result.causes[0].text
