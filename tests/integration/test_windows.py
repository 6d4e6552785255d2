"""Traces that kept their last steps only are compared in what they have in common, as with ``--steps``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensortrace import tracer
from tensortrace.cli.main import run
from tensortrace.diff import compare
from tensortrace.diff.windows import windowed
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind, Promise, Window
from tests.synthetic import write_trace


def train(root: Path, *, rate_at: int = -1, nan_at: int = -1, **options: object) -> list[float]:
    """Record eight steps; from ``rate_at`` on the learning rate is twice as high."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with tracer.record(root, min_free="0", **options):  # type: ignore[arg-type]
        for step in range(8):
            if step == rate_at:
                optimizer.param_groups[0]["lr"] = 2e-2
            rows = torch.randn(6, 4)
            rows[0, 0] = float("nan") if step == nan_at else rows[0, 0]
            loss = F.cross_entropy(model(rows), torch.randint(5, (6,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_a_window_is_compared_with_a_whole_recording_and_a_selected_one(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    train(tmp_path / "last", keep_last=3)
    train(tmp_path / "steps", steps="5-7")
    found = [
        compare(tmp_path / a, tmp_path / b)
        for a, b in (("whole", "last"), ("last", "whole"), ("last", "steps"), ("whole", "steps"))
    ]
    assert [result.verdict for result in found] == ["equivalent"] * 4
    assert len({result.coverage.compared for result in found}) == 1
    assert all(result.coverage.bitwise_equal == result.coverage.compared for result in found)
    said = "last keeps the last 3 steps: those before step 5 were not kept, and are not compared"
    assert [said in result.notes for result in found] == [True, True, True, False]


@pytest.mark.parametrize(("rate_at", "kind", "slot"), [(3, Kind.PARAM, "start"), (6, Kind.SCHEDULE, "lr")])
def test_what_went_wrong_before_the_window_is_told_from_what_did_inside(
    tmp_path: Path, rate_at: int, kind: Kind, slot: str
) -> None:
    train(tmp_path / "a", keep_last=3)
    train(tmp_path / "b", keep_last=3, rate_at=rate_at)
    first = compare(tmp_path / "a", tmp_path / "b").first_divergent
    assert first is not None
    assert (first.where.kind, first.where.slot, first.where.step) == (kind, slot, max(rate_at, 5))


def test_show_says_what_triggered_and_the_diff_what_was_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "a"
    options = {"keep_last": 2, "trigger": "nonfinite", "after": 1}
    assert np.array_equal(train(root, nan_at=4, **options), train(tmp_path / "b", nan_at=4), equal_nan=True)
    assert run(["show", str(root)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "3 steps (3-5)" in said
    assert "kept: the last 2 and 1 after a trigger: steps 0-2 not kept (rank 0)" in said
    assert "nonfinite in step 4, microbatch 0: activation (root) in.0: 1 NaN of 24 elements" in said
    result = compare(root, tmp_path / "b")
    assert result.verdict == "equivalent", "steps that were not kept are no loss"
    assert any("rank 0 ended its recording on nonfinite in step 4" in note for note in result.notes)


def two_ranks(root: Path, windows: Sequence[tuple[int, ...]]) -> Path:
    """Write a trace whose ranks have steps of a parameter each, of which the first is not kept."""
    value = np.ones(3, "f4")
    ranks = [
        [({"step": step, "kind": Kind.PARAM, "name": "w", "slot": "model", "microbatch": None}, value + step)
         for step in steps]
        for steps in windows
    ]  # fmt: skip
    first = max(steps[1] for steps in windows)
    return write_trace(root, ranks, promise=Promise(keep_last=2), window=Window(first))


SOME, NONE = [(3, 4, 5), (3, 4, 5, 6)], [(1, 2, 3), (8, 9, 10)]


def test_ranks_are_compared_in_their_common_steps(tmp_path: Path) -> None:
    trace, notes = windowed(Trace.open(two_ranks(tmp_path, SOME)))
    assert [[(e.step, e.slot) for e in rank.entries] for rank in trace.ranks] == [
        [(4, "start"), (4, "model"), (5, "model")]
    ] * 2
    assert trace.ranks[0].read(trace.ranks[0].entries[0]).tolist() == [4, 4, 4]
    assert notes[1].endswith("kept steps 4-5 on rank 0; steps 4-6 on rank 1; compared are steps 4-5")


def test_ranks_without_a_common_step_are_refused(tmp_path: Path) -> None:
    trace = Trace.open(two_ranks(tmp_path, NONE))
    with pytest.raises(BadRequest, match="no step in common"):
        windowed(trace)


def test_show_says_which_steps_all_ranks_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some, none = (two_ranks(tmp_path / name, steps) for name, steps in (("a", SOME), ("b", NONE)))
    assert run(["show", str(some)]) == run(["show", str(none)]) == 0
    said = capsys.readouterr().out
    assert "common: steps 4-5" in said
    assert "common: no step" in said


def test_a_window_elsewhere_tells_which_steps_to_record(tmp_path: Path) -> None:
    train(tmp_path / "a", keep_last=2, trigger="nonfinite", nan_at=3)
    train(tmp_path / "b", keep_last=2)
    with pytest.raises(BadRequest, match="record b with --steps 2-3, or say which steps meet"):
        compare(tmp_path / "a", tmp_path / "b")
