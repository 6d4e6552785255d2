"""Two implementations of one model, with other names and transposed weights, share a start."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from tensortrace import tracer
from tensortrace.diff import compare
from tensortrace.diff.engine import CompareOptions
from tensortrace.tracer.settings import Start

WORDS, WIDTH, ROWS, LENGTH = 23, 8, 4, 6

NAMES = """
format = 1
[axes]
[[rename]]
from = "wte*"
to = "embed*"
[[rename]]
from = "h.{n}.mlp.c_fc*"
to = "layers.{n}.up*"
[[rename]]
from = "h.{n}.mlp.c_proj*"
to = "layers.{n}.down*"
[[rename]]
from = "h.{n}.drop"
to = "layers.{n}.dropout"
[[rename]]
from = "h.{n}.mlp"
to = ""
[[rename]]
from = "h.{n}*"
to = "layers.{n}*"
[[rule]]
name = "layers.*.up.weight"
dims = "i o"
to = { "layers.*.up.weight" = "o i" }
[[rule]]
name = "layers.*.down.weight"
dims = "i o"
to = { "layers.*.down.weight" = "o i" }
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Transposed(nn.Module):
    """A layer whose weight has the inputs first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Transposed(WIDTH, 20), Transposed(20, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class TheirBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.drop = nn.LayerNorm(WIDTH), MLP(), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Theirs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.h = nn.ModuleList([TheirBlock(), TheirBlock()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


def record(path: Path, made: type[nn.Module], start: Start, layout: Path | None = None) -> Path:
    """Train two steps with numbers of the implementation's own."""
    torch.manual_seed(len(made.__name__))
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(4)
    with tracer.record(str(path), min_free="0", start=start, layout=layout):
        for _ in range(2):
            ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=batches)
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_the_renames_of_a_layout_file_give_another_implementation_the_same_start(tmp_path: Path) -> None:
    names = tmp_path / "names.toml"
    names.write_text(NAMES)
    drawn = Start(init_seed=2, adversarial=True, dropout_seed=3)
    ours = record(tmp_path / "ours", Ours, drawn)
    theirs = record(tmp_path / "theirs", Theirs, drawn, names)
    result = compare(ours, theirs)
    assert result.verdict == "equivalent", result.headline
    begun = Start(init_from=str(ours), dropout_seed=3)
    result = compare(ours, record(tmp_path / "begun", Theirs, begun, names))
    assert result.verdict == "equivalent", result.headline
    back = Start(init_from=str(theirs), dropout_seed=3)
    assert compare(ours, record(tmp_path / "back", Ours, back), options=CompareOptions(policy="exact"))
