"""A common start of what a program spread over ranks by hand, as a layout file says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensortrace import tracer
from tensortrace.tracer.settings import Start
from tensortrace.tracer.start import load, places, relay, spread
from tests.memory_sink import MemorySink
from tests.unit.tracer.starting import started

WIDTH, HIDDEN, WORDS, PADDED = 6, 4, 5, 8

LAYOUT = """
format = 1
stages = ["pp"]
[axes]
pp = 2
tp = 2
[[rename]]
from = "blocks.{n}.*"
to = "layers.{n}.*"
add = { n = { pp = [0, 1] } }
[[rename]]
from = "head.weight"
to = "words.weight"
[[rule]]
name = "words.weight"
dims = "v[tp] d"
sizes = { v = 8 }
valid = { v = 5 }
[[rule]]
name = "layers.*.up.weight"
dims = "(gate|up)[tp] d"
sizes = { gate = 4, up = 4 }
[[rule]]
name = "layers.*.up.bias"
dims = "(gate|up)[tp]"
sizes = { gate = 4, up = 4 }
[[rule]]
name = "layers.*.down.weight"
dims = "d h[tp]"
[[rule]]
name = "layers.*.down.bias"
dims = "d same:tp"
"""
NAMES = [
    f"layers.{n}.{leaf}" for n in (0, 1) for leaf in ("up.weight", "up.bias", "down.weight", "down.bias")
]


class ColumnParallelLinear(nn.Linear):
    """Named as such layers are, so that nothing but a rule tells what its ranks hold."""


class Block(nn.Module):
    def __init__(self, ways: int) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(WIDTH, 2 * HIDDEN // ways)
        self.down = nn.Linear(HIDDEN // ways, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(gate.sigmoid() * up)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block(1), Block(1)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stage(nn.Module):
    """One rank's part of a stage: half of a block, and half of the words under one name or the other."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(2)])
        if first:
            self.words = nn.Embedding(PADDED // 2, WIDTH)
        else:
            self.head = nn.Linear(WIDTH, PADDED // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.words(x)) if x.dim() == 1 else self.head(self.blocks[0](x))


def wanted(name: str, value: torch.Tensor, tp: int) -> torch.Tensor:
    """Return what a rank should hold of a whole tensor."""
    if name == "words.weight":
        return torch.cat([value, torch.zeros(PADDED - WORDS, WIDTH)]).chunk(2)[tp]
    if ".up." in name:
        return torch.cat([half.chunk(2)[tp] for half in value.chunk(2)])
    return value.chunk(2, 1)[tp] if name.endswith("down.weight") else value


def trained(model: nn.Module, given: torch.Tensor, steps: int = 1) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(given).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "layout.toml").write_text(LAYOUT)
    return tmp_path / "layout.toml"


def stand_at(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    for module in (places, spread, relay):
        monkeypatch.setattr(module, "rank", lambda: rank)
    for module in (places, load):
        monkeypatch.setattr(module, "world_size", lambda: 4)


def on_rank(rank: int, file: Path, asked: Start) -> MemorySink:
    with started(asked, file) as sink:
        trained(Stage(rank < 2), torch.arange(3) if rank < 2 else torch.ones(3, WIDTH))
    return sink


def assert_parts(sink: MemorySink, kind: str, slot: str, rank: int, whole: dict[str, torch.Tensor]) -> None:
    stage, tp = divmod(rank, 2)
    held = {k.boundary.name: k.value for k in sink.find(kind, step=-1) if k.boundary.slot == slot}
    assert held, (kind, slot)
    for own, value in held.items():
        name = "words.weight" if own == "head.weight" else own.replace("blocks.0", f"layers.{stage}")
        assert torch.equal(value, wanted(name, whole[name], tp)), own


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("adversarial", [False, True])
def test_each_rank_draws_its_part_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, file: Path, rank: int, adversarial: bool
) -> None:
    asked = Start(init_seed=3, adversarial=adversarial)
    with started(asked) as alone:
        trained(Whole(), torch.arange(3))
    whole = {k.boundary.name: k.value for k in alone.find("param", step=-1)}
    assert sorted(whole) == sorted([*NAMES, "words.weight"])
    stand_at(monkeypatch, rank)
    assert_parts(on_rank(rank, file, asked), "param", "model", rank, whole)


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_takes_its_part_of_another_runs_state(
    monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path, rank: int
) -> None:
    model = Whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.arange(3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {name: optimizer.state[p]["exp_avg"].clone() for name, p in model.named_parameters()}
    with tracer.record(str(tmp_path / "whole"), min_free="0"):
        step()
    stand_at(monkeypatch, rank)
    sink = on_rank(rank, file, Start(init_from=str(tmp_path / "whole")))
    assert_parts(sink, "param", "model", rank, whole)
    assert_parts(sink, "optimizer_state", "exp_avg", rank, moments)
    steps = [k.value for k in sink.find("optimizer_state", step=-1) if k.boundary.slot == "step"]
    assert len(steps) == 5
    assert all(float(value) == 1 for value in steps)


def test_a_marked_layer_without_a_rule_is_refused(
    monkeypatch: pytest.MonkeyPatch, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.write_text(LAYOUT.replace('"layers.*.up.weight"', '"layers.1.up.weight"'))
    stand_at(monkeypatch, 0)
    with pytest.raises(SystemExit) as left:
        on_rank(0, file, Start(init_seed=3))
    assert left.value.code == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if "cannot start" in line]
    assert "layers.0.up.weight" in line
    assert "--layout FILE" in line


def test_a_layout_of_another_number_of_ranks_is_refused(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        on_rank(0, file, Start(init_seed=3))
    assert "make 4 ranks" in capfd.readouterr().err


class Dropping(nn.Module):
    """Drops from hidden features, of which a rank has some."""

    def __init__(self, hidden: int, name: str) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.add_module(name, nn.Dropout(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        *_, dropout = self.children()
        return dropout(self.up(F.one_hot(ids, WIDTH).float()))


DROPS = """
format = 1
[axes]
tp = 2
[[rename]]
from = "drop"
to = "dropout"
[[rule]]
name = "dropout"
slot = "in.0"
dims = "b s h[tp]"
[[rule]]
name = "up.*"
dims = "h[tp] ..."
[[rule]]
name = "(root)"
slot = "in.0"
dims = "b s same:tp"
"""
IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])


def dropped(model: nn.Module, name: str, layout: Path | None = None) -> torch.Tensor:
    with started(Start(dropout_seed=1), layout) as sink:
        model(IDS).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return sink.one("activation", name, slot="out") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_features_that_a_rank_has_by_hand_have_their_part_of_the_mask(
    monkeypatch: pytest.MonkeyPatch, file: Path, rank: int
) -> None:
    whole = dropped(Dropping(8, "dropout"), "dropout")
    assert 0.2 < whole.float().mean() < 0.8
    file.write_text(DROPS)
    stand_at(monkeypatch, rank)
    assert torch.equal(dropped(Dropping(4, "drop"), "drop", file), whole.chunk(2, -1)[rank])


def test_rows_of_which_nobody_tells_the_rest_are_refused(
    monkeypatch: pytest.MonkeyPatch, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file.write_text(DROPS.replace("b s same:tp", "b s[tp]"))
    stand_at(monkeypatch, 0)
    with pytest.raises(SystemExit):
        dropped(Dropping(4, "drop"), "drop", file)
    [line] = [line for line in capfd.readouterr().err.splitlines() if "cannot start" in line]
    assert "the other positions of these rows" in line
