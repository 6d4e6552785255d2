"""Tests of ``--consistent-init``: values by name and index, whatever the program itself had drawn."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensortrace.tracer.settings import Start
from tests.unit.tracer.starting import started


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 6)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3))
        self.frozen = nn.Parameter(torch.zeros(2, 3), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(x).sum() + self.fc(x).sum() * self.mask.sum()


def train(model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        model(torch.arange(6).reshape(2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()


def initial(model: nn.Module, asked: Start) -> dict[str, torch.Tensor]:
    with started(asked) as sink:
        train(model)
    kept = [*sink.find("param", step=-1), *sink.find("buffer", step=-1)]
    return {k.boundary.name: k.value for k in kept}


def splitmix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def fnv(text: str) -> int:
    h = 0xCBF29CE484222325
    for byte in text.encode():
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


def expected(seed: int, name: str, count: int) -> np.ndarray:
    """The numbers of docs/start.md in [-1, 1), in float64."""
    key = splitmix(seed)
    for word in ("init", name):
        key = splitmix(key ^ fnv(word))
    return np.array([(splitmix((key + i) % 2**64) >> 11) * 2.0**-52 - 1 for i in range(count)])


def test_matrices_are_drawn_from_name_and_index_and_scaled_by_fan_in() -> None:
    torch.manual_seed(5)
    found = initial(Net(), Start(init_seed=7))
    for name, shape in {"embed.weight": (11, 8), "fc.weight": (6, 8), "frozen": (2, 3)}.items():
        wanted = expected(7, name, math.prod(shape)).reshape(shape) * math.sqrt(3 / shape[1])
        assert np.array_equal(found[name].numpy(), wanted.astype(np.float32)), name


def test_vectors_are_distinguishable_and_never_zero() -> None:
    found = initial(Net(), Start(init_seed=7))
    bias, scale = expected(7, "fc.bias", 6), expected(7, "norm.weight", 8)
    assert np.array_equal(found["fc.bias"].numpy(), ((bias + np.sign(bias)) / 16).astype(np.float32))
    assert np.array_equal(found["norm.weight"].numpy(), (1 + scale / 4).astype(np.float32))
    assert found["fc.bias"].abs().min() >= 1 / 16
    assert found["norm.running_mean"].abs().min() >= 1 / 16
    assert found["norm.running_var"].min() >= 0.75


def test_buffers_that_the_program_computes_are_left_alone() -> None:
    assert torch.equal(initial(Net(), Start(init_seed=7))["mask"], torch.ones(3))


def test_a_tied_parameter_is_set_once_under_its_first_name() -> None:
    model = Net()
    found = initial(model, Start(init_seed=7))
    assert "head.weight" not in found
    assert model.head.weight is model.embed.weight


def test_what_the_program_had_drawn_does_not_matter() -> None:
    torch.manual_seed(1)
    one = initial(Net(), Start(init_seed=7))
    torch.manual_seed(2)
    two = initial(Net(), Start(init_seed=7))
    other = initial(Net(), Start(init_seed=8))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_hold_the_same_numbers_rounded(dtype: torch.dtype) -> None:
    model = nn.Linear(8, 6)
    lower = copy.deepcopy(model).to(dtype)
    found = {}
    for name, one in {"single": model, "other": lower}.items():
        with started(Start(init_seed=3)) as sink:
            one(torch.ones(2, 8, dtype=one.weight.dtype)).sum().backward()
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        found[name] = sink.one("param", "weight", step=-1)
    assert torch.equal(found["other"], found["single"].to(dtype))


def test_the_generators_of_the_program_are_not_drawn_from() -> None:
    torch.manual_seed(1)
    model = Net()
    before = torch.get_rng_state()
    with started(Start(init_seed=7)):
        train(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("width", [100, 1600])
def test_adversarial_rows_grow_and_their_halves_cancel_at_any_width(width: int) -> None:
    model = nn.Linear(width, 240)
    with started(Start(init_seed=7, adversarial=True)) as sink:
        model(torch.ones(2, width)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    weight = sink.one("param", "weight", step=-1).double()
    grow = 0.5 + (torch.arange(240, dtype=torch.float64) + 0.5) / 240
    halves = torch.stack([weight[:, : width // 2].sum(1), weight[:, width // 2 :].sum(1)]) / grow
    # a half's lift: width/2 columns, each 2/sqrt(width) times sqrt(3/width)/2; by chance a row's sum is 1/2
    assert halves.abs().mean() == pytest.approx(3**0.5 / 2, rel=0.1)
    assert halves.sum(0).square().mean().sqrt() == pytest.approx(0.5, rel=0.1)
    assert (halves[0] * halves[1] < 0).double().mean() > 0.95
    sizes = weight.square().mean(1).sqrt()
    assert 2 < sizes[-40:].mean() / sizes[:40].mean() < 3.2
    bias = sink.one("param", "bias", step=-1)
    assert bias.min() >= 0.125
    assert bias.max() <= 0.375


def test_an_adversarial_vocabulary_has_its_largest_rows_last() -> None:
    model = nn.Sequential(nn.Embedding(40, 12), nn.Linear(12, 40))
    with started(Start(init_seed=7, adversarial=True)) as sink:
        model(torch.arange(6).reshape(2, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name in ("0.weight", "1.weight"):
        sizes = sink.one("param", name, step=-1).square().mean(1).sqrt()
        assert sizes[-5:].min() > 1.5 * sizes[:-5].max()


def train_with_master() -> None:
    model = nn.Linear(4, 4)
    master = model.weight.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([master], lr=0.1)
    F.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 4)).backward()
    optimizer.step()


def test_masters_are_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, started(Start(init_seed=7)):
        train_with_master()
    assert left.value.code == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "param.0" in said
    assert "master" in said


def test_a_shard_by_hand_is_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 4)
    model.weight.tensor_model_parallel = True
    with pytest.raises(SystemExit), started(Start(init_seed=7)):
        model(torch.ones(2, 4)).sum().backward()
    assert "weight is a part of a bigger tensor" in capfd.readouterr().err
