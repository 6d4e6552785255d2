"""Inputs beside the one that rows are known by: a mistake in a state, in noise, in positions has its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensortrace import tracer
from tensortrace.diff.engine import compare
from tests.integration.judged import codes, place

ROWS, LENGTH, WIDTH, STEPS, WRONG = 6, 5, 4, 4, 2


class Net(nn.Module):
    """Embeds tokens and their positions, adds noise to them, and carries a state from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(13, WIDTH), nn.Embedding(32, WIDTH)
        self.rnn, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 13)

    def forward(
        self, ids: torch.Tensor, state: torch.Tensor, noise: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(ids) + self.places(positions) + noise
        out, last = self.rnn(x, state[None])
        return self.head(out), last[0]


class Given:
    """What the network is given beside its tokens; a test spoils it at one step."""

    def __init__(self) -> None:
        self.state, self.earlier = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
        self.noise, self.positions = torch.zeros(ROWS, LENGTH, WIDTH), torch.arange(LENGTH)


def train(trace: Path, spoil: Callable[[Given], None] = lambda given: None) -> Path:
    """Train for four steps; spoil what is given at the third."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, given = Net(), Given()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracer.record(trace):
        for step in range(STEPS):
            ids = torch.randint(13, (ROWS, LENGTH + 1))
            given.noise, given.positions = torch.randn(ROWS, LENGTH, WIDTH), torch.arange(LENGTH)
            if step == WRONG:
                spoil(given)
            optimizer.zero_grad()
            out, last = model(ids[:, :-1], given.state, given.noise, given.positions)
            F.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            given.earlier, given.state = given.state, last.detach()
    return trace


def cleared(given: Given) -> None:
    given.state = torch.zeros_like(given.state)


def kept(given: Given) -> None:
    given.state = given.earlier


def flipped(given: Given) -> None:
    given.noise = given.noise.flip(0)


def alike(given: Given) -> None:
    given.noise = given.noise[:1].expand(ROWS, -1, -1).clone()


def moved(given: Given) -> None:
    given.positions = given.positions + 1


def started_anew(given: Given) -> None:
    given.positions = torch.tensor([0, 1, 2, 0, 1])


def test_the_same_program_is_the_same(tmp_path: Path) -> None:
    assert compare(train(tmp_path / "a"), train(tmp_path / "b")).verdict == "equivalent"


@pytest.mark.parametrize(
    ("spoil", "slot", "code"),
    [
        (cleared, "in.1", "value.zero"),
        (kept, "in.1", "value.stale"),
        (flipped, "in.2", "input.order"),
        (alike, "in.2", "input.different"),
        (moved, "in.3", "position.shifted"),
        (started_anew, "in.3", "position.shifted"),
    ],
)
def test_what_was_done_to_an_input_is_named(
    tmp_path: Path, spoil: Callable[[Given], None], slot: str, code: str
) -> None:
    result = compare(train(tmp_path / "a"), train(tmp_path / "b", spoil))
    assert place(result) == (WRONG, 0, "input", "(root)", slot)
    assert codes(result)[0] == code
