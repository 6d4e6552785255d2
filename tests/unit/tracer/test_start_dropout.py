"""Tests of ``--consistent-dropout``: which elements stay depends on row, position, step and call alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tensortrace.tracer.settings import Start
from tests.memory_sink import MemorySink
from tests.unit.tracer.starting import started
from tests.unit.tracer.test_start_fill import fnv, splitmix

IDS = torch.tensor([[5, 1, 2, 3], [4, 0, 1, 1], [9, 8, 7, 6], [5, 1, 2, 4]])
WORD = 2**64


class Net(nn.Module):
    """``drop`` gets ones, so that its output is its mask, scaled."""

    def __init__(self, drop: nn.Module | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.drop = drop or nn.Dropout(0.4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return (x * self.drop(torch.ones_like(x))).sum()


def run(
    batches: list[torch.Tensor], model: nn.Module | None = None, *, seed: int = 3, each_steps: bool = True
) -> MemorySink:
    """Train on the batches: each in a step of its own, or as microbatches of one step."""
    model = model or Net()
    with started(Start(dropout_seed=seed)) as sink:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            model(batch).backward()
            if each_steps:
                optimizer.step()
        if not each_steps:
            optimizer.step()
    return sink


def masks(sink: MemorySink) -> list[torch.Tensor]:
    return [kept.value != 0 for kept in sink.find("activation", "drop", "out", recompute=False)]


def by_hand(seed: int, name: str, step: int, call: int, row: list[int], shape: tuple[int, ...]) -> np.ndarray:
    """The numbers of docs/start.md for one row of token ids, in [0, 1)."""
    total = sum(splitmix((token + splitmix(j)) % WORD) for j, token in enumerate(row))
    identity = splitmix(total % WORD)
    key = splitmix(seed)
    for word in (fnv("dropout"), fnv(name), step, call):
        key = splitmix(key ^ word)
    start = splitmix(identity ^ key)
    odd = [splitmix(splitmix(splitmix(0) ^ fnv("dimension")) ^ dim) | 1 for dim in range(len(shape))]
    found = np.empty(shape)
    for index in np.ndindex(*shape):
        counter = (start + sum(i * o for i, o in zip(index, odd, strict=True))) % WORD
        found[index] = (splitmix(counter) >> 11) / 2**53
    return found


def test_an_element_stays_by_the_specified_number() -> None:
    [first, second] = masks(run([IDS[:2], IDS[2:]]))
    for step, mask, rows in ((0, first, IDS[:2]), (1, second, IDS[2:])):
        for found, row in zip(mask, rows.tolist(), strict=True):
            assert np.array_equal(found.numpy(), by_hand(3, "drop", step, 0, row, (4, 6)) >= 0.4)


def test_what_stays_is_scaled_up_and_as_frequent_as_asked() -> None:
    ids = torch.arange(400).reshape(100, 4) % 10
    ids[:, 0] = torch.arange(100)
    model = Net()
    model.embed = nn.Embedding(100, 50)
    out = run([ids], model).one("activation", "drop", "out")
    assert out.unique().tolist() == pytest.approx([0, 1 / 0.6])
    assert abs((out != 0).double().mean() - 0.6) < 4 * (0.24 / out.numel()) ** 0.5


def test_masks_follow_their_rows_through_any_order_and_split() -> None:
    [whole] = masks(run([IDS]))
    order = torch.tensor([2, 0, 3, 1])
    [shuffled] = masks(run([IDS[order]]))
    assert torch.equal(shuffled, whole[order])
    split = masks(run([IDS[:1], IDS[1:]], each_steps=False))
    assert torch.equal(torch.cat(split), whole)


def test_steps_seeds_and_calls_draw_anew() -> None:
    first, second = masks(run([IDS, IDS]))
    [other] = masks(run([IDS], seed=4))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)

    class Twice(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + super().forward(ids)

    one, two = masks(run([IDS], Twice()))
    assert torch.equal(one, first)
    assert not torch.equal(one, two)


def test_a_row_is_the_same_however_far_it_is_padded() -> None:
    class Padded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 6, padding_idx=0)

    longer = F.pad(IDS, (0, 3))
    [short], [long] = masks(run([IDS], Padded())), masks(run([longer], Padded()))
    assert torch.equal(long[:, :4], short)


class Shaped(nn.Module):
    """Drops ones that a function shapes, in the manner of other layouts of the same values."""

    def __init__(self, drop: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.how = drop
        self.drop = nn.Dropout(0.4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return (x * self.how(self.drop, torch.ones_like(x))).sum()


def dropped(how: Callable[..., torch.Tensor]) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def keep(drop: nn.Module, ones: torch.Tensor) -> torch.Tensor:
        out = how(drop, ones)
        seen.append(out.detach() != 0)
        return out

    run([IDS[:3]], Shaped(keep))
    return seen[0]


def test_rows_may_come_second_or_merged_with_positions() -> None:
    plain = dropped(lambda drop, ones: drop(ones))
    assert torch.equal(dropped(lambda drop, ones: drop(ones.transpose(0, 1)).transpose(0, 1)), plain)
    assert torch.equal(dropped(lambda drop, ones: drop(ones.flatten(0, 1)).reshape(ones.shape)), plain)


def test_dropout_in_place_changes_its_input() -> None:
    def in_place(drop: nn.Module, ones: torch.Tensor) -> torch.Tensor:
        assert F.dropout(ones, 0.4, True, True) is ones
        return ones

    assert 0 < dropped(in_place).float().mean() < 1


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.FeatureAlphaDropout])
def test_whole_channels_are_dropped(kind: type[nn.Module]) -> None:
    out = run([IDS], Net(kind(0.4))).one("activation", "drop", "out")
    assert (out == out[:, :, :1]).all()
    assert out.unique().numel() == 2


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    class Selu(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = (
                torch.randn(100, 40, 50, generator=torch.Generator().manual_seed(0))
                + self.embed(ids).sum() * 0
            )
            return self.drop(x).sum()

    ids = torch.arange(400).reshape(100, 4) % 10
    ids[:, 0] = torch.arange(100)
    model = Selu(nn.AlphaDropout(0.3))
    model.embed = nn.Embedding(100, 6)
    out = run([ids], model).one("activation", "drop", "out")
    assert out.mean().item() == pytest.approx(0, abs=0.02)
    assert out.var().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_has_the_masks_of_its_first_pass(reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            ones = torch.ones_like(x) + 0 * x
            return checkpoint(lambda y: self.drop(y).sin(), ones, use_reentrant=reentrant).sum()

    model = Checkpointed()
    with started(Start(dropout_seed=3)) as sink:
        first, second = model(IDS[:2]), model(IDS[2:])  # both forwards before the first recompute
        (first + second).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    passes = {flag: sink.find("activation", "drop", "out", recompute=flag) for flag in (False, True)}
    assert len(passes[False]) == len(passes[True]) == 2
    for again in passes[True]:
        [once] = [k for k in passes[False] if k.boundary.call == again.boundary.call]
        assert torch.equal(once.value, again.value)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, is_causal=True).square().sum()


def test_attention_that_drops_in_its_kernel_is_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run([IDS], Attention())
    assert left.value.code == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "--eager-attention" in said


def test_eager_attention_follows_its_rows() -> None:
    model = Attention()

    def output(ids: torch.Tensor) -> float:
        with started(Start(dropout_seed=3, eager_attention=True)):
            result = model(ids)
            result.backward()
        return result.item()

    assert output(IDS[:2]) == pytest.approx(output(IDS[:1]) + output(IDS[1:2]), rel=1e-6)
    assert output(IDS[:2]) != pytest.approx(model(IDS[:2]).item(), rel=1e-2)


@pytest.mark.parametrize("causal", [True, False])
def test_eager_attention_without_a_mask_is_the_fused_one(causal: bool) -> None:
    x = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(1))
    y = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(2))
    bias = None if causal else torch.randn(5, 5, generator=torch.Generator().manual_seed(3))
    from tensortrace.tracer.start.attention import _weights

    k = y.repeat_interleave(2, 1)
    wanted = F.scaled_dot_product_attention(x, k, k, bias, is_causal=causal)
    assert torch.allclose(_weights(x, k, bias, is_causal=causal, scale=None) @ k, wanted, atol=1e-6)


@pytest.mark.parametrize("weights", [True, False])
def test_the_attention_module_follows_its_rows(weights: bool) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.attend = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            return self.attend(x, x, x, need_weights=weights)[0].sum()

    model = Module()

    def outputs(ids: torch.Tensor) -> torch.Tensor:
        with started(Start(dropout_seed=3, eager_attention=True)) as sink:
            model(ids).backward()
        return sink.one("activation", "attend", "out.0")

    whole = outputs(IDS)
    assert torch.allclose(outputs(IDS[1:3]), whole[1:3], atol=1e-6)


def test_dropout_inside_a_recurrent_kernel_is_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    class Recurrent(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.2)

    with pytest.raises(SystemExit):
        run([IDS], Recurrent())
    assert "lstm draws dropout inside its kernel" in capfd.readouterr().err


def test_a_tensor_that_holds_no_rows_is_refused_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    def odd(drop: nn.Module, ones: torch.Tensor) -> torch.Tensor:
        return ones * drop(torch.ones(5)).sum()

    with pytest.raises(SystemExit):
        dropped(odd)
    assert "drop: no dimension of (5,) holds the 3 rows" in capfd.readouterr().err


def test_eval_and_no_probability_draw_nothing() -> None:
    model = Net()
    model.drop.p = 0.0
    assert all(mask.all() for mask in masks(run([IDS], model)))
