"""Other values are put where they belong, exactly, and nowhere else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tensortrace.tracer.errors import DamagedTrace
from tensortrace.tracer.force.ledger import Given, Ledger, read
from tensortrace.tracer.force.put import instead, replaced, same, storage_of, write
from tensortrace.tracer.types import Kind

NONE: frozenset[int] = frozenset()


class Pair(NamedTuple):
    """A container of the program's own."""

    first: torch.Tensor
    rest: dict[str, list[torch.Tensor]]


def test_a_value_is_written_bit_by_bit_without_counting_a_version() -> None:
    tensor = torch.ones(4, requires_grad=True) * 1
    value = torch.tensor([-0.0, math.inf, math.nan, 1e-45])
    version = tensor._version
    assert write(tensor, value, NONE)
    assert same(tensor, value)
    assert tensor._version == version


def test_what_autograd_saved_is_the_value_that_was_written() -> None:
    x = torch.zeros(3, requires_grad=True)
    y = x.exp()  # whose backward reads its result
    assert write(y, torch.tensor([2.0, 3.0, 4.0]), NONE)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0, 4.0]


def test_parameters_kept_memory_and_overlapping_tensors_are_not_written_to() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    table = torch.ones(6)
    assert not write(parameter, torch.zeros(4), NONE)
    assert not write(table[1:5], torch.zeros(4), frozenset({storage_of(table)}))
    assert not write(torch.ones(1).expand(4), torch.zeros(4), NONE)
    assert parameter.tolist() == [1.0] * 4
    assert table.tolist() == [1.0] * 6


def test_a_stand_in_holds_the_value_and_hands_gradients_on_and_zeros_to_anchors() -> None:
    x, anchor = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    stand_in = instead(x * 5, torch.tensor([-0.0, 7.0]), anchor * 2)
    assert math.copysign(1, stand_in[0].item()) == -1
    (stand_in * torch.tensor([10.0, 20.0])).sum().backward()
    assert x.grad is not None
    assert anchor.grad is not None
    assert x.grad.tolist() == [50.0, 100.0]
    assert anchor.grad.tolist() == [0.0, 0.0, 0.0]


def test_a_cut_graph_goes_on_at_the_anchors() -> None:
    x = torch.ones(2, requires_grad=True)
    stand_in = instead(x.detach(), torch.ones(2), x * 3)
    stand_in.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0]


def test_tensors_are_replaced_by_slot_in_nested_containers() -> None:
    a, b, c, new = (torch.full((1,), float(n)) for n in range(4))
    given = Pair(a, {"deep": [b, c]})
    found = replaced(given, "in.0", {"in.0.rest.deep.1": new})
    assert isinstance(found, Pair)
    assert found.first is a
    assert found.rest["deep"][0] is b
    assert found.rest["deep"][1] is new
    assert given.rest["deep"][1] is c
    assert replaced(given, "in.1", {"in.0.first": new}) is given


def test_a_boundary_that_was_not_forced_once_is_not_forced(tmp_path: Path) -> None:
    folder = tmp_path
    ledger = Ledger(folder)
    for reason in ("", "other rows", ""):
        ledger.note(1, Kind.ACTIVATION, "fc", "out", 0, reason)
    ledger.write()
    ledger.note(2, Kind.ACTIVATION, "fc", "out", 0)
    ledger.write()
    ledger.write()
    kept = {"kind": Kind.ACTIVATION, "name": "fc", "slot": "out", "call": 0}
    assert list(read(folder)) == [Given(step=1, reason="other rows", **kept), Given(step=2, **kept)]


def test_a_ledger_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    folder = tmp_path
    (folder / "1.forced.jsonl").write_text('{"step": "x"}\n')
    with pytest.raises(DamagedTrace, match="line 1"):
        list(read(folder))
