"""Modules of one recorded run are executed again: correct kernels agree, wrong ones are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensortrace import tracer
from tensortrace.replay import Replay, ReplayOptions, pack, replay, replay_case
from tests.module_zoo import ZOO, train

OF_MODULES = ("activation", "activation_grad", "local_grad")
LOSSES = [name for name in ZOO if "cross_entropy" in name or name in (
    "nll", "mse", "l1", "smooth_l1", "huber", "bce", "bce_logits", "kl", "kl_logs",
)]  # fmt: skip
"""What the zoo adds up with weights of its own, which is no objective that is known."""

ONE_OF_EACH = ["linear", "layer_norm", "rms_norm", "conv2", "gelu", "softmax", "embedding", "dropout_eval"]
WITHOUT_KERNEL = {torch.bfloat16: {"avg_pool_divisor"}, torch.float16: {"avg_pool_divisor"}}


def mismatches(result: Replay) -> list[tuple[str, str, str]]:
    """Return (kind, name, slot) of what modules gave or were given and should not."""
    found = (f.where for f in result.mismatches if f.where.kind in OF_MODULES)
    return list(dict.fromkeys((w.kind, w.name.removeprefix("kinds."), w.slot) for w in found))


def reasons(result: Replay, kind: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for group in result.not_replayed:
        if group.kind == kind:
            found[group.reason] = found.get(group.reason, 0) + group.count
    return found


# --- correct runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        (torch.float32, False), (torch.float32, True),
        pytest.param(torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param(torch.float16, False, marks=pytest.mark.slow),
    ],
    ids=["float32", "autocast", "bfloat16", "float16"],
)  # fmt: skip
def test_every_kind_of_module_agrees(tmp_path: Path, dtype: torch.dtype, autocast: bool) -> None:
    names = [name for name in ZOO if name not in WITHOUT_KERNEL.get(dtype, ())]
    result = replay(train(tmp_path / "a", names, dtype=dtype, autocast=autocast, microbatches=1))
    assert mismatches(result) == []
    outputs = [n.where for n in result.boundaries if n.where.kind == "activation"]
    assert {w.name.removeprefix("kinds.").removesuffix(".inner") for w in outputs} == set(names)
    assert result.replayed["activation"] == 2 * len(names)  # of each in two steps
    backward = {
        n.where.name.removeprefix("kinds.").removesuffix(".inner")
        for n in result.boundaries
        if n.where.kind == "activation_grad"
    }
    given_ids = {"embedding", "embedding_last", "bag_mean", "bag_sum"}
    assert backward == set(names) - given_ids
    left = {r for r in reasons(result, "local_grad") if "uses" in r or "formula" in r}
    assert not left


def test_a_run_without_losses_of_its_own_agrees(tmp_path: Path) -> None:
    result = replay(train(tmp_path / "a", ONE_OF_EACH))
    assert result.verdict == "agrees", result.headline


def test_modules_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    path = train(tmp_path / "a", ONE_OF_EACH)
    result = replay(path, options=ReplayOptions(modules="none"))
    assert result.verdict == "agrees", result.headline
    assert "activation" not in result.replayed
    assert replay(path).replayed["activation"] == 4 * len(ONE_OF_EACH)


# --- wrong kernels and reductions, in the only run there is ----------------------------------------------


class Drops(torch.autograd.Function):
    """A product whose weight's gradient lacks the first row of the batch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        flat, given = g[1:].flatten(0, -2), x[1:].flatten(0, -2)
        return g @ weight, flat.T @ given, g.flatten(0, -2).sum(0)


class Doubles(Drops):
    """A product whose bias gets its gradient twice."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        flat = g.flatten(0, -2)
        return g @ weight, flat.T @ x.flatten(0, -2), 2 * flat.sum(0)


class Coarse(Drops):
    """A product whose input's gradient is computed in bfloat16."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        flat, coarse = g.flatten(0, -2), torch.bfloat16
        given = (g.to(coarse) @ weight.to(coarse)).to(g.dtype)
        return given, flat.T @ x.flatten(0, -2), flat.sum(0)


def of_linear(kind: type[Drops]) -> Callable[..., torch.Tensor]:
    return lambda x, weight, bias=None: kind.apply(x, weight, bias)  # type: ignore[no-untyped-call,no-any-return]


def bfloat16_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    low = torch.bfloat16
    made = x.to(low) @ weight.to(low).T
    return made.to(x.dtype) if bias is None else made.to(x.dtype) + bias


class Shifted(torch.autograd.Function):
    """A convolution whose backward pads one element too much on one side."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, how: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return torch.conv2d(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (g,), (x, weight) = gradients, ctx.saved_tensors
        given = torch.nn.grad.conv2d_input(x.shape, weight, g, *ctx.how)
        kernel = torch.nn.grad.conv2d_weight(x, weight.shape, g, *ctx.how)
        return torch.roll(given, 1, -1), kernel, g.sum((0, 2, 3)), None


class LastPositions(torch.autograd.Function):
    """A norm whose weight's gradient is summed over the last row of the batch alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (g,), (x, weight, scale) = gradients, ctx.saved_tensors
        made = x * scale
        inner = g * weight
        given = scale * (inner - made * (inner * made).mean(-1, keepdim=True))
        return given, (g * made)[-1].flatten(0, -2).sum(0), None


class Overwritten(torch.autograd.Function):
    """A look-up whose backward writes where it should add."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.ids, ctx.shape = ids, weight.shape
        return weight[ids]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        found = torch.zeros(ctx.shape)
        found[ctx.ids.flatten()] = gradients[0].flatten(0, -2)
        return None, found


class Straight(torch.autograd.Function):
    """A SiLU whose backward leaves a term out."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.sigmoid(x)


def by_n_minus_one(x: torch.Tensor, *given: Any, **_: Any) -> torch.Tensor:
    """Normalise a batch by the variance that running statistics keep."""
    weight, bias = given[2], given[3]
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True)
    return (x - mean) / (variance + given[6]).sqrt() * weight[:, None, None] + bias[:, None, None]


def without_upcast(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + (eps or 1e-6)).rsqrt() * weight


layer_norm, gelu, softmax, dropout, embedding = F.layer_norm, F.gelu, F.softmax, F.dropout, F.embedding
cross_entropy, attention, avg_pool = F.cross_entropy, F.scaled_dot_product_attention, F.avg_pool2d
group_norm, leaky = F.group_norm, F.leaky_relu

Patch = tuple[str, Callable[..., Any]]

PLANTED: dict[str, tuple[Patch, str, set[tuple[str, str]]]] = {
    "layer norm with another eps": (
        ("layer_norm", lambda x, shape, w=None, b=None, eps=1e-5: layer_norm(x, shape, w, b, 2 * eps)),
        "layer_norm", {("activation", "out"), ("activation_grad", "in.0"), ("local_grad", "grad")},
    ),
    "tanh in the place of erf": (
        ("gelu", lambda x, approximate="none": gelu(x, approximate="tanh")),
        "gelu", {("activation", "out"), ("activation_grad", "in.0")},
    ),
    "a convolution whose backward is shifted": (
        ("conv2d", lambda x, w, b, *how: Shifted.apply(x, w, b, how[:2])),  # type: ignore[no-untyped-call]
        "conv2", {("activation_grad", "in.0")},
    ),
    "a weight's gradient that lacks a row": (
        ("linear", of_linear(Drops)), "linear", {("local_grad", "grad")},
    ),
    "a bias's gradient twice": (("linear", of_linear(Doubles)), "linear", {("local_grad", "grad")}),
    "a product in bfloat16": (
        ("linear", bfloat16_linear), "linear",
        {("activation", "out"), ("activation_grad", "in.0"), ("local_grad", "grad")},
    ),
    "an input's gradient in bfloat16": (
        ("linear", of_linear(Coarse)), "linear", {("activation_grad", "in.0")},
    ),
    "softmax over another dimension": (
        ("softmax", lambda x, dim, **_: softmax(x, -1)),
        "softmax", {("activation", "out"), ("activation_grad", "in.0")},
    ),
    "dropout in evaluation": (
        ("dropout", lambda x, p, *_: dropout(x, p, True)),
        "dropout_eval.inner", {("activation", "out"), ("activation_grad", "in.0")},
    ),
    "a gradient of the padding id": (
        ("embedding", lambda x, w, padding_idx=None, *_: embedding(x, w)),
        "embedding", {("local_grad", "grad")},
    ),
    "a look-up that overwrites": (
        ("embedding", lambda x, w, *_: Overwritten.apply(x, w)),  # type: ignore[no-untyped-call]
        "embedding", {("local_grad", "grad")},
    ),
    "a batch's variance by n - 1": (
        ("batch_norm", by_n_minus_one), "batch_norm",
        {("activation", "out"), ("local_grad", "grad")},  # which uses its input more than once
    ),
    "a norm's gradient of the last row alone": (
        ("rms_norm", lambda x, _, w, eps: LastPositions.apply(x, w, eps or 2.0**-23)),  # type: ignore[no-untyped-call]
        "rms_norm", {("local_grad", "grad")},
    ),
    "a term left out of a gate's gradient": (
        ("silu", lambda x, **_: Straight.apply(x)),  # type: ignore[no-untyped-call]
        "silu", {("activation_grad", "in.0")},
    ),
    "scores that are not scaled": (
        ("scaled_dot_product_attention", lambda *a, **k: attention(*a, **k | {"scale": 1.0})),
        "attention.inner",
        {("activation", "out.0"), ("activation_grad", "in.0"), ("activation_grad", "in.1"),
         ("activation_grad", "in.2"), ("local_grad", "grad")},
    ),
    "a mean that counts the padding": (
        ("avg_pool2d", lambda x, *a: avg_pool(x, *a[:4], True)),
        "avg_pool_inside", {("activation", "out"), ("activation_grad", "in.0")},
    ),
    "groups of other channels": (
        ("group_norm", lambda x, groups, *a: group_norm(x, 2 * groups, *a)), "group_norm",
        {("activation", "out"), ("activation_grad", "in.0"), ("local_grad", "grad")},
    ),
    "a slope of another module": (
        ("leaky_relu", lambda x, slope, *_: leaky(x, 0.01)),
        "leaky", {("activation", "out"), ("activation_grad", "in.0")},
    ),
}  # fmt: skip
"""By what is wrong: the function of torch that is replaced, the module it shows in, and where."""


TOGETHER = {
    "products": ["a weight's gradient that lacks a row", "a look-up that overwrites"],
    "biases": ["a bias's gradient twice"],
    "in bfloat16": ["a product in bfloat16"],
    "back in bfloat16": ["an input's gradient in bfloat16"],
    "attention": ["scores that are not scaled"],
}
_ELSEWHERE = {what for group in TOGETHER.values() for what in group}
TOGETHER["all others"] = [what for what in PLANTED if what not in _ELSEWHERE]
"""Mistakes that are planted in one run: each is in a function of its own."""


@pytest.mark.parametrize("group", TOGETHER)
def test_each_wrong_kernel_is_named_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    planted = [PLANTED[what] for what in TOGETHER[group]]
    for (function, wrong), _, _ in planted:
        monkeypatch.setattr(F, function, wrong)
    wrong_ones = {name: places for _, name, places in planted}
    names = ["tanh", *(name.removesuffix(".inner") for name in wrong_ones), "softsign"]
    result = replay(train(tmp_path / "a", names, microbatches=1, steps=1))
    assert result.verdict == "mismatch"
    found: dict[str, set[tuple[str, str]]] = {}
    for kind, where, slot in mismatches(result):
        module = next((name for name in wrong_ones if where in (name, *with_parameters(name))), where)
        found.setdefault(module, set()).add((kind, slot))
    assert found == wrong_ones
    first = result.first_mismatch
    assert first is not None
    assert (first.where.step, first.where.microbatch) == (0, 0)
    assert "by the formula of" in first.text


def with_parameters(name: str) -> list[str]:
    return [f"{name}.{parameter}" for parameter in PARAMETERS]


PARAMETERS = ("weight", "bias", "in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")


def test_a_norm_that_computes_in_bfloat16_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is within bfloat16's allowance: only that a kernel rounds once what it stores tells of it."""
    names = ["rms_norm_eps", "layer_norm"]
    monkeypatch.setattr(F, "rms_norm", without_upcast)
    result = replay(train(tmp_path / "a", ["rms_norm", "layer_norm"], dtype=torch.bfloat16, steps=1))
    assert ("activation", "rms_norm", "out") in mismatches(result)
    assert {name for _, name, _ in mismatches(result)} == {"rms_norm"}
    monkeypatch.undo()
    result = replay(train(tmp_path / "b", names, dtype=torch.bfloat16, steps=1))
    assert mismatches(result) == []


# --- what is not replayed, and said --------------------------------------------------------------------


class Own(nn.Linear):
    """A class of the program's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def halved(module: nn.Module, given: object, made: torch.Tensor) -> torch.Tensor:
    return made / 2


def hooked() -> nn.Module:
    module = nn.Linear(8, 8)
    module.register_forward_hook(halved)
    return module


def replaced() -> nn.Module:
    module = nn.Linear(8, 8)
    module.forward = torch.sin  # type: ignore[method-assign,assignment]
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Own(8, 8), "its class is not one of torch.nn's own"),
        (hooked, "hooks of the program may change what it is given, returns or passes back"),
        (replaced, "its forward was replaced"),
        (lambda: nn.PixelShuffle(1), "no formula of its class is known"),
        (lambda: nn.AvgPool1d(2, ceil_mode=True), "its last windows may reach beyond the end"),
    ],
    ids=["own class", "hooked", "replaced", "no formula", "setting"],
)
def test_what_has_no_formula_is_counted_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], reason: str
) -> None:
    monkeypatch.setitem(ZOO, "odd", (make, ZOO["linear"][1]))
    result = replay(train(tmp_path / "a", ["odd", "tanh"], steps=1))
    assert result.verdict == "agrees", result.headline
    assert reasons(result, "activation")[reason] >= 2  # its output in two microbatches
    assert {n.where.name for n in result.boundaries if n.where.kind == "activation"} == {"kinds.tanh"}


class Twice(nn.Module):
    """Uses a weight in a function beside its module, and adds what a norm was given to what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.one(self.norm(x))
        return x @ self.one.weight


def test_gradients_with_other_uses_are_no_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ZOO, "twice", (Twice, ZOO["linear"][1]))
    result = replay(train(tmp_path / "a", ["twice"], steps=1))
    assert result.verdict == "agrees", result.headline
    shared = "its tensor has other uses, or may have: what they bring is not known"
    assert reasons(result, "local_grad")[shared] == 2  # of one.weight, in two microbatches
    told = {(n.where.name, n.where.slot) for n in result.boundaries if n.where.kind == "activation_grad"}
    assert ("kinds.twice.norm", "in.0") in told  # what the residual path brings was recorded


# --- losses of functions, from their scores ---------------------------------------------------------------

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def classifier(path: Path, loss: Loss) -> Replay:
    """Return the replay of a model of sequences that a loss function trains."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws = torch.Generator().manual_seed(5)
    with tracer.record(path):
        for _ in range(2):
            rows = torch.randn(6, 3, 4, generator=draws)
            target = torch.randint(0, 5, (6, 3), generator=draws)
            target[0, 0] = -100
            loss(model(rows), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    return replay(path)


FUNCTIONS: dict[str, Loss] = {
    "mean": lambda x, y: F.cross_entropy(x.view(-1, 5), y.view(-1)),
    "smoothed": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.2),
    "sum": lambda x, y: F.cross_entropy(x.view(-1, 5), y.view(-1), reduction="sum") / 17,
    "each": lambda x, y: F.cross_entropy(x.view(-1, 5), y.view(-1), reduction="none").sum() / 17,
    "likelihoods": lambda x, y: F.nll_loss(x.log_softmax(-1).view(-1, 5), y.view(-1)),
    "turned": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "weighted": lambda x, y: F.cross_entropy(x.view(-1, 5), y.view(-1), weight=torch.ones(5)),
}


@pytest.mark.parametrize("how", FUNCTIONS)
def test_a_loss_of_recorded_scores_agrees(tmp_path: Path, how: str) -> None:
    result = classifier(tmp_path / "a", FUNCTIONS[how])
    assert result.verdict == "agrees", result.headline
    known = how not in ("likelihoods", "turned", "weighted")  # whose scores lie otherwise, or are no result
    slot = "value" if how == "each" else "sum"
    told = [n.where.slot for n in result.boundaries if n.where.name in ("cross_entropy", "nll_loss")]
    assert told.count(slot) == (2 if known else 0)


def test_a_loss_that_leaves_its_smoothing_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = F.cross_entropy

    def wrong(
        input: torch.Tensor, target: torch.Tensor, reduction: str = "mean", ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:  # fmt: skip
        return plain(input, target, reduction=reduction, ignore_index=ignore_index)

    monkeypatch.setattr(F, "cross_entropy", wrong)
    result = classifier(tmp_path / "a", FUNCTIONS["smoothed"])
    found = {(f.where.step, f.where.kind, f.where.name, f.where.slot) for f in result.mismatches}
    assert found == {(0, "loss", "cross_entropy", "sum"), (1, "loss", "cross_entropy", "sum")}


# --- which value of a parameter a call computed with -------------------------------------------------------

UNCERTAIN = "what its parameters or buffers were at its call is not certain: they may have been written"


def told_of(result: Replay, name: str) -> list[int]:
    """Return the steps in which what a module returned was replayed."""
    found = (n.where for n in result.boundaries if n.where.kind == "activation")
    return [where.step for where in found if where.name == name]


def of_two_optimizers(path: Path) -> Replay:
    """Return the replay of a generator and a critic in turn: G's output is made a window before G's step."""
    torch.manual_seed(3)
    made, judge = nn.Linear(4, 6), nn.Linear(6, 1)
    of_made = torch.optim.Adam(made.parameters(), 1e-2)
    of_judge = torch.optim.Adam(judge.parameters(), 1e-2)
    ones = torch.ones(5, 1)
    with tracer.record(path):
        for _ in range(4):
            fake = made(torch.randn(5, 4))
            of_judge.zero_grad()
            F.binary_cross_entropy_with_logits(judge(fake.detach()), 1 - ones).backward()
            of_judge.step()
            of_made.zero_grad()
            F.binary_cross_entropy_with_logits(judge(fake), ones).backward()
            of_made.step()
    return replay(path)


def test_a_call_two_windows_after_a_value_was_found_has_the_update_since(tmp_path: Path) -> None:
    """At step 1 G's values are found, which were not known before; they are updated before G is called."""
    result = of_two_optimizers(tmp_path / "a")
    assert mismatches(result) == []
    generator = {n.where.step for n in result.boundaries if n.where.name == "Linear"}
    assert generator >= {
        2,
        4,
        6,
    }  # of the first window nothing tells what G was; it is called every other one


def averaged(path: Path) -> Replay:
    """Return the replay of a run whose average is updated, and evaluated, after each step."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    rows = torch.randn(5, 4)
    with tracer.record(path):
        for _ in range(4):
            optimizer.zero_grad()
            F.mse_loss(model(rows), torch.ones(5, 6)).backward()
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                F.mse_loss(average(rows), torch.ones(5, 6))
                model(rows)
    return replay(path)


def test_an_average_that_may_have_moved_before_its_call_is_not_replayed(tmp_path: Path) -> None:
    result = averaged(tmp_path / "a")
    assert mismatches(result) == []
    assert told_of(result, "AveragedModel.module.0") == []
    assert reasons(result, "activation")[UNCERTAIN] >= 2
    assert len(told_of(result, "0")) == 8  # the model itself: before each of the four updates, and after


def test_a_wrong_product_of_an_evaluated_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: x @ w.T * 1.02 + b)
    result = averaged(tmp_path / "a")
    assert ("activation", "0", "out") in mismatches(result)


# --- packed ------------------------------------------------------------------------------------------------


def test_a_packed_trace_replays_as_many_boundaries(tmp_path: Path) -> None:
    path = train(tmp_path / "a", ["linear", "tanh"], steps=1)
    pack([path], tmp_path / "a.zip")
    again = replay_case(tmp_path / "a.zip").outcome
    assert isinstance(again, Replay)
    assert again.replayed == replay(path).replayed
    assert again.replayed["activation"] == 4  # of two modules in two microbatches


def test_a_wrong_kernel_is_still_named_when_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "gelu", lambda x, approximate="none": gelu(x, approximate="tanh"))
    path = train(tmp_path / "a", ["linear", "gelu"], steps=1)
    monkeypatch.undo()
    pack([path], tmp_path / "a.zip")
    again = replay_case(tmp_path / "a.zip").outcome
    assert isinstance(again, Replay)
    assert mismatches(again)[:1] == [("activation", "gelu", "out")]
