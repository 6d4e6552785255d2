"""Which operation of one run is which of the other, and how tensors inside a module meet over ranks."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tensortrace.diff.operations.calls import Operation
from tensortrace.diff.operations.meeting import meetings
from tensortrace.diff.operations.sequences import align
from tensortrace.diff.operations.verdicts import eps_of, judge
from tensortrace.diff.tolerance import Error
from tensortrace.tracer.types import Entry, Kind

EPS = 2.0**-23


def operation(number: int, name: str, *, line: int = 1, function: str = "forward") -> Operation:
    entry = Entry(
        event=number, step=0, microbatch=0, kind=Kind.OPERATION, name="m", slot=f"{number:05d}.{name}.out",
        dtype="float32", local_shape=(2, 2), digest="0" * 32,
    )  # fmt: skip
    made = Operation(number, name, f"aten.{name}.default", f"m.py:{line}", function, "m")
    made.outputs[f"#{number}"] = entry
    return made


def sequence(*names: str) -> list[Operation]:
    return [operation(number, name, line=number) for number, name in enumerate(names)]


def test_an_inserted_operation_shifts_nothing() -> None:
    a = sequence("mm", "mul", "softmax", "mm")
    b = sequence("mm", "clone", "mul", "mul", "softmax", "mm")
    pairs = align(a, b)
    assert [(x, a[x].name, b[y].name) for x, y in pairs] == [
        (0, "mm", "mm"), (1, "mul", "mul"), (2, "softmax", "softmax"), (3, "mm", "mm"),
    ]  # fmt: skip
    assert pairs[-2:] == [(2, 4), (3, 5)]


def test_an_operation_in_place_is_the_same_as_one_that_is_not() -> None:
    assert align(sequence("mm", "mul_", "exp"), sequence("mm", "mul", "exp")) == [(0, 0), (1, 1), (2, 2)]


def test_another_operation_in_the_same_place_is_paired_with_it() -> None:
    assert align(sequence("mm", "add", "exp"), sequence("mm", "sub", "exp")) == [(0, 0), (1, 1), (2, 2)]


def test_lines_that_moved_and_repeated_names_are_no_obstacle() -> None:
    a = [operation(i, n, line=10 + i, function=f) for i, (n, f) in enumerate([("mul", "q"), ("mul", "k")])]
    b = [operation(0, "mul", line=99, function="k")]
    assert align(a, b) == [(1, 0)]


def test_whole_tensors_meet_parts_that_are_cut() -> None:
    whole = np.arange(48.0).reshape(2, 4, 6)
    left, right = whole[:, :2], whole[:, 2:]
    [met] = [m for m in meetings([whole], [left, right]) if np.array_equal(m.a, m.b)]
    assert met.how == "cut along dimension 1"


def test_heads_behind_samples_meet_within_each_sample() -> None:
    whole = np.arange(48.0).reshape(2, 4, 6)  # samples, heads, rest
    parts = [part.reshape(4, 6) for part in (whole[:, :2], whole[:, 2:])]
    found = [m.how for m in meetings([whole.reshape(8, 6)], parts) if np.array_equal(m.a, m.b)]
    assert found == ["cut along dimension 0, in each of 2 blocks"]


def test_contributions_and_copies_are_told_apart_by_their_values() -> None:
    x = np.arange(6.0)
    assert judge([x], [x, x], eps=EPS, inputs=[]).how == ""
    assert judge([x], [x * 0.25, x * 0.75], eps=EPS, inputs=[]).how == "the sum over ranks"
    assert judge([x], [x * 0.25, x * 0.75], eps=EPS, inputs=[], sums=False).status == "diverges"


def test_equal_layouts_meet_rank_by_rank_and_in_no_other_way() -> None:
    x, y = np.arange(6.0), np.arange(6.0) + 1
    assert [m.how for m in meetings([x, y], [x, y])] == ["rank by rank"]
    found = judge([x, y], [y, x], eps=EPS, inputs=[])
    assert (found.status, found.certain) == ("diverges", True)


def test_shapes_that_fit_in_no_way_are_not_judged() -> None:
    found = judge([np.zeros((4, 6))], [np.zeros((3, 3))] * 2, eps=EPS, inputs=[Error()])
    assert found.status == "unknown"
    assert "[4, 6] in a, [3, 3] in b" in found.why


@pytest.mark.parametrize(("coarser", "eps"), [(False, 2.0**-23), (True, 2.0**-7)])
def test_the_finer_dtype_counts_where_the_modules_compute_alike(coarser: bool, eps: float) -> None:
    assert eps_of(("float32",), ("bfloat16",), coarser=coarser) == eps
    assert eps_of(("int64",), ("int64",), coarser=coarser) == 0.0
    assert eps_of(("int64",), ("bfloat16",), coarser=coarser) == 2.0**-7


def test_a_difference_beside_what_a_mask_filled_in_is_seen() -> None:
    a = np.array([[0.5, -1e9, -np.inf], [0.25, 0.75, -1e9]], dtype=np.float32)
    b = a.copy()
    b[1, 1] = 0.5
    assert judge([a], [b], eps=EPS, inputs=[]).status == "diverges"
    assert judge([a], [a * np.float32(1 + EPS)], eps=EPS, inputs=[]).status == "agrees"


def test_uneven_parts_meet_in_each_block() -> None:
    whole = np.arange(60.0).reshape(3, 5, 4)  # samples, positions, rest
    parts = [part.reshape(-1, 4) for part in (whole[:, :3], whole[:, 3:])]
    found = [m.how for m in meetings([whole.reshape(15, 4)], parts) if np.array_equal(m.a, m.b)]
    assert found == ["cut along dimension 0, in each of 3 blocks"]


def test_of_two_alike_the_one_with_equal_bytes_is_the_same() -> None:
    a, b = sequence("mm", "pow", "pow", "exp"), sequence("mm", "pow", "exp")
    for op, digest in ((a[1], "1"), (a[2], "2"), (b[1], "2")):
        [(ref, entry)] = op.outputs.items()
        op.outputs[ref] = msgspec.structs.replace(entry, digest=digest * 32)
    a[1].source = b[1].source = "m.py:1"
    assert align(a, b) == [(0, 0), (2, 1), (3, 2)]


def test_an_argument_says_whether_gradients_flow_to_it() -> None:
    made = operation(0, "mul")
    made.arguments = ("self=#3 float32[2,2] grad", "other=00001.mul.in.1 float32[2]", "alpha=2")
    assert [(g.reference, g.flows, g.argument) for g in made.given] == [
        ("#3", True, "self"), ("00001.mul.in.1", False, "other"),
    ]  # fmt: skip
    assert made.settings == {"alpha": "2"}
