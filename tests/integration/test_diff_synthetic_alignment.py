"""Which step is which, and which rows take part: simulated programs, so that each case is a moment's work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortrace.tracer.types import Kind, Meta
from tests.integration.judged import Judge, assert_equivalent, codes, judge_in, place
from tests.simulated import IGNORE, PAD, ROOT, VOCABULARY, WIDTH, At, Documents, Part, Program

SAVED = 2


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


class Resumed(Program):
    """Begins with what a run of two steps leaves, and at the third step's data and schedule."""

    data, scheduler = SAVED, SAVED

    def documents(self, step: int) -> Documents:
        return super().documents(step + self.data)

    def position(self, step: int) -> int:
        return step + self.scheduler

    def initial_params(self, rank: int) -> dict[str, np.ndarray]:
        self.middle = Program(steps=SAVED)
        self.middle.run()
        return dict(self.middle.params[0])

    def initial_state(self, rank: int) -> dict[str, dict[str, np.ndarray]]:
        return {name: dict(state) for name, state in self.middle.state[0].items()}


class DataAnew(Resumed):
    data = 0


class SchedulerAnew(Resumed):
    scheduler = 0


def test_a_resumed_run_may_be_the_reference(judge: Judge) -> None:
    result = judge(Resumed(ranks=2, steps=2), Program(steps=4))
    assert_equivalent(result)
    assert result.step_offset == -SAVED


def test_data_that_start_anew_meet_the_step_whose_state_the_run_has(judge: Judge) -> None:
    result = judge(Program(steps=4), DataAnew(ranks=2, steps=2))
    assert place(result)[:3] == (SAVED, 0, "input")
    assert codes(result) == ["input.order"]
    assert "rows of b are a's of step 0" in result.headline
    [note] = [note for note in result.notes if "aligned by" in note]
    assert "by the state that the runs start from: b's step 0 is a's step 2" in note
    assert "by equal input tokens b's step 0 is a's step 0 (--align b:0=a:0)" in note


def test_a_scheduler_that_starts_anew_is_told_and_its_alignment_shown(judge: Judge) -> None:
    result = judge(Program(steps=4), SchedulerAnew(ranks=2, steps=2))
    assert place(result) == (SAVED, None, "schedule", "scheduler.0", "position")
    assert codes(result)[0] == "schedule.position"
    assert "by it b's step 0 is a's step 0 (--align b:0=a:0)" in "\n".join(result.notes)


class Shuffled(Program):
    """Reads the batches of the steps in another order."""

    def documents(self, step: int) -> Documents:
        return super().documents(self.setup.steps - 1 - step)


def test_batches_in_another_order_are_told_at_the_first_step(judge: Judge) -> None:
    # b reads in step 0 what a reads in step 2, but starts where a starts.
    result = judge(Program(), Shuffled())
    assert place(result)[:3] == (0, 0, "input")
    assert codes(result) == ["input.order"]


class Filled(Program):
    """Has a row of nothing but padding behind the rows of each microbatch."""

    def _filled(self, part: Part) -> Part:
        ids = np.vstack([part.ids, np.full((1, part.ids.shape[1]), PAD)])
        targets = np.vstack([part.targets, np.full((1, part.ids.shape[1]), IGNORE)])
        return Part(ids, targets, part.count)

    def run(self) -> list[list[Any]]:
        from tests import simulated

        collate = simulated.collate
        simulated.collate = lambda documents: self._filled(collate(documents))
        try:
            return super().run()
        finally:
            simulated.collate = collate


def test_rows_of_nothing_but_padding_are_no_rows(judge: Judge) -> None:
    assert_equivalent(judge(Program(), Filled()))
    assert_equivalent(judge(Filled(), Program(ranks=2, accumulate=2)))
    assert_equivalent(judge(Filled(), Filled(ranks=2)))


class CutBehind(Program):
    """Pads its documents and then cuts: ids are all columns but the last, labels all but the first.

    The longest of a microbatch lacks its last token there, the others hold it: its label is padding.
    """

    def documents(self, step: int) -> Documents:
        rng = np.random.default_rng(1000 + step)
        return [
            rng.integers(1, VOCABULARY, size=n) for n in rng.permutation(np.arange(4, 4 + self.setup.rows))
        ]

    def _cut(self, documents: Documents) -> Part:
        width = max(map(len, documents))
        rows = np.stack([np.pad(d, (0, width - len(d)), constant_values=PAD) for d in documents])
        ids, targets = rows[:, :-1].copy(), np.where(rows[:, 1:] == PAD, IGNORE, rows[:, 1:])
        return Part(ids, targets, int(np.count_nonzero(targets != IGNORE)))

    def run(self) -> list[list[Any]]:
        from tests import simulated

        collate, simulated.collate = simulated.collate, self._cut
        try:
            return super().run()
        finally:
            simulated.collate = collate


@pytest.mark.parametrize("layout", [{"ranks": 2}, {"accumulate": 2}, {"ranks": 2, "accumulate": 2}])
def test_last_tokens_that_only_shorter_rows_hold_are_no_part_of_what_rows_are(
    judge: Judge, layout: dict[str, int]
) -> None:
    assert_equivalent(judge(CutBehind(), CutBehind(**layout)))


def test_an_earlier_token_is_part_of_what_a_row_is(judge: Judge) -> None:
    class Other(CutBehind):
        def _cut(self, documents: Documents) -> Part:
            part = super()._cut(documents)
            part.ids[0, 1] = part.ids[0, 1] % (VOCABULARY - 1) + 1  # another token, and not the padding
            return part

    result = judge(CutBehind(), Other(ranks=2))
    assert place(result)[2] == "input"
    assert codes(result) == ["input.different"]


class ByHand(Program):
    """Writes its cross entropy as log_softmax and gather: no labels are seen, nor a value."""

    def keeps(self, at: At) -> bool:
        return (at.name, at.slot) not in {("cross_entropy", "target"), ("cross_entropy", "value")}

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        renamed = at._replace(name="log_softmax.gather") if at.name == "cross_entropy" else at
        return super()._put(renamed if self.keeps(at) else at, value, **fields)


def test_a_cross_entropy_by_hand_is_torchs(judge: Judge) -> None:
    result = judge(Program(), ByHand(ranks=2))
    assert result.verdict == "equivalent", result.headline
    assert result.coverage.complete
    assert result.coverage.by_kind["loss"] == judge(ByHand(), ByHand(order=2)).coverage.by_kind["loss"]


def test_a_cross_entropy_by_hand_that_is_wrong_is_found(judge: Judge) -> None:
    class Wrong(ByHand):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            return value * 1.01 if at.kind is Kind.LOSS and at.slot == "sum" else value

    assert place(judge(Program(), Wrong(ranks=2)))[2:] == ("loss", "cross_entropy", "sum")


class Dropping(Program):
    """Has a dropout behind tanh, of which each element is kept by a number of the generator."""

    seed, stood = 0, 0

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if at.kind is Kind.RNG:
            return np.full_like(value, self.stood + at.step)
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "act", "out"):
            kept = np.random.default_rng((self.seed, at.step)).random(value.shape) < 0.75
            return (value * kept / np.float32(0.75)).astype(np.float32)
        return value

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        of_dropout = at.name == "act" and at.kind is Kind.ACTIVATION
        return super()._put(at, value, **fields | ({"meta": Meta(module="Dropout")} if of_dropout else {}))


@pytest.mark.parametrize(("state", "code"), [(5, "rng.differs"), (0, "dropout.mask")])
def test_another_mask_is_told_with_whether_the_generator_stood_elsewhere(
    judge: Judge, state: int, code: str
) -> None:
    class Other(Dropping):
        seed = 1

    Other.stood = state
    result = judge(Dropping(), Other())
    assert place(result) == (0, 0, "activation", "act", "out")
    assert codes(result)[0] == code


def test_a_dropout_that_scales_otherwise_is_no_other_mask(judge: Judge) -> None:
    class Other(Dropping):
        seed = 1

        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            value = super().tamper(at, value)
            return value * np.float32(1.5) if at.name == "act" and at.slot == "out" else value

    assert not {"rng.differs", "dropout.mask"} & set(codes(judge(Dropping(), Other())))


def test_rows_that_one_run_cuts_short_are_another_input(judge: Judge) -> None:
    class Cut(Program):
        def documents(self, step: int) -> Documents:
            documents = super().documents(step)
            return [row[:4] for row in documents] if step == 1 else documents

    assert any(len(row) > 4 for row in Program().documents(1))
    result = judge(Program(), Cut())
    assert place(result)[:3] == (1, 0, "input")
    assert codes(result) == ["input.different"]


class Positioned(Program):
    """Adds an embedding of positions that are given with one row, for all rows of a batch."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        table = np.linspace(-1, 1, 9 * WIDTH, dtype=np.float32).reshape(1, 9, WIDTH)
        length = value.shape[1] if value.ndim > 1 else 0
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "embed", "out"):
            self._put(at._replace(name="pos", slot="in.0"), np.arange(length)[None], shard="data")
            self._put(at._replace(name="pos"), table[:, :length], shard="data")
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION_GRAD, "embed", "out"):
            summed = value.sum(axis=0, keepdims=True)
            self._put(at._replace(name="pos"), summed, shard="data")
        return value


@pytest.mark.parametrize("layout", [{"ranks": 2}, {"accumulate": 4}, {"ranks": 2, "accumulate": 2}], ids=str)
def test_gradients_of_positions_given_once_are_sums_over_the_batch(
    judge: Judge, layout: dict[str, int]
) -> None:
    assert_equivalent(judge(Positioned(), Positioned(**layout)))


def test_a_gradient_of_positions_that_lacks_a_row_is_found(judge: Judge) -> None:
    class Lacking(Positioned):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            of_positions = (at.kind, at.name, at.rank) == (Kind.ACTIVATION_GRAD, "pos", 1)
            return value * np.float32(0.9) if of_positions else super().tamper(at, value)

    assert place(judge(Positioned(), Lacking(ranks=2)))[2:] == ("activation_grad", "pos", "out")


def test_one_other_row_does_not_turn_a_batch(judge: Judge) -> None:
    class Other(Program):
        def documents(self, step: int) -> Documents:
            documents = super().documents(step)
            return [*documents[:-1], documents[-1][::-1]] if step == 1 else documents

    result = judge(Program(), Other())
    assert place(result)[:3] == (1, 0, "input")
    assert "1 of 8 rows" in result.headline


def test_generators_that_stand_alike_on_ranks_of_rows_of_unequal_length(judge: Judge) -> None:
    class Apart(Dropping):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            self.seed = self.stood = at.rank
            return super().tamper(at, value)

    class Alike(Dropping):
        pass

    result = judge(Apart(ranks=2), Alike(ranks=2))
    assert place(result) == (0, 0, "activation", "act", "out")
    assert codes(result)[0] == "rng.same_on_all_ranks"


class Scored(Program):
    """Has a module whose output is a sum over all positions of its rows, and an objective of half that."""

    slope = 0.5

    def documents(self, step: int) -> Documents:
        return list(np.random.default_rng(step).integers(1, 20, size=(8, 6)))

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "head", "out"):
            self._put(at._replace(name="score"), np.float32(value.sum()), shard="data")
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION_GRAD, "head", "out"):
            self._put(at._replace(name="score"), np.float32(self.slope), shard="data")
        return value


@pytest.mark.parametrize("slope", [0.5, 0.25])
def test_the_gradient_at_a_sum_is_the_same_in_all_parts(judge: Judge, slope: float) -> None:
    class Other(Scored):
        pass

    Other.slope = slope
    result = judge(Scored(), Other(accumulate=2))
    if slope == Scored.slope:
        assert_equivalent(result)
    else:
        assert place(result)[2:] == ("activation_grad", "score", "out")


class Sorting(Scored):
    """Sends every position to one of two experts, which are given them sorted, as one tensor."""

    wrong = 0.0

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "embed", "out"):
            tokens = value.reshape(-1, value.shape[-1])
            tokens = tokens[np.argsort(tokens[:, 0] > 0, kind="stable")]
            self._put(at._replace(name="experts", slot="in.0"), tokens, shard="data")
            made = np.tanh(tokens)
            made[1] *= np.float32(1 + self.wrong)
            self._put(at._replace(name="experts"), made, shard="data")
        return value


@pytest.mark.parametrize("wrong", [0.0, 1e-4])
def test_tokens_sorted_by_expert_follow_no_batch(judge: Judge, wrong: float) -> None:
    class Other(Sorting):
        pass

    Other.wrong = wrong
    result = judge(Sorting(), Other(accumulate=2))
    if wrong:
        assert place(result)[2:] == ("activation", "experts", "out")
    else:
        assert_equivalent(result)


class Inner(Program):
    """Calls a module inside its model, with ids alone, and computes the loss outside."""

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        return super()._put(at._replace(name="net") if at.name == ROOT else at, value, **fields)


class Wrapped(Inner):
    """Gives its ids and labels to a wrapper, which calls that module and computes the loss."""

    wrong = False

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        if (at.kind, at.name) != (Kind.INPUT, ROOT):
            return super()._put(at, value, **fields)
        value = (value + 7 * self.wrong) % VOCABULARY
        for kind in (Kind.INPUT, Kind.ACTIVATION):
            for slot, given in (("in.0.0", value), ("in.0.1", value[:, ::-1].copy())):
                Program._put(self, at._replace(kind=kind, slot=slot), given, shard="data")
        return value


@pytest.mark.parametrize("layout", [{"ranks": 2}, {"accumulate": 2}, {"ranks": 2, "accumulate": 2}])
def test_a_wrapper_that_is_given_labels_too_gives_the_same_rows(judge: Judge, layout: dict[str, int]) -> None:
    for a, b in ((Inner, Wrapped), (Wrapped, Inner)):
        result = judge(a(), b(**layout))
        assert result.verdict == "equivalent", result.headline
        assert result.coverage.complete


def test_other_rows_that_a_wrapper_is_given_are_told(judge: Judge) -> None:
    class Wrong(Wrapped):
        wrong = True

    result = judge(Inner(), Wrong(ranks=2))
    assert place(result)[2:] == ("activation", "net", "in.0")
    assert codes(result) == ["input.different"]
