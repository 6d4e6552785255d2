"""Averages of a model are recorded whoever keeps them, to their last value, and numbered as they change."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from tests.memory_sink import MemorySink, recording

STEPS = 3


def train(*, decay: float = 0.5, unrelated: bool = False, module: bool = False) -> weakref.ref[torch.Tensor]:
    """Train for three steps and keep an average in a local variable; return a reference to its tensor."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    lies_about = {n: p.detach().clone() for n, p in model.named_parameters()} if unrelated else {}
    average = copy.deepcopy(model) if module else None
    kept = dict(average.named_parameters()) if average else dict(model.state_dict())
    kept = {name: tensor.detach() if average else tensor.clone() for name, tensor in kept.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(STEPS):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                kept[name].mul_(decay).add_(parameter, alpha=1 - decay)
    del lies_about
    return weakref.ref(kept["weight"])


def averages(sink: MemorySink, name: str) -> list[torch.Tensor]:
    return [kept.value for kept in sink.find("buffer", name, "model")]


@pytest.mark.parametrize(("module", "name"), [(False, "(copy).weight"), (True, "Linear.weight")])
def test_the_last_value_of_an_average_in_a_local_variable_is_recorded(module: bool, name: str) -> None:
    with recording() as sink:
        held = train(module=module)
    found = averages(sink, name)
    # The weight falls by 1 a step: from where it began the average is 0.5, 1.25 and 2.125 away.
    assert len(found) == STEPS
    steps = [float((x - y).mean()) for x, y in itertools.pairwise(found)]
    assert steps == pytest.approx([0.75, 0.875])
    gc.collect()
    assert held() is None  # and the recorder does not keep it


def test_a_mapping_that_never_changes_takes_no_number() -> None:
    with recording() as sink:
        train(unrelated=True)
    assert len(averages(sink, "(copy).weight")) == STEPS
    assert averages(sink, "(copy).1.weight") == []
