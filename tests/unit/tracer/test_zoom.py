"""What ``--zoom`` records of a module call: every operation, as it was when it was computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tensortrace.tracer.in_process import record
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Entry, Kind

Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Wrapped(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def looked_into(folder: Path, forward: Forward) -> tuple[RankTrace, dict[str, Entry], dict[str, Entry]]:
    """Train one step of a module; return its rank, its operations and their gradients by slot."""
    model = nn.Sequential(Wrapped(forward))
    with record(folder / "t", zoom=["0"], strict=True):
        model(torch.tensor([[1.0, 4.0]])).sum().backward()
    [rank] = Trace.open(folder / "t").ranks
    kinds = (Kind.OPERATION, Kind.OPERATION_GRAD)
    made, gradients = ({e.slot: e for e in rank.entries if e.kind is kind} for kind in kinds)
    return rank, made, gradients


def test_values_arguments_and_gradients_of_each_operation_are_recorded(tmp_path: Path) -> None:
    rank, made, gradients = looked_into(tmp_path, lambda m, x: (x * m.weight * 0.5).pow(2))
    assert list(made) == [
        "00000.mul.in.0", "00000.mul.in.1", "00000.mul.out", "00001.mul.out", "00002.pow.out",
        "00003.return.none",
    ]  # fmt: skip
    half = made["00001.mul.out"]
    assert half.meta.op == "aten.mul.Tensor"
    assert half.meta.arguments == ("self=#0 float32[1,2] grad", "other=0.5")
    assert half.meta.source is not None
    assert half.meta.source.startswith("test_zoom.py:")
    assert half.meta.text is not None
    assert re.fullmatch(r"<lambda> < test_zoom\.py:\d+ in forward", half.meta.text)
    assert half.producers == (made["00000.mul.out"].event,)
    np.testing.assert_array_equal(rank.read(half), [[1.0, 6.0]])
    # the gradient of sum(y²) with respect to y is 2y, and half of it to what was halved
    np.testing.assert_array_equal(rank.read(gradients["00001.mul.out"]), [[2.0, 12.0]])
    np.testing.assert_array_equal(rank.read(gradients["00000.mul.out"]), [[1.0, 6.0]])
    np.testing.assert_array_equal(rank.read(gradients["00002.pow.out"]), [[1.0, 1.0]])
    assert made["00003.return.none"].meta.arguments == ("out=#2 float32[1,2] grad",)


def in_place(module: Wrapped, x: torch.Tensor) -> torch.Tensor:
    y = x * module.weight
    y.add_(1.0)
    y[:, 0].mul_(10.0)
    return y.detach().exp() + y


def test_what_is_overwritten_was_copied_before(tmp_path: Path) -> None:
    rank, made, _ = looked_into(tmp_path, in_place)  # type: ignore[arg-type]
    np.testing.assert_array_equal(rank.read(made["00000.mul.out"]), [[2.0, 12.0]])
    np.testing.assert_array_equal(rank.read(made["00001.add_.out"]), [[3.0, 13.0]])
    written = next(e for slot, e in made.items() if slot.endswith("mul_.out"))
    np.testing.assert_array_equal(rank.read(written), [30.0])
    detached = next(e for slot, e in made.items() if slot.endswith("detach.out"))
    np.testing.assert_array_equal(rank.read(detached), [[30.0, 13.0]])


def drawing(module: Wrapped, x: torch.Tensor) -> torch.Tensor:
    noise = torch.empty_like(x).uniform_()
    return x * module.weight + noise * torch.arange(2, dtype=torch.bfloat16)


def test_memory_as_it_is_found_is_no_value_and_dtypes_are_arguments(tmp_path: Path) -> None:
    _, made, _ = looked_into(tmp_path, drawing)  # type: ignore[arg-type]
    assert made["00000.empty_like.none"].local_shape == (0,)
    assert "00001.uniform_.out" in made
    arange = next(e for slot, e in made.items() if ".arange." in slot)
    assert "dtype=bfloat16" in arange.meta.arguments


def test_a_module_that_no_call_matches_is_declared(tmp_path: Path) -> None:
    with record(tmp_path / "t", zoom=["nowhere.*"], strict=True):
        nn.Sequential(nn.Linear(2, 1))(torch.ones(1, 2)).sum().backward()
    [rank] = Trace.open(tmp_path / "t").ranks
    assert rank.manifest is not None
    assert "nowhere.*" in rank.manifest.absent["operation"]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_program_that_compiles_functions_is_not_looked_into(tmp_path: Path) -> None:
    """A dispatch mode would make what is compiled run otherwise."""
    called: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        called.append(len(inputs))
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=backend)
    rank, made, _ = looked_into(tmp_path, lambda m, x: double(x * m.weight))
    assert called
    assert made == {}
    assert rank.manifest is not None
    assert "torch.compile" in rank.manifest.absent["operation"]
