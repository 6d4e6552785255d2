"""Each mistake made in a simulated program is given its name, and undoing it is what names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortrace.tracer.types import Kind, Meta
from tests.integration.judged import Judge, assert_equivalent, codes, place, tampering
from tests.simulated import HIDDEN, NAMES, VOCABULARY, WIDTH, Arrays, At, Program
from tests.synthetic import Tensor


class Even(Program):
    """A program whose documents are all of one length."""

    def documents(self, step: int) -> list[np.ndarray]:
        rng = np.random.default_rng(step)
        return [rng.integers(1, VOCABULARY, size=6) for _ in range(self.setup.rows)]


def arranged(order: list[int]) -> type[Program]:
    """Return a program whose hidden layer puts its features out in another order."""
    return tampering(Kind.ACTIVATION, "hidden", "out", lambda v: v[..., order], step=0)


@pytest.mark.parametrize("layout", [{}, {"ranks": 2}], ids=str)
@pytest.mark.parametrize(
    ("order", "code", "number"),
    [
        ([4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11], "layout.permuted_blocks", 8),
        ([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11], "layout.interleave", 10),
        ([0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11], "layout.interleave", 10),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0], "layout.shifted", 12),
    ],
    ids=["blocks", "interleaved", "taken apart", "rolled"],
)
def test_features_in_another_order(
    judge: Judge, order: list[int], code: str, number: int, layout: dict[str, int]
) -> None:
    result = judge(Program(), arranged(order)(**layout))
    assert place(result)[2:] == ("activation", "hidden", "out")
    assert codes(result)[0] == code
    assert result.causes[0].number == number


def test_heads_flattened_before_they_are_moved_behind_the_positions(judge: Judge) -> None:
    class Unmerged(Even):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.step, at.kind, at.name, at.slot) != (0, Kind.ACTIVATION, "hidden", "out"):
                return value
            rows, positions, _ = value.shape
            return value.reshape(rows, positions, 3, 4).swapaxes(1, 2).reshape(value.shape)

    result = judge(Even(), Unmerged())
    assert codes(result) == ["layout.transposed"]
    assert "3 heads" in result.causes[0].text


def test_a_gradient_read_in_its_transposed_shape(judge: Judge) -> None:
    def turned(value: np.ndarray) -> np.ndarray:
        return value.T.reshape(HIDDEN, WIDTH)

    result = judge(Program(), tampering(Kind.LOCAL_GRAD, "hidden.weight", "grad", turned, step=0)())
    assert codes(result) == ["layout.transposed"]


def test_values_shifted_by_one_with_zeros_moved_in(judge: Judge) -> None:
    def shifted(value: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(value[..., :1]), value[..., :-1]], axis=-1)

    result = judge(Program(), tampering(Kind.ACTIVATION, "act", "out", shifted, step=1)())
    assert codes(result) == ["layout.shifted"]
    assert result.causes[0].number == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_bias_added_twice(judge: Judge, ranks: int) -> None:
    class Twice(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "hidden", "out"):
                return value + self.params[at.rank]["hidden.bias"]
            return value

    result = judge(Program(), Twice(ranks=ranks))
    assert place(result)[2:] == ("activation", "hidden", "out")
    assert codes(result) == ["bias.duplicated"]
    assert result.causes[0].number == 2
    assert (result.causes[0].equals is not None) == (ranks == 2)


def test_a_bias_left_out(judge: Judge) -> None:
    class Without(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "head", "out"):
                return value - self.params[at.rank]["head.bias"]
            return value

    result = judge(Program(), Without())
    assert codes(result) == ["bias.missing"]


class Grouped(Program):
    """Averages gradients over pairs of ranks instead of all four."""

    groups_of_ranks = ((0, 1), (2, 3))

    def _reduce(self, step: int) -> None:
        whole = [dict(grads) for grads in self.grads]
        for group in self.groups_of_ranks:
            for name in NAMES:
                total = sum(whole[rank][name] for rank in group) / np.float32(len(group))
                for rank in group:
                    at = At(step, rank, self.setup.accumulate - 1, Kind.REDUCED_GRAD, name, "grad")
                    self.grads[rank][name] = self._put(at, total, shard="replicate")


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 2), (1, 3))], ids=["neighbours", "strided"])
def test_gradients_reduced_over_half_of_the_ranks(judge: Judge, groups: tuple[tuple[int, int], ...]) -> None:
    class Mine(Grouped):
        groups_of_ranks = groups

    result = judge(Program(), Mine(ranks=4))
    assert place(result)[2] == "reduced_grad"
    assert codes(result)[0] == "reduction.wrong_group"
    assert result.causes[0].number == 2
    assert str(groups[0]) in result.causes[0].text


def test_gradients_rounded_for_the_reduction(judge: Judge) -> None:
    class Rounded(Program):
        def _reduce(self, step: int) -> None:
            for name in NAMES:
                halves = [(g[name] / 2).astype(np.float16) for g in self.grads]
                total = (halves[0] + halves[1]).astype(np.float32)
                for rank, grads in enumerate(self.grads):
                    at = At(step, rank, self.setup.accumulate - 1, Kind.REDUCED_GRAD, name, "grad")
                    grads[name] = self._put(at, total, shard="replicate")

    result = judge(Program(), Rounded(ranks=2))
    assert place(result)[2] == "reduced_grad"
    assert codes(result) == ["precision.reduce_dtype"]
    assert result.causes[0].equals == "float16"


def test_microbatches_added_up_in_the_dtype_of_the_reduction(judge: Judge) -> None:
    """What a wrapper accumulates in its reduce dtype is rounded after each microbatch."""

    class Rounded(Program):
        def _reduce(self, step: int) -> None:
            last = self.setup.accumulate - 1
            for name in NAMES:
                halves = []
                for rank in range(self.setup.ranks):
                    parts = [
                        value
                        for fields, value in self.records[rank]
                        if (fields["step"], fields["kind"], fields["name"]) == (step, Kind.LOCAL_GRAD, name)
                        and fields["microbatch"] is not None
                    ]
                    halves.append((parts[0].astype(np.float16) + parts[1]).astype(np.float16))
                total = ((halves[0] + halves[1]).astype(np.float16) / 2).astype(np.float32)
                for rank, grads in enumerate(self.grads):
                    at = At(step, rank, last, Kind.REDUCED_GRAD, name, "grad")
                    grads[name] = self._put(at, total, shard="replicate")

    result = judge(Program(accumulate=2), Rounded(ranks=2, accumulate=2))
    assert place(result)[2] == "reduced_grad"
    assert codes(result) == ["precision.reduce_dtype"]
    assert result.causes[0].equals == "float16"
    assert result.causes[0].residual_after < 1e-6


def test_moments_of_each_other(judge: Judge) -> None:
    class Positive(Program):
        def initial_state(self, rank: int) -> dict[str, Arrays]:
            state = super().initial_state(rank)
            return {n: own | {"exp_avg": np.abs(own["exp_avg"])} for n, own in state.items()}

    class Swapped(Positive):
        def initial_state(self, rank: int) -> dict[str, Arrays]:
            state = super().initial_state(rank)
            own = state["hidden.weight"]
            swapped = own | {"exp_avg": own["exp_avg_sq"], "exp_avg_sq": own["exp_avg"]}
            return state | {"hidden.weight": swapped}

    result = judge(Positive(resumed=True), Swapped(resumed=True))
    assert place(result)[:3] == ("init", None, "optimizer_state")
    assert codes(result) == ["optimizer.swapped_state"]


@pytest.mark.parametrize(("mine", "other"), [("AdamW", "Adam"), ("Adam", "AdamW")])
def test_weight_decay_of_the_other_kind(judge: Judge, mine: str, other: str) -> None:
    class Other(Program):
        """Calls itself what the reference is, and decays weights the other way."""

        def _update_one(self, rank: int, name: str, gradient: np.ndarray, hypers: dict[str, float]) -> None:
            decay, rate = hypers["weight_decay"], hypers["lr"]
            param = self.params[rank][name]
            plain = hypers | {"weight_decay": 0.0}
            if other == "Adam":
                super()._update_one(rank, name, gradient + np.float32(decay) * param, plain)
            else:
                self.params[rank][name] = param * np.float32(1 - rate * decay)
                super()._update_one(rank, name, gradient, plain)

    class Mine(Program):
        def _update_one(self, rank: int, name: str, gradient: np.ndarray, hypers: dict[str, float]) -> None:
            decay = hypers["weight_decay"]
            if mine == "Adam":
                gradient = gradient + np.float32(decay) * self.params[rank][name]
                hypers = hypers | {"weight_decay": 0.0}
            super()._update_one(rank, name, gradient, hypers)

    settings = {"optimizer": mine, "weight_decay": 0.1}
    result = judge(Mine(**settings), Other(**settings))
    assert place(result)[2] in ("optimizer_state", "param")
    assert codes(result)[0] == "optimizer.weight_decay_mode"


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_what_its_own_update_gives_is_not_said_to_come_of_another_way_to_decay(
    judge: Judge, optimizer: str
) -> None:
    # both do what their settings say, to gradients that are clipped otherwise, and out of view
    settings: dict[str, Any] = {"optimizer": optimizer, "weight_decay": 1e-4, "lr": 0.5}
    view: dict[str, Any] = {"kinds": (Kind.PARAM,), "include": ("*.weight",)}  # biases have no decay
    result = judge(Program(**settings), Program(**settings, max_norm=1e-6), **view)
    assert place(result)[2] == "param"
    assert codes(result) == []


def test_an_activation_of_the_step_before(judge: Judge) -> None:
    class Stale(Even):
        old: np.ndarray

        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot) != (Kind.ACTIVATION, "act", "out"):
                return value
            if at.step == 1:
                return self.old
            self.old = value
            return value

    result = judge(Even(), Stale())
    assert place(result) == (1, 0, "activation", "act", "out")
    assert codes(result) == ["value.stale"]
    assert "in step 0" in result.causes[0].text


class Dropping(Program):
    """Has a dropout in the place of tanh, whose mask depends on the rank, if it is on."""

    on, alike = True, False

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "act", "in.0"):
            self.given = value
        if (at.kind, at.name, at.slot) != (Kind.ACTIVATION, "act", "out"):
            return value
        if not self.on:
            return self.given
        kept = np.random.default_rng((0 if self.alike else at.rank, at.step)).random(value.shape) < 0.75
        return (self.given * kept / np.float32(0.75)).astype(np.float32)

    def _put(self, at: At, value: Any, **fields: Any) -> Any:
        of_dropout = at.name == "act" and at.kind is Kind.ACTIVATION
        meta = Meta(module="Dropout", training=self.on)
        return super()._put(at, value, **fields | ({"meta": meta} if of_dropout else {}))


class DroppingEven(Dropping, Even):
    """The same, on rows of one length."""


def test_the_same_mask_on_all_ranks(judge: Judge) -> None:
    class Alike(DroppingEven):
        alike = True

    result = judge(DroppingEven(ranks=2), Alike(ranks=2))
    assert place(result) == (0, 0, "activation", "act", "out")
    assert codes(result)[0] == "rng.same_on_all_ranks"


@pytest.mark.parametrize("on", [True, False])
def test_a_dropout_that_only_one_run_has_in_training_mode(judge: Judge, on: bool) -> None:
    class Other(Dropping):
        pass

    class Reference(Dropping):
        pass

    Other.on, Reference.on = on, not on
    result = judge(Reference(), Other(ranks=2))
    assert place(result) == (0, 0, "activation", "act", "out")
    assert codes(result)[0] == "mode.training"
    assert result.causes[0].number == on


def test_padding_that_counts_as_tokens(judge: Judge) -> None:
    class Padded(Program):
        """Pads targets with a token, which the reference ignores; ``counted`` says whether b does."""

        counted = False

        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if at.kind is Kind.LOSS and at.slot == "target" and self.counted:
                self.valid = value.size
            if at.kind is Kind.LOSS and at.slot == "count" and self.counted:
                return np.int64(self.valid)
            return value

    class Counting(Padded):
        counted = True

    assert_equivalent(judge(Padded(), Padded(ranks=2)))
    result = judge(Padded(), Counting())
    assert place(result)[2:] == ("loss", "cross_entropy", "count")
    assert codes(result)[0] == "mask.padding_leak"
    padding = sum(9 - len(d) + 1 for d in Program().documents(0))
    assert result.causes[0].number <= padding


def test_heads_that_were_not_moved_in_rows_of_unequal_length(judge: Judge) -> None:
    class Unmerged(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.step, at.kind, at.name, at.slot) != (0, Kind.ACTIVATION, "hidden", "out"):
                return value
            rows, positions, _ = value.shape
            return value.reshape(rows, positions, 3, 4).swapaxes(1, 2).reshape(value.shape)

    result = judge(Program(ranks=2), Unmerged(ranks=2))
    assert place(result)[2:] == ("activation", "hidden", "out")
    assert codes(result) == ["layout.transposed"]
    assert "3 heads" in result.causes[0].text


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_unequal_length_shifted_along_their_positions(judge: Judge, ranks: int) -> None:
    def shifted(value: np.ndarray) -> np.ndarray:
        return np.concatenate([np.zeros_like(value[:, :1]), value[:, :-1]], axis=1)

    result = judge(Program(), tampering(Kind.ACTIVATION, "hidden", "out", shifted, step=0)(ranks=ranks))
    assert codes(result) == ["layout.shifted"]
    assert result.causes[0].number == 1


def test_blocks_that_are_stored_head_by_head(judge: Judge) -> None:
    order = [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]  # three blocks of two parts, taken part by part
    result = judge(Program(), arranged(order)())
    assert codes(result)[0] == "layout.interleave"
    assert "in blocks of 2" in result.causes[0].text


def test_an_update_that_is_taken_back(judge: Judge) -> None:
    class Undone(Program):
        def initial_params(self, rank: int) -> Arrays:
            self.old: dict[int, np.ndarray] = {}
            return super().initial_params(rank)

        def before_update(self, step: int, rank: int) -> None:
            if step == 1:
                self.old[rank] = self.params[rank]["hidden.weight"]

        def _step(self, step: int) -> None:
            for rank, old in self.old.items() if step == 2 else ():
                self.params[rank]["hidden.weight"] = old
                start = At(step, rank, None, Kind.PARAM, "hidden.weight", "start")
                self._put(start, old, meta=Meta(requires_grad=True), shard="replicate")
            super()._step(step)

    result = judge(Program(), Undone())
    assert place(result) == (2, None, "param", "hidden.weight", "start")
    assert codes(result)[0] == "value.not_updated"
    assert "taken back" in result.causes[0].text


def test_a_rank_that_skips_an_update_and_clips_in_each_pass(judge: Judge) -> None:
    class Skipping(Even):
        """Rank 1 makes no update in step 0: its window goes on with the rows of step 1."""

        def write(self, root: Path, **fields: Any) -> Path:
            self.run()
            late = [i for i, (f, _) in enumerate(self.records[1]) if f["step"] >= 0]
            updated = (Kind.SCHEDULE, Kind.OPTIMIZER_STATE, Kind.PARAM)
            records = []
            for number, (found, value) in enumerate(self.records[1]):
                fields_ = dict(found)
                if number in late and found["step"] == 0 and found["kind"] in updated:
                    fields_["kind"], fields_["name"] = Kind.RNG, f"gone.{number}"
                elif number in late and found["step"] == 1:
                    fields_["step"] = 0
                    fields_["call"] += found["kind"] == Kind.CLIPPED_GRAD
                    fields_["microbatch"] = None if found["microbatch"] is None else found["microbatch"] + 1
                elif number in late and found["step"] > 1:
                    fields_["step"] = found["step"] - 1
                records.append((fields_, value))
            self.records[1] = records
            self.run = lambda: self.records  # type: ignore[method-assign]
            return super().write(root, **fields)

    result = judge(Even(steps=4), Skipping(steps=4, ranks=2))
    assert place(result)[2:] == ("input", "(root)", "rows")
    assert codes(result)[0] == "step.skipped_on_some_ranks"


def test_a_shared_parameter_that_is_two_in_one_run(judge: Judge) -> None:
    class Shared(Program):
        """A part of the hidden weight's gradient is that of a further parameter, or in a all of it is one."""

        alone = True

        def run(self) -> list[list[Tensor]]:
            found = []
            for rank in super().run():
                found.append([])
                for fields, value in rank:
                    new = dict(fields)
                    if new["name"] == "spare.weight" and not self.alone:
                        continue
                    if new["kind"] == Kind.PARAM and new["name"] == "hidden.weight" and not self.alone:
                        new["meta"] = Meta(requires_grad=True, aliases=("spare.weight",))
                    found[-1].append((new, value))
            self.records = found
            return found

        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if at.name != "hidden.weight" or not self.alone:
                return value
            spare = at._replace(name="spare.weight")
            if at.kind == Kind.PARAM:
                self._put(spare, value, meta=Meta(requires_grad=True))
            if at.kind == Kind.LOCAL_GRAD and at.microbatch is not None:
                self.rest = value * np.linspace(0, 1, WIDTH, dtype=np.float32)
                self._put(spare, self.rest)
                return value - self.rest
            if (at.kind in (Kind.LOCAL_GRAD, Kind.CLIPPED_GRAD)) and at.slot == "grad":
                self._put(spare, self.rest)  # an optimizer is given both
            return value

    class Tied(Shared):
        alone = False

    result = judge(Tied(steps=1, max_norm=1e9), Shared(steps=1, max_norm=1e9))
    assert codes(result)[0] == "tied.not_summed"
    assert result.causes[0].number == 2
