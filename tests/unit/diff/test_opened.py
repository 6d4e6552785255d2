"""A trace opened in Python: what is found by kind, name and step, and what is said of what is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tensortrace import tracer
from tensortrace.diff.opened import NoSuchBoundary, OpenTrace
from tensortrace.tracer.errors import BadRequest, TraceError
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.request import Request
from tensortrace.tracer.types import Kind, Mesh, Placement, Shard
from tests.simulated import Documents, Program
from tests.synthetic import write_trace

WHOLE = np.arange(12, dtype=np.float32).reshape(4, 3)
PARAM = {"kind": Kind.PARAM, "microbatch": None, "slot": "model", "name": "w"}
MESHES = {"tp": Mesh(("tp",), (2,), (0, 1))}


class Even(Program):
    """All sequences have five tokens, so that no rank pads otherwise."""

    def documents(self, step: int) -> Documents:
        return [np.arange(1, 6) + row + step for row in range(8)]


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> OpenTrace:
    """Two data-parallel ranks, two microbatches, one step."""
    path = tmp_path_factory.mktemp("even") / "a"
    return tracer.open(Even(ranks=2, accumulate=2, steps=1).write(path))


def halves(folder: Path, *, dim: int | None, op: str | None = None, dtype: str = "float32") -> OpenTrace:
    """Open a trace of two ranks that each hold a half of a parameter's rows or columns, or of its sum."""
    placed = Placement("shard", dim=dim) if op is None else Placement("partial", op=op)
    arrays = [WHOLE, WHOLE * 2] if dim is None else np.split(WHOLE, [2], axis=dim)
    ranks = [
        [(PARAM | {"shard": Shard("tp", (rank,), (placed,), (4, 3)), "dtype": dtype}, array)]
        for rank, array in enumerate(arrays)
    ]
    return tracer.open(write_trace(folder / "t", ranks, meshes=MESHES))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_parameter_in_two_parts_is_read_whole(tmp_path: Path, dim: int) -> None:
    trace = halves(tmp_path, dim=dim)
    assert np.array_equal(trace["param", "w", 0], WHOLE)
    (tensor,) = trace
    assert (tensor.shape, tensor.dtype, tensor.ranks) == ((4, 3), "float32", (0, 1))
    assert [part.read().shape for part in tensor.parts] == [(2, 3)] * 2 if dim == 0 else [(4, 2), (4, 1)]


def test_contributions_are_added_in_float64(tmp_path: Path) -> None:
    (tensor,) = halves(tmp_path, dim=None, op="sum")
    assert tensor.dtype == "float64"
    assert np.array_equal(tensor.read(), WHOLE.astype(np.float64) * 3)


def test_torch_has_the_dtype_that_was_recorded(tmp_path: Path) -> None:
    (tensor,) = halves(tmp_path, dim=0, dtype="bfloat16")
    assert torch.equal(tensor.to_torch(), torch.from_numpy(WHOLE).to(torch.bfloat16))


def test_rows_of_microbatches_and_ranks_follow_each_other(even: OpenTrace) -> None:
    found = {
        (entry.microbatch, rank.rank): rank.read(entry)
        for rank in even.trace.ranks
        for entry in rank.entries
        if (entry.kind, entry.name, entry.slot) == (Kind.ACTIVATION, "hidden", "out")
    }
    expected = np.concatenate([found[0, 0], found[0, 1], found[1, 0], found[1, 1]])
    assert np.array_equal(even.get("activation", "hidden", step=0), expected)
    second = np.concatenate([found[1, 0], found[1, 1]])
    assert np.array_equal(even["activation", "hidden", 0, 1], second)
    assert np.array_equal(even.get("activation", "hidden", step=0, microbatch=1, rank=1), found[1, 1])


def test_token_counts_are_added(even: OpenTrace) -> None:
    assert int(even.get("loss", "cross_entropy", step=0, slot="count")) == 8 * 4  # each predicts four


def test_local_gradients_of_two_ranks_are_not_one(even: OpenTrace) -> None:
    with pytest.raises(BadRequest, match=r"2 of their own.*say which: rank= \(of 0, 1\)"):
        even.get("local_grad", "hidden.bias", step=0)


def test_steps_are_a_mapping_that_reads_when_asked(even: OpenTrace) -> None:
    weights = even["param", "hidden.weight"]
    assert list(weights) == ["init", 0]
    assert np.array_equal(weights["init"], Even().initial_params(0)["hidden.weight"])
    assert 7 not in weights
    assert [str(tensor) for tensor in weights.tensors][:1] == ["step init: param hidden.weight model"]


def test_filters_keep_what_fits(even: OpenTrace) -> None:
    found = even.boundaries(kind="param", name="h*.bias", step="init,0")
    assert [(t.step, t.name) for t in found] == [
        ("init", "hidden.bias"), ("init", "head.bias"), (0, "hidden.bias"), (0, "head.bias"),
    ]  # fmt: skip
    one = list(even.boundaries(kind="activation", name="head", slot="out", microbatch=1, rank=1))
    assert [tensor.ranks for tensor in one] == [(1,)]


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Program(steps=1).write(tmp_path / "a")

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(RankTrace, "read_bytes", refuse)
    trace = tracer.open(path)
    assert "param" in trace.kinds
    assert ("param", "head.bias") in trace
    assert len(list(trace)) > 50
    assert all(tensor.norm is not None for tensor in trace.boundaries(kind="param"))
    assert "1 rank, step 0 and init" in repr(trace)
    assert "head.bias" in trace._repr_html_()


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda t: t["parm", "w"], "no kind 'parm'; did you mean param"),
        (lambda t: t["param", "hiden.bias"], "no param 'hiden.bias'; did you mean hidden.bias"),
        (lambda t: t["param", "head.bias", 5], "step 5; steps: init, 0"),
        (lambda t: t.get("param", "head.bias", step=0, slot="modl"), "no slot 'modl'.*did you mean model"),
        (lambda t: t.get("param", "head.bias", step=0, microbatch=3), "has this microbatch"),
        (lambda t: t.names("nothing"), "no kind 'nothing'"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_a_key_error_that_names_the_nearest(
    even: OpenTrace, ask: Callable[[OpenTrace], object], said: str
) -> None:
    with pytest.raises(NoSuchBoundary, match=said) as caught:
        ask(even)
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, TraceError)


def test_several_slots_are_asked_for_by_name(even: OpenTrace) -> None:
    with pytest.raises(BadRequest, match="slots step, exp_avg, exp_avg_sq; say which: slot="):
        even.get("optimizer_state", "head.bias", step=0)
    assert even.get("optimizer_state", "head.bias", step=0, slot="exp_avg").shape == (23,)


def test_names_are_no_markup_in_a_notebook(tmp_path: Path) -> None:
    trace = tracer.open(write_trace(tmp_path / "t", [[(PARAM | {"name": "<script>"}, WHOLE)]]))
    assert "&lt;script&gt;" in trace._repr_html_()
    assert "<script" not in trace._repr_html_()


def test_copies_that_differ_are_told_and_each_rank_keeps_its_own(tmp_path: Path) -> None:
    ranks = [[(PARAM, WHOLE)], [(PARAM, WHOLE + 1)]]
    trace = tracer.open(write_trace(tmp_path / "t", ranks))
    (tensor,) = trace
    assert not tensor.copies_agree
    assert np.array_equal(trace["param", "w", 0], WHOLE)
    assert np.array_equal(trace.get("param", "w", step=0, rank=1), WHOLE + 1)
    (own,) = trace.boundaries(rank=1)
    assert np.array_equal(own.read(), WHOLE + 1)


def test_several_ranks_are_any_of_them(tmp_path: Path) -> None:
    names = ("x", "y", "z")
    trace = tracer.open(write_trace(tmp_path / "t", [[(PARAM | {"name": n}, WHOLE)] for n in names]))
    assert [t.name for t in trace.wanted(Request(ranks=(0, 2)))] == ["x", "z"]
