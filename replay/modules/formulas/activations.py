"""Functions of single elements, gates, and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from tensortrace.replay.modules.given import Form, Given, NoFormula

ZERO = torch.zeros((), dtype=torch.float64)


def _of(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Given], torch.Tensor]:
    return lambda given: function(given.x)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def _log1p_exp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 + exp(x)) without overflow."""
    return torch.maximum(x, ZERO) + torch.log1p(torch.exp(-x.abs()))


def _relu(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, ZERO)


def _clipped(x: torch.Tensor, least: float, most: float) -> torch.Tensor:
    return torch.where(x <= least, ZERO + least, torch.where(x >= most, ZERO + most, x))


def _gelu(given: Given) -> torch.Tensor:
    x, form = given.x, given.settings.get("approximate")
    if form == "none":
        return torch.mul(x * 0.5, torch.special.erfc(-x / math.sqrt(2)))
    if form != "tanh":
        raise NoFormula(f"its setting approximate is {form!r}")
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _leaky(given: Given) -> torch.Tensor:
    return torch.where(given.x > 0, given.x, given.x * given.settings.number("negative_slope"))


def _elu(given: Given) -> torch.Tensor:
    x, alpha = given.x, given.settings.number("alpha")
    return torch.where(x > 0, x, alpha * torch.expm1(torch.minimum(x, ZERO)))


def _celu(given: Given) -> torch.Tensor:
    x, alpha = given.x, given.settings.number("alpha")
    return torch.where(x > 0, x, alpha * torch.expm1(torch.minimum(x, ZERO) / alpha))


def _selu(x: torch.Tensor) -> torch.Tensor:
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return scale * torch.where(x > 0, x, alpha * torch.expm1(torch.minimum(x, ZERO)))


def _softplus(given: Given) -> torch.Tensor:
    beta, threshold = given.settings.number("beta"), given.settings.number("threshold")
    scaled = given.x * beta
    return torch.where(scaled > threshold, given.x, _log1p_exp(scaled) / beta)


def _hardtanh(given: Given) -> torch.Tensor:
    return _clipped(given.x, given.settings.number("min_val"), given.settings.number("max_val"))


def _hardsigmoid(x: torch.Tensor) -> torch.Tensor:
    return _clipped(x + 3, 0.0, 6.0) / 6


def _prelu(given: Given) -> torch.Tensor:
    x, slope = given.x, given.parameter("weight")
    if slope.numel() > 1:
        slope = slope.reshape(-1, *[1] * (x.dim() - 2))
    return torch.where(x > 0, x, x * slope)


def _threshold(given: Given) -> torch.Tensor:
    limit, value = given.settings.number("threshold"), given.settings.number("value")
    return torch.where(given.x > limit, given.x, ZERO + value)


def _hardshrink(given: Given) -> torch.Tensor:
    return torch.where(given.x.abs() > given.settings.number("lambd"), given.x, ZERO)


def _softshrink(given: Given) -> torch.Tensor:
    x, limit = given.x, given.settings.number("lambd")
    return torch.where(x.abs() > limit, x - torch.sign(x) * limit, ZERO)


def _glu(given: Given) -> torch.Tensor:
    left, right = given.x.chunk(2, given.settings.whole("dim"))
    return left * _sigmoid(right)


def _dim(given: Given) -> int:
    dim = given.settings.get("dim")
    if type(dim) is int:
        return dim
    return 0 if given.x.dim() in (0, 1, 3) else 1  # what torch takes where none is given


def _log_softmax(given: Given) -> torch.Tensor:
    dim = _dim(given)
    shifted = given.x - given.x.amax(dim, keepdim=True).detach()
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _softmax(given: Given) -> torch.Tensor:
    return _log_softmax(given).exp()


def _softmin(given: Given) -> torch.Tensor:
    dim = _dim(given)
    weights = (given.x.amin(dim, keepdim=True).detach() - given.x).exp()
    return weights / weights.sum(dim, keepdim=True)


def _row(given: Given) -> int:
    return given.x.shape[_dim(given)] if given.x.dim() else 1


ACTIVATIONS = {
    "ReLU": Form(_of(_relu), stores=1, kinked=True),
    "ReLU6": Form(_of(lambda x: _clipped(x, 0.0, 6.0)), stores=1, kinked=True),
    "LeakyReLU": Form(_leaky, stores=1, kinked=True),
    "PReLU": Form(_prelu, kinked=True),
    "ELU": Form(_elu, stores=1, kinked=True),
    "CELU": Form(_celu, stores=1, kinked=True),
    "SELU": Form(_of(_selu), stores=1, kinked=True),
    "GELU": Form(_gelu, stores=1),
    "SiLU": Form(_of(lambda x: x * _sigmoid(x)), stores=1),
    "Mish": Form(_of(lambda x: x * torch.tanh(_log1p_exp(x))), stores=1),
    "Tanh": Form(_of(torch.tanh), stores=1),
    "Sigmoid": Form(_of(_sigmoid), stores=1),
    "LogSigmoid": Form(_of(lambda x: -_log1p_exp(-x))),
    "Softplus": Form(_softplus, stores=1),
    "Softsign": Form(_of(lambda x: x / (1 + x.abs()))),
    "Tanhshrink": Form(_of(lambda x: x - torch.tanh(x))),
    "Hardtanh": Form(_hardtanh, stores=1, kinked=True),
    "Hardsigmoid": Form(_of(_hardsigmoid), stores=1, kinked=True),
    "Hardswish": Form(_of(lambda x: x * _hardsigmoid(x)), stores=1, kinked=True),
    "Threshold": Form(_threshold, stores=1, kinked=True),
    "Hardshrink": Form(_hardshrink, stores=1, kinked=True),
    "Softshrink": Form(_softshrink, kinked=True),
    "GLU": Form(_glu),
    "Softmax": Form(_softmax, _row, _row),
    "LogSoftmax": Form(_log_softmax, _row, _row),
    "Softmin": Form(_softmin, _row, _row),
}
