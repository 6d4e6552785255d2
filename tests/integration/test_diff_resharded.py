"""Runs that hold their tensors in parts compare with runs that hold them whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortrace.diff.result import Result
from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, assert_equivalent, first, judge_in, place
from tests.resharded import COPY, PLAIN, Held, Resharded
from tests.simulated import At, Program

WINDOW = (Kind.PARAM, Kind.OPTIMIZER_STATE, Kind.CLIPPED_GRAD, Kind.REDUCED_GRAD)
OF_PARAMETERS = (*WINDOW, Kind.LOCAL_GRAD)


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


def tensor_parallel(at: At, *, declared: bool = True) -> Held:
    """Megatron's MLP: the hidden layer split by columns, the head by rows, its output to be summed."""
    if at.kind in OF_PARAMETERS and at.slot != "step":
        if at.name in ("hidden.weight", "hidden.bias"):
            return Held("shard", 0)
        return Held("shard", 1) if at.name == "head.weight" else PLAIN
    between = ("hidden", "out"), ("act", "in.0"), ("act", "out"), ("head", "in.0")
    if at.kind in (Kind.ACTIVATION, Kind.ACTIVATION_GRAD) and (at.name, at.slot) in between:
        return Held("shard", 2, declared or at.name == "hidden")
    if (at.kind, at.name, at.slot) == (Kind.ACTIVATION, "head", "out"):
        return Held("partial", declared=declared)
    if (at.kind, at.name, at.slot) == (Kind.ACTIVATION_GRAD, "hidden", "in.0"):
        return Held("partial", declared=declared)
    return PLAIN


def half_declared(at: At) -> Held:
    return tensor_parallel(at, declared=False)


def fully_sharded(at: At) -> Held:
    return Held("data_shard", 0) if at.kind in WINDOW and at.slot not in SCALARS else COPY


SCALARS = ("step", "total_norm", "max_norm", "norm_type", "coefficient")


def pipeline(at: At) -> Held:
    """Two stages; labels and loss on the last, ids on the first."""
    if at.kind in (Kind.SCHEDULE, Kind.RNG) or at.name == "(clip)":
        return PLAIN
    first_stage = at.name.startswith(("embed", "hidden")) or (at.name == "(root)" and at.slot == "in.0")
    return Held("stage", 0 if first_stage else 1, declared=False)


LAYOUTS: dict[str, tuple[int, int, Callable[[At], Held], str]] = {
    "tensor parallel": (1, 2, tensor_parallel, "tp"),
    "tensor parallel, uneven": (1, 5, tensor_parallel, "tp"),
    "tensor parallel, plain tensors inside": (1, 2, half_declared, "tp"),
    "data and tensor parallel": (2, 2, tensor_parallel, "tp"),
    "data and tensor parallel, plain tensors inside": (2, 3, half_declared, "tp"),
    "fully sharded": (2, 1, fully_sharded, "tp"),
    "fully sharded, uneven": (3, 1, fully_sharded, "tp"),
    "sharded over data, copied over the other axis": (2, 2, fully_sharded, "tp"),
    "pipeline": (1, 2, pipeline, "pp"),
    "pipelines of data-parallel replicas": (2, 2, pipeline, "pp"),
}


def spread(name: str, **options: Any) -> Resharded:
    outer, inner, split, axis = LAYOUTS[name]
    return Resharded(Program(ranks=outer, order=3), inner, split, axis, **options)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_in_parts_is_equivalent_to_the_run_on_one_rank(judge: Judge, name: str) -> None:
    result = compare(judge, Program(), spread(name))
    assert_equivalent(result)
    assert set(result.coverage.by_kind) >= {
        "input", "activation", "activation_grad", "loss", "local_grad", "clipped_grad", "param",
        "optimizer_state", "schedule",
    }  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_on_one_rank_is_equivalent_to_the_run_in_parts(judge: Judge, name: str) -> None:
    assert_equivalent(compare(judge, spread(name), Program()))


@pytest.mark.parametrize("name", ["tensor parallel, plain tensors inside", "fully sharded", "pipeline"])
def test_two_runs_in_the_same_parts_are_equivalent(judge: Judge, name: str) -> None:
    assert_equivalent(compare(judge, spread(name), spread(name)))


LAYOUT_FILE = """
format = 1
data = ["dp"]

[axes]
dp = 2
tp = 2

[[rule]]
name = ["hidden.weight", "hidden.bias"]
dims = "h[tp] ..."

[[rule]]
name = "head.weight"
dims = "v h[tp]"

[[rule]]
name = "head"
kind = ["activation", "activation_grad"]
slot = "in.*"
dims = "b s h[tp]"

[[rule]]
name = ["hidden", "head"]
kind = ["activation"]
slot = "in.*"
dims = "b s w same:tp"

[[rule]]
name = "head"
kind = ["activation"]
dims = "b s v partial:tp"
"""


def undeclared(at: At) -> Held:
    return tensor_parallel(at)._replace(declared=False)


def test_plain_parts_compare_under_a_layout_file(judge: Judge) -> None:
    path = judge.folder / "layout.toml"
    path.write_text(LAYOUT_FILE)
    b = Resharded(Program(ranks=2, order=3), 2, undeclared).write(judge.folder / "b")
    a = judge.write(Program())
    assert_equivalent(judge(a, b, layout_b=path))
    without = judge(a, b)
    assert without.verdict == "incomplete"
    assert "no layout is known" in without.headline


def test_a_wrong_element_in_one_rank_s_part_is_found_there(judge: Judge) -> None:
    def edit(at: At, inner: int, value: np.ndarray) -> np.ndarray:
        if at.rank == 1 and (at.step, at.kind, at.name, at.slot, inner) == (
            1,
            Kind.ACTIVATION,
            "hidden",
            "out",
            1,
        ):
            value = value.copy()
            value[0, 0, 0] += 0.01
        return value

    result = compare(judge, Program(), spread("data and tensor parallel", edit=edit))
    assert place(result) == (1, 0, "activation", "hidden", "out")
    assert first(result).ranks == (3,), "the second tensor parallel rank of the second data rank"


def test_a_replica_that_differs_within_the_cell_is_named(judge: Judge) -> None:
    def edit(at: At, inner: int, value: np.ndarray) -> np.ndarray:
        if (at.step, at.kind, at.name, at.slot, inner) == (1, Kind.ACTIVATION, "embed", "out", 1):
            return value * np.float32(1.5)
        return value

    result = compare(judge, Program(), spread("tensor parallel", edit=edit))
    assert place(result) == (1, 0, "activation", "embed", "out")
    assert first(result).ranks == (1,)


def test_parts_that_change_places_are_a_divergence_and_no_layout(judge: Judge) -> None:
    def edit(at: At, inner: int, value: np.ndarray) -> np.ndarray:
        if at.kind is Kind.ACTIVATION and (at.name, at.slot) == ("act", "out"):
            return np.roll(value, value.shape[-1] // 2, axis=-1)
        return value

    name = "tensor parallel, plain tensors inside"
    assert place(compare(judge, Program(), spread(name, edit=edit)))[2:] == ("activation", "act", "out")


def test_a_part_that_is_not_there_is_no_agreement(judge: Judge) -> None:
    def edit(at: At, inner: int, value: np.ndarray) -> np.ndarray | None:
        lost = (at.step, at.kind, at.name, inner) == (2, Kind.PARAM, "hidden.bias", 1)
        return None if lost else value

    result = compare(judge, Program(), spread("tensor parallel", edit=edit))
    assert result.verdict == "incomplete"
    assert [
        "no rank holds [6:12] (rank 0 hold other parts)" in m.reason for m in result.coverage.missing
    ] == [True]


def test_two_runs_of_one_unknown_layout_are_compared_rank_by_rank(judge: Judge) -> None:
    a, b = (Resharded(Program(order=n), 2, undeclared) for n in (1, 2))
    assert_equivalent(compare(judge, a, b))


def test_a_wrong_part_on_the_last_rank_of_an_unknown_layout_is_found(judge: Judge) -> None:
    def edit(at: At, inner: int, value: np.ndarray) -> np.ndarray:
        wrong = (at.step, at.kind, at.name, inner) == (1, Kind.PARAM, "hidden.bias", 1)
        return value * np.float32(1.01) if wrong else value

    a, b = Resharded(Program(), 2, undeclared), Resharded(Program(), 2, undeclared, edit=edit)
    assert place(compare(judge, a, b)) == (1, None, "param", "hidden.bias", "model")


def test_a_copy_on_one_rank_of_several_is_enough(judge: Judge) -> None:
    def owned_by_one(at: At) -> Held:
        return Held("stage", 0, declared=False) if at.kind is Kind.OPTIMIZER_STATE else COPY

    assert_equivalent(compare(judge, Program(), Resharded(Program(), 2, owned_by_one)))


def compare(judge: Judge, a: Program | Resharded, b: Program | Resharded) -> Result:
    paths = [x.write(judge.folder / f"trace{next(judge.numbers)}") for x in (a, b)]
    return judge(*paths)
