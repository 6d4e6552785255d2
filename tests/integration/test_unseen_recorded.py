"""Recordings that left something out: what lies between is named, and the option that records it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensortrace.diff import compare
from tensortrace.diff.result import Result
from tests.harness import python, record

SCRIPT = """
import sys, torch
from torch import nn

class Middle(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float(sys.argv[1])

torch.manual_seed(0)
model = nn.ModuleDict({"first": nn.Linear(6, 16), "middle": Middle(16, 16), "last": nn.Linear(16, 3)})
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = model["first"], model["middle"], model["last"]
    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(2):
    x = torch.randn(8, 6)
    optimizer.zero_grad()
    nn.functional.mse_loss(net(x), x[:, :3]).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "net.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def judged(script: Path, folder: Path, *options: str) -> Result:
    a = record(folder / "a", python(script, 1.0), *options)
    return compare(a, record(folder / "b", python(script, 1.01), *options))


def test_a_module_that_was_excluded_is_named_with_the_option_that_records_it(
    script: Path, tmp_path: Path
) -> None:
    result = judged(script, tmp_path, "--exclude", "middle*")
    found = result.first_divergent
    assert found is not None
    assert (found.where.kind, found.where.name, found.where.slot) == ("activation", "last", "in.0")
    assert len(found.unseen) == 2
    assert all(text.startswith("middle: not recorded in ") for text in found.unseen)
    assert "no origin in view" in result.headline
    assert "record without --exclude 'middle*'" in result.hints[-1]


def test_of_gradients_alone_no_origin_is_in_view(script: Path, tmp_path: Path) -> None:
    result = judged(script, tmp_path, "--kinds", "local_grad,clipped_grad,optimizer_state")
    found = result.first_divergent
    assert found is not None
    assert found.where.kind == "local_grad"
    assert found.unseen == ("activation_grad, loss, activation: not recorded in a and b (--kinds)",)
    assert "record with --kinds activation,loss,activation_grad,local_grad" in result.hints[-1]
