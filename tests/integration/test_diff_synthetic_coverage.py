"""What only one run holds: a defect, a gap that counts, or something that nobody promised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.types import Drops, Kind, Promise
from tests.integration.judged import Judge, codes, lacking, origins, place
from tests.simulated import At, Program
from tests.synthetic import Tensor


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Kind.ACTIVATION, "act"), (Kind.LOCAL_GRAD, "hidden.bias"), (Kind.ACTIVATION_GRAD, "act")],
)
@pytest.mark.parametrize("side", ["a", "b"])
def test_a_boundary_that_one_run_lacks_makes_the_comparison_incomplete(
    judge: Judge, kind: Kind, name: str, side: str
) -> None:
    gap = lacking(kind, name=name, step=1)
    result = judge(Program(), gap()) if side == "a" else judge(gap(), Program())
    assert result.verdict == "incomplete"
    assert not result
    assert result.origins == ()
    (missing,) = [m for m in result.coverage.missing if m.counts_as_incomplete]
    assert (missing.side, missing.kind) == (side, kind)
    assert all((w.step, w.name) == (1, name) for w in missing.examples)


def test_a_gap_that_was_allowed_does_not_count(judge: Judge) -> None:
    result = judge(Program(), lacking(Kind.ACTIVATION, name="act", step=1)(), allow_missing=("act",))
    assert result.verdict == "equivalent"
    assert [m.counts_as_incomplete for m in result.coverage.missing] == [False]


@pytest.mark.parametrize(
    ("kind", "slot"), [(Kind.PARAM, "model"), (Kind.OPTIMIZER_STATE, "exp_avg_sq")], ids=["param", "state"]
)
def test_state_that_one_run_lacks_in_the_middle_is_a_divergence(judge: Judge, kind: Kind, slot: str) -> None:
    result = judge(Program(), lacking(kind, name="hidden.bias", slot=slot, step=1)())
    assert place(result) == (1, None, kind, "hidden.bias", slot)
    assert origins(result) == {(kind, "hidden.bias")}
    assert codes(result) == ["boundary.missing"]


EVERYTHING = tuple(Kind)
SELECTIONS = [
    (Kind.INPUT, Kind.ACTIVATION, Kind.LOSS),
    (Kind.PARAM,),
    (Kind.ACTIVATION,),
    (Kind.INPUT, Kind.CLIPPED_GRAD, Kind.REDUCED_GRAD),
    tuple(k for k in EVERYTHING if k != Kind.LOCAL_GRAD),
    tuple(k for k in EVERYTHING if k != Kind.CLIPPED_GRAD),
    tuple(k for k in EVERYTHING if k != Kind.LOSS),
    tuple(k for k in EVERYTHING if k != Kind.INPUT),
]


@pytest.mark.parametrize("kinds", SELECTIONS, ids=lambda kinds: f"{len(kinds)} kinds, {kinds[-1]}")
@pytest.mark.parametrize("reference", [1, 2])
@pytest.mark.parametrize("swapped", [False, True])
def test_kinds_that_were_deselected_in_one_run_are_neither_wrong_nor_missing(
    judge: Judge, kinds: tuple[Kind, ...], reference: int, swapped: bool
) -> None:
    selected = lacking(*(k for k in EVERYTHING if k not in kinds))(ranks=2)
    paths = judge.write(Program(ranks=reference)), judge.write(selected, promise=Promise(kinds=kinds))
    result = judge(*(paths[::-1] if swapped else paths))
    assert result.verdict == "equivalent", result.headline
    assert result.coverage.complete
    assert set(result.coverage.by_kind) <= set(kinds)
    assert result.coverage.compared > 0
    assert not any(m.counts_as_incomplete for m in result.coverage.missing)


def test_a_name_that_was_excluded_in_one_run_is_neither_wrong_nor_missing(judge: Judge) -> None:
    quiet = lacking(*EVERYTHING, name="hidden.weight")
    path = judge.write(quiet(), promise=Promise(exclude=("hidden.weight",)))
    for result in (judge(Program(), path), judge(path, Program())):
        assert result.verdict == "equivalent", result.headline
        assert result.coverage.complete


def test_a_mistake_is_found_although_a_kind_was_deselected(judge: Judge) -> None:
    class Faster(Program):
        def keeps(self, at):  # type: ignore[no-untyped-def]
            return at.kind != Kind.LOCAL_GRAD

    kinds = tuple(k for k in EVERYTHING if k != Kind.LOCAL_GRAD)
    path = judge.write(Faster(lr=2e-2), promise=Promise(kinds=kinds))
    assert codes(judge(Program(), path)) == ["optimizer.hyperparameter"]


def killed(judge: Judge, share: float, program: Program) -> Path:
    """Write a trace in which rank 1 was killed after a share of its boundaries."""
    program.run()
    program.records[1] = program.records[1][: int(len(program.records[1]) * share)]
    program.run = lambda: program.records  # type: ignore[method-assign]
    path = judge.write(program)
    (path / "rank00001" / "rank.json").unlink()
    return path


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("reference", [1, 2])
def test_what_a_killed_rank_left_is_compared_and_nothing_diverges(
    judge: Judge, share: float, reference: int
) -> None:
    path = killed(judge, share, Program(ranks=2))
    result = judge(Program(ranks=reference), path)
    assert result.verdict == "incomplete", result.headline
    assert any("rank 1 did not finish" in m.reason for m in result.coverage.missing)
    # three steps of equal length: what was cut off in the n-th leaves n whole ones, and the initial state
    whole = judge(Program(ranks=reference, steps=1), Program(ranks=2, steps=1)).coverage.compared
    assert result.coverage.compared >= 5 + int(share * 3) * (whole - 5)


def test_a_mistake_before_the_kill_is_found(judge: Judge) -> None:
    result = judge(Program(), killed(judge, 0.75, Program(ranks=2, lr=2e-2)))
    assert place(result) == (0, None, "schedule", "optimizer.0.group.0", "lr")


def test_a_rank_without_any_recording_leaves_rows_to_compare(judge: Judge) -> None:
    path = judge.write(Program(ranks=2))
    for file in (path / "rank00001").iterdir():
        file.unlink()
    (path / "rank00001").rmdir()
    result = judge(Program(), path)
    assert result.verdict == "incomplete", result.headline
    assert result.coverage.by_kind.get("activation", 0) > 0
    assert any("no recording of rank 1 of 2" in m.reason for m in result.coverage.missing)


@pytest.mark.parametrize("reference", [1, 2])
def test_boundaries_that_were_dropped_while_recording_are_no_divergence(judge: Judge, reference: int) -> None:
    class Lossy(Program):
        def keeps(self, at: At) -> bool:
            return sum(at.name.encode()) % 3 != (at.step + at.rank) % 3 or at.step == -1

    drops = Drops(count=100, size_bytes=1000, reasons={"the buffer was full": 100})
    path = judge.write(Lossy(ranks=2), drops=drops)
    result = judge(Program(ranks=reference), path)
    assert result.verdict == "incomplete", result.headline
    assert result.coverage.compared > 50
    assert any("dropped boundaries" in m.reason for m in result.coverage.missing)


def test_steps_that_only_one_run_has_are_said_and_count(judge: Judge) -> None:
    result = judge(Program(steps=3), Program(steps=2))
    assert result.verdict == "incomplete"
    (missing,) = result.coverage.missing
    assert (missing.side, missing.kind, missing.count) == ("a", "step", 1)


def test_steps_that_were_deselected_do_not_count(judge: Judge) -> None:
    early = judge.write(Program(steps=2), promise=Promise(steps=((0, 1),)))
    result = judge(Program(steps=3), early)
    assert result.verdict == "equivalent", result.headline
    assert [m.counts_as_incomplete for m in result.coverage.missing] == [False]


def test_kinds_that_were_not_asked_for_are_not_compared(judge: Judge) -> None:
    result = judge(Program(), Program(ranks=2, lr=2e-2), kinds=(Kind.ACTIVATION,))
    assert set(result.coverage.by_kind) == {"activation"}
    assert place(result)[:3] == (1, 0, "activation")


def test_a_command_that_failed_is_no_complete_run(judge: Judge) -> None:
    result = judge(Program(), judge.write(Program(order=1), exit_code=3))
    assert result.verdict == "incomplete"
    assert [missing.reason for missing in result.coverage.missing] == [
        "the command of b ended with exit code 3"
    ]


def test_a_module_that_one_run_does_not_call_is_where_what_follows_went_wrong(judge: Judge) -> None:
    class NotCalled(Program):
        """It does not call its activation function: the head is given the hidden layer's output."""

        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "act", "in.0"):
                self.given = value
            return self.given if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "act", "out") else value

        def keeps(self, at: At) -> bool:
            return at.name != "act"

    result = judge(Program(), NotCalled())
    assert place(result) == (0, 0, "activation", "act", "in.0")
    assert codes(result) == ["boundary.missing"]
    assert "act is called only in a" in result.causes[0].text


def test_parameters_under_another_name_are_told_where_the_runs_start(judge: Judge) -> None:
    class Renamed(Program):
        def run(self) -> list[list[Tensor]]:
            records = super().run()
            for rank in records:
                for number, (fields, value) in enumerate(rank):
                    if fields["name"] == "head.weight":
                        rank[number] = (dict(fields) | {"name": "out_proj.weight"}, value)
            return records

    result = judge(Program(), Renamed())
    assert place(result) == ("init", None, "param", "head.weight", "model")
    assert codes(result) == ["boundary.missing"]
    assert "only b has out_proj.weight: if they are the same, rename them" in result.headline


def test_another_loss_function_is_told_at_the_loss(judge: Judge) -> None:
    class Other(Program):
        """Its loss function has another name and another gradient."""

        def run(self) -> list[list[Tensor]]:
            records = super().run()
            for rank in records:
                for number, (fields, value) in enumerate(rank):
                    if fields["name"] == "cross_entropy":
                        rank[number] = (dict(fields) | {"name": "focal_loss"}, value)
            return records

        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot) == (Kind.ACTIVATION_GRAD, "(root)", "out"):
                return np.asarray(value * (1 + np.abs(value)), value.dtype)
            return value

    result = judge(Program(), Other())
    assert place(result)[:4] == (0, 0, "loss", "cross_entropy")
    assert codes(result) == ["boundary.missing"]
    assert "cross_entropy is called only in a, focal_loss is called only in b" in result.headline


def test_a_module_that_one_run_does_in_its_own_way_is_not_where_a_later_step_went_wrong(judge: Judge) -> None:
    class OwnWay(Program):
        """It computes its activation function itself, and in step 1 gives the head something else."""

        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot, at.step) == (Kind.ACTIVATION, "head", "in.0", 1):
                return np.asarray(value + np.random.default_rng(3).normal(size=value.shape), value.dtype)
            return value

        def keeps(self, at: At) -> bool:
            return at.name != "act"

    result = judge(Program(), OwnWay())
    assert place(result) == (1, 0, "activation", "head", "in.0")
    assert codes(result) == []
