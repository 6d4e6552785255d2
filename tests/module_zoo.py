"""A model of one module of each kind that has a formula, with odd settings, recorded in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensortrace import tracer

Make = Callable[[], nn.Module]
Inputs = Callable[[torch.Generator], tuple[torch.Tensor, ...]]


def numbers(*shape: int, shift: float = 0.0) -> Inputs:
    return lambda g: (torch.randn(shape, generator=g) + shift,)


def ids(*shape: int, most: int = 11) -> Inputs:
    return lambda g: (torch.randint(0, most, shape, generator=g),)


def with_target(scores: tuple[int, ...], target: Callable[[torch.Generator], torch.Tensor]) -> Inputs:
    return lambda g: (torch.randn(scores, generator=g), target(g))


def classes(*shape: int, most: int = 7) -> Callable[[torch.Generator], torch.Tensor]:
    def draw(g: torch.Generator) -> torch.Tensor:
        found = torch.randint(0, most, shape, generator=g)
        found.view(-1)[0] = -100
        return found

    return draw


def shares(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda g: torch.rand(shape, generator=g)


def probabilities(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.rand((4, 6), generator=g) * 0.98 + 0.01, torch.rand((4, 6), generator=g)


def with_weights(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    return torch.randint(0, 11, (4, 5), generator=g), torch.rand((4, 5), generator=g)


ROWS, IMAGES, LINES, SOLIDS = (6, 5, 8), (3, 4, 9, 10), (3, 4, 17), (2, 4, 5, 6, 7)

ZOO: dict[str, tuple[Make, Inputs]] = {
    "linear": (lambda: nn.Linear(8, 12), numbers(*ROWS)),
    "linear_plain": (lambda: nn.Linear(8, 12, bias=False), numbers(6, 8)),
    "identity": (nn.Identity, numbers(*ROWS)),
    "flatten": (lambda: nn.Flatten(1, -1), numbers(*ROWS)),
    "bilinear": (lambda: nn.Bilinear(8, 6, 5), with_target((6, 8), shares(6, 6))),
    "embedding": (lambda: nn.Embedding(11, 8, padding_idx=3), ids(6, 5)),
    "embedding_last": (lambda: nn.Embedding(11, 8, padding_idx=-1), ids(6, 5)),
    "bag_mean": (lambda: nn.EmbeddingBag(11, 8, padding_idx=2), ids(4, 5)),
    "bag_sum": (lambda: nn.EmbeddingBag(11, 8, mode="sum"), ids(4, 5)),
    "layer_norm": (lambda: nn.LayerNorm(8, eps=1e-3), numbers(*ROWS, shift=1.0)),
    "layer_norm_two": (lambda: nn.LayerNorm((5, 8), elementwise_affine=False), numbers(*ROWS)),
    "layer_norm_bare": (lambda: nn.LayerNorm(8, bias=False), numbers(*ROWS)),
    "rms_norm": (lambda: nn.RMSNorm(8), numbers(*ROWS)),
    "rms_norm_eps": (lambda: nn.RMSNorm((5, 8), eps=1e-2), numbers(*ROWS)),
    "group_norm": (lambda: nn.GroupNorm(2, 4, eps=1e-3), numbers(*IMAGES)),
    "instance_norm": (lambda: nn.InstanceNorm2d(4, affine=True), numbers(*IMAGES)),
    "batch_norm": (lambda: nn.BatchNorm2d(4, momentum=0.3, eps=1e-3), numbers(*IMAGES, shift=0.5)),
    "batch_norm_rows": (lambda: nn.BatchNorm1d(8), numbers(12, 8)),
    "batch_norm_eval": (lambda: Still(nn.BatchNorm1d(4)), numbers(*LINES)),
    "batch_norm_free": (lambda: nn.BatchNorm1d(4, track_running_stats=False), numbers(*LINES)),
    "conv1": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2), numbers(*LINES)),
    "conv2": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0)), numbers(*IMAGES)),
    "conv2_same": (lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4, bias=False), numbers(*IMAGES)),
    "conv2_mode": (
        lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="circular"), numbers(*IMAGES)
    ),
    "conv2_reflect": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), numbers(*IMAGES)
    ),
    "conv2_edge": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"), numbers(*IMAGES)),
    "conv3": (lambda: nn.Conv3d(4, 4, 2, padding=1, dilation=2), numbers(*SOLIDS)),
    "turned1": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), numbers(*LINES)),
    "turned2": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=2, dilation=2, groups=2), numbers(*IMAGES)
    ),
    "turned3": (lambda: nn.ConvTranspose3d(4, 2, 2, padding=1), numbers(*SOLIDS)),
    "max_pool": (lambda: nn.MaxPool2d(3, stride=2, padding=1), numbers(*IMAGES)),
    "max_pool_line": (lambda: nn.MaxPool1d(2, dilation=2), numbers(*LINES)),
    "avg_pool": (lambda: nn.AvgPool2d(3, stride=2, padding=1), numbers(*IMAGES)),
    "avg_pool_inside": (lambda: nn.AvgPool2d((3, 2), 2, (1, 0), count_include_pad=False), numbers(*IMAGES)),
    "avg_pool_divisor": (lambda: nn.AvgPool3d(2, divisor_override=5), numbers(*SOLIDS)),
    "adaptive": (lambda: nn.AdaptiveAvgPool2d((4, 3)), numbers(*IMAGES)),
    "adaptive_one": (lambda: nn.AdaptiveAvgPool1d(1), numbers(*LINES)),
    "relu": (nn.ReLU, numbers(*ROWS)),
    "relu_in_place": (lambda: nn.ReLU(inplace=True), numbers(*ROWS)),
    "relu6": (nn.ReLU6, numbers(*ROWS, shift=4.0)),
    "leaky": (lambda: nn.LeakyReLU(0.2), numbers(*ROWS)),
    "prelu": (lambda: nn.PReLU(4, init=0.1), numbers(*LINES)),
    "elu": (lambda: nn.ELU(0.7), numbers(*ROWS)),
    "celu": (lambda: nn.CELU(0.7), numbers(*ROWS)),
    "selu": (nn.SELU, numbers(*ROWS)),
    "gelu": (nn.GELU, numbers(*ROWS)),
    "gelu_tanh": (lambda: nn.GELU("tanh"), numbers(*ROWS)),
    "silu": (nn.SiLU, numbers(*ROWS)),
    "mish": (nn.Mish, numbers(*ROWS)),
    "tanh": (nn.Tanh, numbers(*ROWS)),
    "sigmoid": (nn.Sigmoid, numbers(*ROWS)),
    "log_sigmoid": (nn.LogSigmoid, numbers(*ROWS)),
    "softplus": (lambda: nn.Softplus(2.0, 3.0), numbers(*ROWS)),
    "softsign": (nn.Softsign, numbers(*ROWS)),
    "tanhshrink": (nn.Tanhshrink, numbers(*ROWS)),
    "hardtanh": (lambda: nn.Hardtanh(-0.5, 0.8), numbers(*ROWS)),
    "hardsigmoid": (nn.Hardsigmoid, numbers(*ROWS)),
    "hardswish": (nn.Hardswish, numbers(*ROWS)),
    "threshold": (lambda: nn.Threshold(0.1, 20.0), numbers(*ROWS)),
    "hardshrink": (nn.Hardshrink, numbers(*ROWS)),
    "softshrink": (nn.Softshrink, numbers(*ROWS)),
    "glu": (lambda: nn.GLU(1), numbers(4, 6, 3)),
    "softmax": (lambda: nn.Softmax(dim=1), numbers(*ROWS)),
    "log_softmax": (lambda: nn.LogSoftmax(dim=-1), numbers(*ROWS)),
    "softmin": (lambda: nn.Softmin(dim=0), numbers(*ROWS)),
    "dropout": (lambda: nn.Dropout(0.3), numbers(*ROWS)),
    "dropout2": (lambda: nn.Dropout2d(0.3), numbers(*IMAGES)),
    "dropout_eval": (lambda: Still(nn.Dropout(0.3)), numbers(*ROWS)),
    "attention": (lambda: Attending(nn.MultiheadAttention(8, 2, batch_first=True)), numbers(3, 5, 8)),
    "attention_masked": (lambda: Attending(nn.MultiheadAttention(8, 4), causal=True), numbers(5, 3, 8)),
    "attention_across": (
        lambda: Attending(nn.MultiheadAttention(8, 2, kdim=6, vdim=4, bias=False, batch_first=True)),
        lambda g: tuple(torch.randn(3, n, w, generator=g) for n, w in ((5, 8), (4, 6), (4, 4))),
    ),
    "cross_entropy": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), with_target((6, 7), classes(6))),
    "cross_entropy_weighted": (
        lambda: nn.CrossEntropyLoss(torch.linspace(0.5, 2, 7), label_smoothing=0.2),
        with_target((3, 7, 4), classes(3, 4)),
    ),
    "cross_entropy_sum": (
        lambda: nn.CrossEntropyLoss(reduction="sum", ignore_index=2),
        with_target((6, 7), lambda g: ids(6, most=7)(g)[0]),
    ),
    "cross_entropy_shares": (lambda: nn.CrossEntropyLoss(), with_target((6, 7), shares(6, 7))),
    "nll": (lambda: nn.NLLLoss(torch.linspace(0.5, 2, 7)), with_target((6, 7), classes(6))),
    "mse": (nn.MSELoss, with_target((6, 7), shares(6, 7))),
    "l1": (lambda: nn.L1Loss(reduction="sum"), with_target((6, 7), shares(6, 7))),
    "smooth_l1": (lambda: nn.SmoothL1Loss(beta=0.5), with_target((6, 7), shares(6, 7))),
    "huber": (lambda: nn.HuberLoss(delta=0.7, reduction="none"), with_target((6, 7), shares(6, 7))),
    "bce": (nn.BCELoss, probabilities),
    "bce_logits": (
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.linspace(0.5, 2, 7)), with_target((6, 7), shares(6, 7))
    ),
    "kl": (lambda: nn.KLDivLoss(reduction="batchmean"), with_target((6, 7), shares(6, 7))),
    "kl_logs": (lambda: nn.KLDivLoss(reduction="sum", log_target=True), with_target((6, 7), shares(6, 7))),
}  # fmt: skip
"""By name: how to make the module, and what it is given."""


class Still(nn.Module):
    """Holds a module that stays in evaluation mode while the model trains."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.eval()

    def train(self, mode: bool = True) -> Still:
        super().train(mode)
        self.inner.eval()
        return self

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class Attending(nn.Module):
    """Attends to itself, or to others where it is given them."""

    def __init__(self, inner: nn.MultiheadAttention, *, causal: bool = False) -> None:
        super().__init__()
        self.inner, self.causal = inner, causal

    def forward(
        self, x: torch.Tensor, key: torch.Tensor | None = None, value: torch.Tensor | None = None
    ) -> Any:
        mask = None
        if self.causal:
            length = x.shape[0]
            mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        key, value = x if key is None else key, x if value is None else value
        return self.inner(x, key, value, attn_mask=mask, need_weights=False)[0]


class Zoo(nn.Module):
    """Gives each module what it takes, times 1, which wants a gradient, so that those of inputs come back."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict({name: ZOO[name][0]() for name in names})
        self.factor = nn.Parameter(torch.ones(()))
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, given: dict[str, tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        found = []
        for name, module in self.kinds.items():
            first, *others = given[name]
            if first.is_floating_point():
                first = first * self.factor.to(first.dtype)
            found.append(module(first, *others))
        return found


def train(
    path: Path, names: Iterable[str] | None = None, *, dtype: torch.dtype = torch.float32,
    autocast: bool = False, microbatches: int = 2, steps: int = 2,
) -> Path:  # fmt: skip
    """Record a zoo that trains, in parameters of a format or under autocast to bfloat16; return the trace."""
    names = list(ZOO if names is None else names)
    torch.manual_seed(3)
    draws = torch.Generator().manual_seed(5)
    model = Zoo(names).to(dtype)
    trained = [parameter for parameter in model.parameters() if parameter is not model.factor]
    optimizer = torch.optim.SGD(trained or [nn.Parameter(torch.zeros(1))], lr=1e-2)
    with tracer.record(path):
        for _ in range(steps):
            for _ in range(microbatches):
                given = {name: tuple(_as(x, dtype) for x in ZOO[name][1](draws)) for name in names}
                context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
                with context:
                    found = model(given)
                total = torch.zeros(())
                for value in found:
                    weights = torch.randn(value.shape, generator=draws)
                    total = total + (value.float() * weights).sum()
                total.backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def _as(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value
