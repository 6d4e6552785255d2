"""Tests of ``--init-from``: a run begins with another's parameters, buffers and optimizer state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tensortrace import tracer
from tensortrace.tracer.geometry import Region
from tensortrace.tracer.settings import Start
from tensortrace.tracer.start.places import indices
from tests.memory_sink import MemorySink
from tests.unit.tracer.starting import started

IDS = torch.arange(6).reshape(2, 3)


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)).square().sum()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(IDS).backward()
    optimizer.step()
    optimizer.zero_grad()


def recorded(
    folder: Path, *, steps_before: int = 2, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> Path:
    """Record two steps of a training that had taken others before."""
    torch.manual_seed(1)
    with tracer.record(folder):
        model = Net()
        chosen = optimizer(model.parameters(), lr=0.01)
        for _ in range(steps_before):
            chosen.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            chosen.step()
        chosen.zero_grad()
        for _ in range(2):
            step(model, chosen)
    return folder


def begun(
    path: Path, *, model: nn.Module | None = None, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
) -> MemorySink:
    torch.manual_seed(2)
    model = model or Net()
    with started(Start(init_from=str(path))) as sink:
        chosen = optimizer(model.parameters(), lr=0.01)
        for _ in range(2):
            step(model, chosen)
    return sink


def values(path: Path, step: int) -> dict[tuple[str, str, str], np.ndarray]:
    from tensortrace.tracer.reader import Trace

    [rank] = Trace.open(path).ranks
    kinds = ("param", "buffer", "optimizer_state")
    return {
        (e.kind.value, e.name, e.slot): rank.read(e)
        for e in rank.entries
        if e.step == step and e.kind in kinds
    }


@pytest.mark.parametrize("steps_before", [0, 2])
def test_everything_begins_and_goes_on_as_there(tmp_path: Path, steps_before: int) -> None:
    path = recorded(tmp_path / "a", steps_before=steps_before)
    sink = begun(path)
    assert len(values(path, -1)) == 5 + 3 + (5 * 3 if steps_before else 0)
    for at in (-1, 0, 1):
        wanted = values(path, at)
        assert {
            (k.boundary.kind.value, k.boundary.name, k.boundary.slot)
            for kind in ("param", "buffer", "optimizer_state") for k in sink.find(kind, step=at)
        } == set(wanted)  # fmt: skip
        for (kind, name, slot), value in wanted.items():
            assert np.array_equal(sink.one(kind, name, slot, step=at).numpy(), value), (kind, name, slot)


def refused(capfd: pytest.CaptureFixture[str], path: Path, **options: object) -> str:
    with pytest.raises(SystemExit) as left:
        begun(path, **options)  # type: ignore[arg-type]
    assert left.value.code == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_parameter_that_is_not_there_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    model.more = nn.Linear(2, 2)
    path = recorded(tmp_path / "a")
    assert "more.weight: no such param there" in refused(capfd, path, model=model)


def test_a_parameter_that_is_only_there_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    model.norm = nn.Identity()
    path = recorded(tmp_path / "a")
    assert "norm.bias: there, but not in this program (5 such tensors)" in refused(capfd, path, model=model)


def test_another_shape_is_named_with_both(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = refused(capfd, recorded(tmp_path / "a"), model=Net(width=7))
    assert "fc.weight, found shape (6, 8), expected shape (7, 8)" in said


def test_state_of_another_optimizer_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = refused(capfd, recorded(tmp_path / "a"), optimizer=torch.optim.Adagrad)
    assert "found state of AdamW, expected state of Adagrad" in said


def test_a_folder_that_is_no_trace_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "not a trace" in refused(capfd, tmp_path)


@pytest.mark.parametrize(
    ("region", "wanted"),
    [
        (Region((3, 4), (((0, 3),), ((0, 4),))), list(range(12))),
        (Region((3, 4), (((1, 3),), ((2, 4),))), [6, 7, 10, 11]),
        (Region((4, 2, 2), (((0, 1), (3, 4)), ((0, 2),), ((1, 2),))), [1, 3, 13, 15]),
        (Region((3, 4), (((5, 9),),), flat=True), [5, 6, 7, 8]),
        (Region((), ()), [0]),
        (Region((3, 4), ((), ((0, 4),))), []),
    ],
)
def test_local_elements_know_their_place_in_the_whole(region: Region, wanted: list[int]) -> None:
    assert [i for piece in indices(region) for i in piece.tolist()] == wanted
