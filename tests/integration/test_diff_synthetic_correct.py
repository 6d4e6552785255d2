"""Correct programs are equivalent however their batch is split, ordered, scaled and summed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.engine import compare
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import ROOT, Kind, Mesh, Placement, Shard
from tests.integration.judged import Judge, assert_equivalent, first, place
from tests.simulated import CLIP, At, Documents, Program
from tests.synthetic import write_trace

STEPS = 5


@pytest.mark.parametrize(
    "layout",
    [
        {"ranks": 2},
        {"ranks": 4},
        {"accumulate": 4},
        {"ranks": 2, "accumulate": 2},
        {"order": 3},
        {"ranks": 2, "loss_scale": 1024.0},
    ],
    ids=str,
)
def test_a_layout_is_equivalent_to_one_rank_over_five_steps(judge: Judge, layout: dict[str, int]) -> None:
    assert_equivalent(judge(Program(steps=STEPS), Program(steps=STEPS, **layout)))


@pytest.mark.parametrize("layout", [{"ranks": 4}, {"ranks": 2, "accumulate": 2}, {}], ids=str)
def test_a_layout_is_equivalent_to_two_ranks(judge: Judge, layout: dict[str, int]) -> None:
    assert_equivalent(judge(Program(steps=STEPS, ranks=2), Program(steps=STEPS, **layout)))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_resumed_run_is_equivalent_with_either_optimizer(judge: Judge, optimizer: str) -> None:
    settings = {"steps": STEPS, "optimizer": optimizer, "resumed": True}
    assert_equivalent(judge(Program(**settings), Program(ranks=2, **settings)))


def test_two_recordings_of_one_program_are_bitwise_equal(judge: Judge) -> None:
    result = judge(Program(ranks=2), Program(ranks=2), policy="exact")
    assert_equivalent(result)
    assert result.coverage.bitwise_equal == result.coverage.compared


def test_the_order_of_rows_within_a_batch_does_not_matter(judge: Judge) -> None:
    class Backwards(Program):
        def documents(self, step: int) -> Documents:
            return super().documents(step)[::-1]

    assert_equivalent(judge(Program(), Backwards()))
    assert_equivalent(judge(Program(), Backwards(ranks=2)))


def test_the_exact_policy_does_not_forgive_another_order_of_sums(judge: Judge) -> None:
    result = judge(Program(), Program(order=1), policy="exact")
    assert (first(result).where.step, first(result).where.kind) == (0, "activation")
    assert result.policy == "exact"


def test_a_floor_of_repeated_noisy_runs_hides_their_noise(judge: Judge) -> None:
    # noise of 1e-3 in every product: far above round-off, so that the error model alone calls it wrong
    noisy = {"noise": 1e-3, "steps": 2}
    runs = [judge.write(Program(order=n, **noisy)) for n in range(5)]
    assert judge(runs[0], runs[1]).verdict == "divergent"
    assert_equivalent(judge(runs[0], runs[1], floor=tuple(runs[2:])))


def test_a_floor_that_differs_as_other_code_does_is_said(judge: Judge) -> None:
    class Mistaken(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            return value * np.float32(1.01) if (at.kind, at.name) == (Kind.ACTIVATION, "hidden") else value

    wrong = judge.write(Mistaken(), command=("python", "other.py"))
    result = judge(Program(), wrong, floor=(wrong,))
    assert any("is it a run of the same code?" in note for note in result.notes)


def test_a_floor_that_was_given_other_rows_is_refused(judge: Judge) -> None:
    class Elsewhere(Program):
        def documents(self, step: int) -> Documents:
            return super().documents(step + 100)

    with pytest.raises(BadRequest, match="no run of a's own code"):
        judge(Program(), Program(order=1), floor=(judge.write(Elsewhere()),))


def test_a_mistake_above_the_floor_is_found_through_the_noise(judge: Judge) -> None:
    class Louder(Program):
        def tamper(self, at, value):  # type: ignore[no-untyped-def]
            if (at.kind, at.name, at.slot, at.step) == (Kind.ACTIVATION, "act", "out", 1):
                return np.asarray(value * np.float32(1.2))
            return value

    noisy = {"noise": 1e-3, "steps": 2}
    runs = [judge.write(Program(order=n, **noisy)) for n in range(4)]
    result = judge(runs[0], Louder(order=9, **noisy), floor=tuple(runs[1:]))
    assert place(result) == (1, 0, "activation", "act", "out")
    judgement = first(result).judgement
    assert judgement is not None
    assert judgement.policy == "floor"
    assert judgement.floor_runs == 3


@pytest.mark.parametrize(
    ("align", "said"), [("b:0=a:7", "a has no step 7"), ("b:9=a:0", "b has no step 9"), ("0=7", "such as")]
)
def test_an_alignment_to_a_step_that_does_not_exist_is_refused(judge: Judge, align: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        judge(Program(), Program(), align=align)


def test_a_run_continued_from_a_later_step_is_aligned_by_its_tokens(judge: Judge) -> None:
    # b starts from what a holds after step 1, and sees a's rows of step 2 in its own step 0
    whole = Program(ranks=1, steps=4)
    middle = Program(ranks=1, steps=2)
    middle.run()

    class Continued(Program):
        def documents(self, step: int) -> Documents:
            return super().documents(step + 2)

        def position(self, step: int) -> int:
            return step + 2

        def initial_params(self, rank: int) -> dict[str, np.ndarray]:
            return dict(middle.params[0])

        def initial_state(self, rank: int) -> dict[str, dict[str, np.ndarray]]:
            return {name: dict(state) for name, state in middle.state[0].items()}

    path = judge.write(whole)
    settings = {"ranks": 2, "steps": 2}
    by_tokens = judge(path, Continued(**settings))
    by_request = judge(path, Continued(**settings), align="b:0=a:2")
    for result in (by_tokens, by_request):
        assert_equivalent(result)
        assert result.step_offset == 2
    assert any("aligned by equal input tokens" in note for note in by_tokens.notes)


class ClippedByHand(Program):
    """Scales its gradients as a clip would, without calling one."""

    def keeps(self, at: At) -> bool:
        return not (at.kind is Kind.CLIPPED_GRAD and (at.name == CLIP or at.slot == "before"))


def test_a_clip_by_hand_is_equivalent_to_a_clip_by_a_function(judge: Judge) -> None:
    for a, b in ((Program(), ClippedByHand(ranks=2)), (ClippedByHand(), Program(ranks=2))):
        result = judge(a, b)
        assert result.verdict == "equivalent", result.headline
        assert all(not missing.counts_as_incomplete for missing in result.coverage.missing)


def test_ids_that_rows_happen_to_end_in_are_no_padding(tmp_path: Path) -> None:
    ids = np.array([[1, 3], [3, 3], [5, 3], [3, 3], [2, 2], [7, 1]])
    at = {"kind": Kind.INPUT, "name": ROOT, "slot": "in.0"}
    mesh = {"ddp": Mesh(("dp",), (2,), (0, 1))}
    own = [Shard("ddp", (rank,), (Placement("data"),)) for rank in (0, 1)]
    a = write_trace(tmp_path / "a", [[(at, ids)]])
    b = write_trace(
        tmp_path / "b", [[(at | {"shard": own[rank]}, ids[rank::2])] for rank in (0, 1)], meshes=mesh
    )
    result = compare(a, b)
    assert result.verdict == "equivalent", result.headline
    assert not any("padding" in note for note in result.notes)
