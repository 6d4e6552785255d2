"""What a program names itself is recorded with its gradient, and nothing else happens."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tensortrace.tracer import Mesh, Placement, Shard, boundary, explicit
from tests.memory_sink import MemorySink, recording


class Squares(nn.Module):
    def __init__(self, *, again: bool = False, layout: str | Shard | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.again = again
        self.layout = layout
        self.mesh = Mesh(axes=("tp",), shape=(1,), ranks=(0,)) if isinstance(layout, Shard) else None

    def _squares(self, rows: torch.Tensor) -> torch.Tensor:
        return boundary("scaled", rows * self.weight, layout=self.layout, mesh=self.mesh) ** 2

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._squares, rows, use_reentrant=False) if self.again else self._squares(rows)


def trained(inner: nn.Module) -> MemorySink:
    model = nn.Sequential(inner)
    with recording() as sink:
        boundary("total", model(torch.ones(1, 2)).sum()).backward()
    return sink


def test_a_named_tensor_has_the_name_of_its_module_and_its_gradient() -> None:
    sink = trained(Squares())
    assert sink.one("activation", "0.scaled", "out").tolist() == [[1.0, 2.0]]
    assert sink.one("activation_grad", "0.scaled", "out").tolist() == [[2.0, 4.0]]
    assert sink.one("activation", "total").item() == 5.0


def test_what_comes_after_was_computed_from_it() -> None:
    sink = trained(Squares())
    [named], [result] = sink.find("activation", "0.scaled"), sink.find("activation", "0", "out")
    assert result.boundary.producers == (named.boundary.event,)


def test_a_recomputed_one_is_flagged_and_has_one_gradient() -> None:
    sink = trained(Squares(again=True))
    passes = [kept.boundary.recompute for kept in sink.find("activation", "0.scaled")]
    assert passes == [False, True]
    assert sink.one("activation_grad", "0.scaled").tolist() == [[2.0, 4.0]]


def test_its_layout_is_the_one_given() -> None:
    shard = Shard(mesh="mine", coordinate=(0,), placements=(Placement(kind="shard", dim=1),))
    sink = trained(Squares(layout=shard))
    assert sink.meshes == {"mine": Mesh(axes=("tp",), shape=(1,), ranks=(0,))}
    for kind in ("activation", "activation_grad"):
        assert [kept.boundary.shard for kept in sink.find(kind, "0.scaled")] == [shard]
    sink = trained(Squares(layout="b (heads d)[tp]"))
    assert sink.find("activation", "0.scaled")[0].boundary.meta.text == "layout: b (heads d)[tp]"


def test_without_a_recording_the_tensor_itself_comes_back() -> None:
    rows = torch.ones(2, requires_grad=True)
    assert boundary("rows", rows) is rows
    assert rows._backward_hooks is None
    with recording():
        assert boundary("rows", rows) is rows
    assert explicit.receivers == []


def test_anything_but_a_tensor_ends_the_recording_and_says_which() -> None:
    with recording(may_fail=True) as sink:
        assert boundary("pair", [1]) == [1]
    assert [str(error) for _, error in sink.failures] == ["boundary 'pair' was given a list, not a tensor"]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_graph_with_a_named_tensor_stays_whole() -> None:
    compiled = torch.compile(lambda rows: boundary("inside", rows * 2) + 1, fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 3.0
    torch._dynamo.reset()
    with recording() as sink:
        assert compiled(torch.ones(1)).item() == 3.0
    assert sink.find("activation", "inside") == []
