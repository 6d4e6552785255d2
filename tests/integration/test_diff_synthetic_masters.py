"""Half-precision parameters updated through float32 masters that the program keeps itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tensortrace.tracer.types import INIT_STEP, Kind, Meta
from tests.integration.judged import Judge, assert_equivalent, codes, judge_in, place
from tests.simulated import BIASES, HIDDEN, NAMES, VOCABULARY, At, Program

_OF_MASTERS = (Kind.CLIPPED_GRAD, Kind.OPTIMIZER_STATE, Kind.PARAM)


class Mastered(Program):
    """Passes compute with float16 copies; what the optimizer holds is float32 and called ``param.N``."""

    def copies(self, step: int, rank: int) -> dict[str, np.ndarray]:
        return {name: value.astype(np.float16) for name, value in self.masters[rank].items()}

    def run(self) -> Any:
        start = [{n: v.astype(np.float16).astype(np.float32) for n, v in p.items()} for p in self.params]
        self.params = self.masters = start
        return super().run()

    def _record_state(self, step: int, rank: int) -> None:
        if step == INIT_STEP:
            self._record_copies(step, rank, "model", self.copies(step, rank))
        super()._record_state(step, rank)

    def _step(self, step: int) -> None:
        ranks = range(self.setup.ranks)
        self.params = list(self.params)
        for rank in ranks:
            copies = self.copies(step, rank)
            if step:
                self._record_copies(step, rank, "start", copies)
            self.params[rank] = {name: value.astype(np.float32) for name, value in copies.items()}
        super()._step(step)

    def before_update(self, step: int, rank: int) -> None:
        self.params[rank] = self.masters[rank]

    def _update(self, step: int, rank: int, sums: dict[str, np.ndarray]) -> None:
        super()._update(step, rank, sums)
        self.masters[rank] = self.params[rank]

    def _record_copies(self, step: int, rank: int, slot: str, copies: dict[str, np.ndarray]) -> None:
        for name, value in copies.items():
            super()._put(At(step, rank, None, Kind.PARAM, name, slot), value, shard="replicate")

    def _put(self, at: At, value: Any, *, meta: Meta | None = None, **more: Any) -> Any:
        if at.kind in _OF_MASTERS and at.name in NAMES:
            at = at._replace(name=f"param.{NAMES.index(at.name)}")
        if meta is not None and meta.members:
            members = tuple(f"param.{NAMES.index(name)}" for name in meta.members)
            meta = replace(meta, members=members)
        return super()._put(at, value, meta=meta, **more)


class NotCopiedBack(Mastered):
    def copies(self, step: int, rank: int) -> dict[str, np.ndarray]:
        if step != 2:
            self.last = super().copies(step, rank)
        return self.last


class CopiedWrongly(Mastered):
    def copies(self, step: int, rank: int) -> dict[str, np.ndarray]:
        found = super().copies(step, rank)
        if step == 1:
            found["head.weight"] = (found["head.weight"] * 1.01).astype(np.float16)
        return found


class CutOff(Mastered):
    """A kernel that rounds towards zero."""

    def copies(self, step: int, rank: int) -> dict[str, np.ndarray]:
        found = {}
        for name, value in self.masters[rank].items():
            cut = value.astype(np.float16)
            beyond = np.abs(cut.astype(np.float32)) > np.abs(value)
            found[name] = np.where(beyond, np.nextafter(cut, np.float16(0)), cut)
        return found


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


def test_masters_are_judged_on_one_rank_and_on_two(judge: Judge) -> None:
    result = judge(Mastered(steps=3), Mastered(ranks=2, steps=3))
    assert_equivalent(result)
    names = {b.where.name for b in result.boundaries if b.where.kind == "optimizer_state"}
    assert names == set(NAMES)  # under the names of the modules' own


def test_copies_rounded_another_way_are_legal(judge: Judge) -> None:
    assert_equivalent(judge(Mastered(steps=3), CutOff(steps=3)))


def test_a_copy_that_was_not_made_is_told_where_it_is_missing(judge: Judge) -> None:
    result = judge(Mastered(steps=3), NotCopiedBack(steps=3))
    assert place(result)[:3] == (2, None, "param")
    assert place(result)[-1] == "copy"
    assert codes(result)[0] == "value.not_updated"


def test_a_copy_of_another_value_is_told_at_its_parameter(judge: Judge) -> None:
    result = judge(Mastered(steps=3), CopiedWrongly(steps=3))
    assert place(result) == (1, None, "param", "head.weight", "copy")


def test_a_master_given_a_wrong_gradient_is_told_at_its_parameter(judge: Judge) -> None:
    class Scaled(Mastered):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            wrong = at[:1] + at[3:] == (1, Kind.CLIPPED_GRAD, "param.1", "before")
            return np.asarray(value * np.float32(1.02)) if wrong else value

    result = judge(Mastered(ranks=2, steps=2), Scaled(ranks=2, steps=2))
    assert place(result)[2:] == ("clipped_grad", "hidden.weight", "before")


class Flat(Mastered):
    """The same with one flat float32 vector in the optimizer, of which all parameters are slices."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(weight_decay=0.0, **settings)
        self.pieces: dict[tuple[Any, ...], list[np.ndarray]] = {}

    def groups(self) -> list[tuple[tuple[str, ...], dict[str, float]]]:
        return [(NAMES, {})]

    def _put(self, at: At, value: Any, *, meta: Meta | None = None, **more: Any) -> Any:
        if meta is not None and meta.members:
            meta = replace(meta, members=NAMES[:1])
        of_master = at.kind in _OF_MASTERS and at.name in NAMES and at.slot != "start"
        if not of_master or (at.step == INIT_STEP and value.dtype == np.float16):
            return super()._put(at, value, meta=meta, **more)
        pieces = self.pieces.setdefault((at.step, at.rank, at.kind, at.slot), [])
        pieces.append(np.ravel(value))
        if len(pieces) == len(NAMES):
            whole = pieces[0][:1] if at.slot == "step" else np.concatenate(pieces)
            super()._put(at._replace(name=NAMES[0]), whole.astype(np.float32), meta=meta, **more)
        return value


def test_parameters_that_are_slices_of_a_flat_vector_go_by_it(judge: Judge) -> None:
    assert_equivalent(judge(Flat(steps=4), Flat(accumulate=2, steps=4)))


def test_a_slice_copied_from_another_place_is_told(judge: Judge) -> None:
    class Shifted(Flat):
        def copies(self, step: int, rank: int) -> dict[str, np.ndarray]:
            found = super().copies(step, rank)
            if step == 2:
                found["head.weight"] = np.roll(found["head.weight"], 1)
            return found

    result = judge(Flat(steps=4), Shifted(accumulate=2, steps=4))
    assert place(result)[:4] == (2, None, "param", "head.weight")


def test_a_slice_copied_one_element_too_far_is_told(judge: Judge) -> None:
    class TooFar(Flat):
        def copies(self, step: int, rank: int) -> dict[str, np.ndarray]:
            found = super().copies(step, rank)
            if step == 2:  # all of these values stand in the vector, one element further
                after = np.concatenate([found["head.weight"].ravel(), found["head.bias"]])
                found["head.weight"] = after[1 : 1 + found["head.weight"].size].reshape(VOCABULARY, HIDDEN)
            return found

    result = judge(Flat(steps=4), TooFar(accumulate=2, steps=4))
    assert place(result)[:4] == (2, None, "param", "head.weight")


class Overwritten(Program):
    """What gradients are left in is given new ones in every step; one is nothing but round-off."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        if (
            at.name == "hidden.bias"
            and at.kind in (Kind.LOCAL_GRAD, Kind.CLIPPED_GRAD)
            and at.slot != "start"
        ):
            signs = np.random.default_rng((self.setup.order, at.step)).choice([-1, 1], value.shape)
            return np.asarray(1e-10 * signs, np.float32)
        return value

    def updates(self, step: int, rank: int, name: str) -> bool:
        return name != "hidden.bias"

    def run(self) -> Any:
        self.left: dict[int, dict[str, np.ndarray]] = {}
        return super().run()

    def _record_leftovers(self, step: int, rank: int) -> None:
        for name, value in self.left.get(rank, {}).items():
            self._put(At(step, rank, None, Kind.LOCAL_GRAD, name, "start"), value)

    def _update(self, step: int, rank: int, sums: dict[str, np.ndarray]) -> None:
        super()._update(step, rank, sums)
        self.left[rank] = dict(self.grads[rank])


def test_what_is_left_of_round_off_is_judged_as_it_was(judge: Judge) -> None:
    assert_equivalent(judge(Overwritten(), Overwritten(order=1)))


def test_what_both_runs_leave_and_write_anew_is_no_missing_zero_grad(judge: Judge) -> None:
    class Changed(Overwritten):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            off = at[:1] + at[3:] == (1, Kind.LOCAL_GRAD, "head.bias", "start")
            return np.asarray(value * np.float32(1.01)) if off else super().tamper(at, value)

    result = judge(Changed(), Overwritten(order=1))
    assert result.verdict == "equivalent", result.headline
    assert "gradients left over between steps differ" in " ".join(result.notes)


class Doubled(Mastered):
    """The model computes in float32 too: what the optimizer holds are copies all the same."""

    def copies(self, step: int, rank: int) -> dict[str, np.ndarray]:
        return dict(self.masters[rank])

    def initial_params(self, rank: int) -> dict[str, np.ndarray]:
        found = super().initial_params(rank)
        return {name: value.astype(np.float16).astype(np.float32) for name, value in found.items()}


class Plain(Program):
    """The same whose optimizer holds the module's own parameters."""

    def initial_params(self, rank: int) -> dict[str, np.ndarray]:
        found = super().initial_params(rank)
        return {name: value.astype(np.float16).astype(np.float32) for name, value in found.items()}


def test_masters_of_a_float32_model_are_judged_against_its_own_parameters(judge: Judge) -> None:
    assert_equivalent(judge(Plain(steps=3), Doubled(ranks=2, steps=3)))
    assert_equivalent(judge(Doubled(steps=3), Plain(ranks=2, steps=3)))


def test_a_copy_is_told_where_the_other_run_keeps_none(judge: Judge) -> None:
    class Late(Doubled):
        def copies(self, step: int, rank: int) -> dict[str, np.ndarray]:
            if step != 2:
                self.last = super().copies(step, rank)
            return self.last

    result = judge(Plain(steps=3), Late(steps=3))
    assert place(result)[:3] == (2, None, "param")
    assert place(result)[-1] == "copy"
    assert codes(result)[0] == "value.not_updated"


class Sharded(Doubled):
    """Each rank's optimizer holds one part of a flat float32 vector of all parameters, and of zeros."""

    vectors: tuple[tuple[str, ...], ...] = (NAMES,)
    padding = 2

    def __init__(self, **settings: Any) -> None:
        super().__init__(weight_decay=0.0, **settings)
        self.pieces: dict[tuple[Any, ...], dict[str, np.ndarray]] = {}

    def groups(self) -> list[tuple[tuple[str, ...], dict[str, float]]]:
        return [(vector, {}) for vector in self.vectors]

    def clips_after(self, step: int, microbatch: int) -> bool:
        return False

    def _put(self, at: At, value: Any, *, meta: Meta | None = None, **more: Any) -> Any:
        if meta is not None and meta.members:
            held = tuple(vector[0] for vector in self.vectors if set(vector) & set(meta.members))
            meta = replace(meta, members=held)
        if not (at.kind in _OF_MASTERS and at.name in NAMES and at.microbatch is None):
            return super()._put(at, value, meta=meta, **more)
        vector = next(vector for vector in self.vectors if at.name in vector)
        pieces = self.pieces.setdefault((at.step, at.rank, at.kind, at.slot, vector), {})
        pieces[at.name] = np.ravel(value)
        if len(pieces) == len(vector):
            whole = np.concatenate([*(pieces[name] for name in vector), np.zeros(self.padding)])
            part = np.split(whole[: len(whole) // 2 * 2], self.setup.ranks)[at.rank]
            part = pieces[vector[0]][0] if at.slot == "step" else part
            super()._put(at._replace(name=vector[0]), part.astype(np.float32), meta=meta)
        return value


def test_slices_of_a_flat_vector_are_judged_as_the_parameters_that_they_are(judge: Judge) -> None:
    class Unclipped(Plain):
        def clips_after(self, step: int, microbatch: int) -> bool:
            return False

    result = judge(Unclipped(steps=3, weight_decay=0.0), Sharded(ranks=2, steps=3))
    assert result.verdict == "equivalent", result.headline
    assert {b.where.name for b in result.boundaries if b.where.kind == "optimizer_state"} == set(NAMES)
    assert judge(Sharded(steps=3), Sharded(ranks=2, steps=3)).verdict == "equivalent"


def test_biases_of_zeros_are_told_from_padding(judge: Judge) -> None:
    class Grouped(Sharded):
        """Weights and biases have vectors of their own, padded with more zeros than a bias has."""

        vectors = (tuple(name for name in NAMES if name not in BIASES), BIASES)
        padding = 40

        def initial_params(self, rank: int) -> dict[str, np.ndarray]:
            found = super().initial_params(rank)
            return found | {name: np.zeros_like(found[name]) for name in BIASES}

    result = judge(Grouped(steps=3), Grouped(ranks=2, steps=3))
    assert result.verdict == "equivalent", result.headline
    assert {b.where.name for b in result.boundaries if b.where.kind == "optimizer_state"} == set(NAMES)


def test_a_slice_updated_wrongly_on_one_rank_is_told_at_its_parameter(judge: Judge) -> None:
    class Wrong(Sharded):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if at[:2] + at[3:] == (1, 1, Kind.OPTIMIZER_STATE, "param.0", "exp_avg"):
                value = value.copy()
                value[-4:-1] *= np.float32(1.01)  # the last of head.bias; behind it is padding
            return value

    result = judge(Sharded(steps=3), Wrong(ranks=2, steps=3))
    assert place(result) == (1, None, "optimizer_state", "head.bias", "exp_avg")


class ByHand(Sharded):
    """Gradients are added and clipped by code that nothing is seen of, each rank's part on its rank."""

    limit = 0.1

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return 1 / sum(counts.values())

    def reductions(self, name: str) -> Sequence[str]:
        return ("sum",) if self.setup.ranks > 1 else ()

    def keeps(self, at: At) -> bool:
        return at.kind is not Kind.REDUCED_GRAD

    def norm(self, whole: np.ndarray, rank: int) -> float:
        return float(np.linalg.norm(whole))

    def before_update(self, step: int, rank: int) -> None:
        super().before_update(step, rank)
        grads = self.grads[rank]
        norm = self.norm(np.concatenate([grads[name].ravel() for name in NAMES]), rank)
        factor = np.float32(min(1.0, self.limit / (norm + 1e-6)))
        self.grads[rank] = {name: value * factor for name, value in grads.items()}


def test_a_clip_by_the_norm_of_a_ranks_part_is_named(judge: Judge) -> None:
    class OfItsPart(ByHand):
        def norm(self, whole: np.ndarray, rank: int) -> float:
            return float(np.linalg.norm(np.split(np.append(whole, 0), self.setup.ranks)[rank]))

    assert judge(ByHand(steps=2), ByHand(ranks=2, steps=2)).verdict == "equivalent"
    result = judge(ByHand(steps=2), OfItsPart(ranks=2, steps=2))
    assert place(result)[:3] == (0, None, "clipped_grad")
    assert codes(result)[0] == "clip.local_norm"


def test_parts_of_each_ranks_own_gradient_are_no_weights_of_tokens(judge: Judge) -> None:
    class NotAdded(ByHand):
        limit = np.inf

        def reductions(self, name: str) -> Sequence[str]:
            return ("alone",)

    class Unlimited(ByHand):
        limit = np.inf

    result = judge(Unlimited(ranks=2, steps=2), NotAdded(ranks=2, steps=2))
    assert place(result)[:3] == (0, None, "clipped_grad")
    assert codes(result)[0] == "reduction.missing"


def test_a_parameter_copied_from_another_place_is_named(judge: Judge) -> None:
    class TooFar(Sharded):
        def copies(self, step: int, rank: int) -> dict[str, np.ndarray]:
            found = super().copies(step, rank)
            if step == 2:
                after = np.concatenate([found["head.weight"].ravel(), found["head.bias"]])
                found["head.weight"] = after[1 : 1 + found["head.weight"].size].reshape(VOCABULARY, HIDDEN)
            return found

    result = judge(Sharded(steps=3), TooFar(ranks=2, steps=3))
    assert place(result) == (2, None, "param", "head.weight", "copy")
    assert codes(result)[0] == "layout.shifted"
    assert result.causes[0].number == 1.0


def test_a_ranks_part_that_was_not_copied_is_named(judge: Judge) -> None:
    class Late(Sharded):
        """What rank 1 updates, from element 296 on, is copied a step too late."""

        def copies(self, step: int, rank: int) -> dict[str, np.ndarray]:
            now = super().copies(step, rank)
            flat = np.concatenate([now[name].ravel() for name in NAMES])
            if step == 2:
                flat[296:] = self.last[296:]
            self.last = flat
            ends = np.cumsum([now[name].size for name in NAMES])[:-1]
            parts = zip(NAMES, np.split(flat, ends), strict=True)
            return {name: part.reshape(now[name].shape) for name, part in parts}

    result = judge(Sharded(steps=3), Late(ranks=2, steps=3))
    assert place(result)[:3] == (2, None, "param")
    assert codes(result)[0] == "value.not_updated"
    assert "295 of" in result.causes[0].text
