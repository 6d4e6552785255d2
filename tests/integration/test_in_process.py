"""A program may record parts of itself, one after the other, and is left as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad

from tensortrace import tracer
from tensortrace.diff import compare
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import INIT_STEP, Kind


class Training:
    """A model, its optimizer and scheduler; ``step`` trains on the next batch."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.batches = torch.Generator().manual_seed(5)

    def step(self) -> float:
        rows = torch.randn(6, 4, generator=self.batches)
        target = torch.randint(5, (6,), generator=self.batches)
        loss = F.cross_entropy(self.model(rows), target)
        loss.backward()
        clip_grad.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()


def patchable() -> list[object]:
    """Return what a recording may replace."""
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer, lr_scheduler

    owners = (
        nn.Module, Optimizer, GradScaler, torch.Tensor, F, clip_grad, torch.autograd, torch.nn.utils,
        torch.utils.checkpoint, torch.distributed, lr_scheduler.LRScheduler, lr_scheduler.StepLR, os,
    )  # fmt: skip
    return [(owner, name, id(value)) for owner in owners for name, value in sorted(vars(owner).items())]


def test_two_recordings_follow_each_other_and_leave_the_same_trace(tmp_path: Path) -> None:
    for name in "ab":
        training = Training()
        with tracer.record(tmp_path / name, min_free="0"):
            for _ in range(3):
                training.step()
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "equivalent"
    with Trace.open(tmp_path / "a") as trace:
        assert trace.problems == ()
        assert trace.manifest is not None
        assert trace.manifest.exit_code == 0
        kinds = {entry.kind for entry in trace.ranks[0].entries}
    absent = {Kind.REDUCED_GRAD, Kind.UNSCALED_GRAD, Kind.BUFFER, Kind.COLLECTIVE}
    absent |= {Kind.OPERATION, Kind.OPERATION_GRAD}  # nobody asked to zoom in
    assert kinds == set(Kind) - absent


def test_a_recording_changes_no_number_and_leaves_nothing_behind(tmp_path: Path) -> None:
    alone = Training()
    losses = [alone.step() for _ in range(4)]
    before, threads = patchable(), threading.active_count()
    training = Training()
    told = [training.step()]
    with tracer.record(tmp_path / "a", min_free="0"):
        told += [training.step() for _ in range(2)]
    told.append(training.step())
    assert told == losses
    assert all(map(torch.equal, alone.model.parameters(), training.model.parameters()))
    assert patchable() == before
    assert threading.active_count() == threads
    assert [p for p in training.model.parameters() if p._backward_hooks] == []


def test_a_recording_that_begins_late_holds_the_state_it_found(tmp_path: Path) -> None:
    training = Training()
    training.step()
    training.step()
    moment = next(iter(training.optimizer.state.values()))["exp_avg"].clone()
    with tracer.record(tmp_path / "a", min_free="0"):
        training.step()
    with Trace.open(tmp_path / "a") as trace:
        entries = trace.ranks[0].entries
        found = [e for e in entries if e.step == INIT_STEP and (e.name, e.slot) == ("0.weight", "exp_avg")]
        assert len(found) == 1
        assert (trace.ranks[0].read(found[0]) == moment.numpy()).all()
        positions = [e.stats.mean for e in entries if e.slot == "position" and e.stats is not None]
    assert positions == [2.0]


def test_what_other_trainings_hold_is_not_of_this_one(tmp_path: Path) -> None:
    other, training = Training(), Training()
    other.step()
    with tracer.record(tmp_path / "a", min_free="0"):
        training.step()
    with Trace.open(tmp_path / "a") as trace:
        names = {entry.name for entry in trace.ranks[0].entries if entry.kind is Kind.SCHEDULE}
    assert names == {"optimizer.0", "optimizer.0.group.0", "scheduler.0"}


def test_a_recording_inside_another_is_refused_and_the_outer_one_goes_on(tmp_path: Path) -> None:
    training = Training()
    with tracer.record(tmp_path / "a", min_free="0"):
        with pytest.raises(BadRequest, match="already"), tracer.record(tmp_path / "b"):
            raise AssertionError("not reached")
        training.step()
    assert not (tmp_path / "b").exists()
    with Trace.open(tmp_path / "a") as trace:
        assert trace.problems == ()


def test_an_output_that_exists_is_refused(tmp_path: Path) -> None:
    with tracer.record(tmp_path / "a", min_free="0"):
        Training().step()
    with pytest.raises(BadRequest, match="exists"), tracer.record(tmp_path / "a"):
        raise AssertionError("not reached")


def test_an_exception_passes_through_and_the_trace_says_so(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), tracer.record(tmp_path / "a", min_free="0"):
        raise ZeroDivisionError(Training().step())
    with Trace.open(tmp_path / "a") as trace:
        assert trace.ranks[0].manifest is not None
        assert trace.ranks[0].manifest.ended == "exception: ZeroDivisionError"
        assert trace.manifest is not None
        assert trace.manifest.exit_code == 1


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    text = "import sys, tensortrace.tracer; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("eager", [False, True])
def test_eager_shows_the_modules_inside_a_compiled_one(tmp_path: Path, eager: bool) -> None:
    training = Training()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    training.model = torch.compile(training.model, backend=count, fullgraph=True)
    with tracer.record(tmp_path / "a", min_free="0", eager=eager):
        training.step()
    with Trace.open(tmp_path / "a") as trace:
        names = {entry.name for entry in trace.ranks[0].entries if entry.kind is Kind.ACTIVATION}
        assert trace.ranks[0].manifest is not None
        flags = trace.ranks[0].manifest.environment.flags
    assert names == ({"(root)", "0", "1", "2"} if eager else {"(root)"})
    assert flags.get("start.eager") == ("True" if eager else None)
    assert len(graphs) == (0 if eager else 1), "one graph, unbroken"
    training.step()
    assert graphs, "afterwards it is compiled, as before"
