"""Normalisations: over the last dimensions, over groups of channels, over the batch."""

from __future__ import annotations

import math

import torch

from tensortrace.diff.compare import EPS
from tensortrace.replay.modules.given import Form, Given, NoFormula


def _over_last(given: Given) -> tuple[int, ...]:
    shape = given.settings.get("normalized_shape")
    if not isinstance(shape, tuple) or not shape:
        raise NoFormula(f"its setting normalized_shape is {shape!r}")
    return tuple(range(-len(shape), 0))


def _standardised(x: torch.Tensor, dims: tuple[int, ...], eps: float) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps), with the variance of the values at hand (by n)."""
    centred = x - x.mean(dims, keepdim=True)
    return centred / (centred.square().mean(dims, keepdim=True) + eps).sqrt()


def _scaled(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _layer_norm(given: Given) -> torch.Tensor:
    made = _standardised(given.x, _over_last(given), given.settings.number("eps"))
    return _scaled(made, given.maybe("weight"), given.maybe("bias"))


def _least(given: Given) -> float:
    """Return torch's own epsilon: that of the format in which it computes, before 2.7 that of the input."""
    own = EPS[given.dtype]
    return own if given.version and given.version < (2, 7) else min(own, EPS["float32"])


def _rms_norm(given: Given) -> torch.Tensor:
    dims, eps = _over_last(given), given.settings.get("eps")
    least = _least(given) if eps is None else given.settings.number("eps")
    made = given.x / (given.x.square().mean(dims, keepdim=True) + least).sqrt()
    return _scaled(made, given.maybe("weight"), None)


def _by_channel(values: torch.Tensor | None, dims: int) -> torch.Tensor | None:
    """Return numbers of channels as they meet a tensor of so many dimensions."""
    return None if values is None else values.reshape(-1, *[1] * (dims - 2))


def _in_groups(given: Given, groups: int) -> torch.Tensor:
    x = given.x
    rows = x.reshape(x.shape[0], groups, -1)
    made = _standardised(rows, (-1,), given.settings.number("eps")).reshape(x.shape)
    weight, bias = (_by_channel(given.maybe(name), x.dim()) for name in ("weight", "bias"))
    return _scaled(made, weight, bias)


def _group_norm(given: Given) -> torch.Tensor:
    return _in_groups(given, given.settings.whole("num_groups"))


def _instance_norm(given: Given) -> torch.Tensor:
    if given.settings.flag("track_running_stats"):
        raise NoFormula("it keeps running statistics of instances")
    if given.x.dim() < 3:
        raise NoFormula("it was given no batch")
    return _in_groups(given, given.x.shape[1])


def _batch_norm(given: Given) -> torch.Tensor:
    x, settings = given.x, given.settings
    if given.training or given.maybe("running_mean") is None:
        if not given.training and settings.flag("track_running_stats"):
            raise NoFormula("its running statistics were not recorded")
        dims = (0, *range(2, x.dim()))
        made = _standardised(x, dims, settings.number("eps"))
    else:
        mean, variance = (
            _by_channel(given.parameter(name), x.dim()) for name in ("running_mean", "running_var")
        )
        assert mean is not None
        assert variance is not None
        made = (x - mean) / (variance + settings.number("eps")).sqrt()
    weight, bias = (_by_channel(given.maybe(name), x.dim()) for name in ("weight", "bias"))
    return _scaled(made, weight, bias)


def _row(given: Given) -> int:
    return math.prod(given.x.shape[dim] for dim in _over_last(given))


def _group(given: Given) -> int:
    return given.x[0].numel() // given.settings.whole("num_groups")


def _channel(given: Given) -> int:
    return given.x.numel() // max(given.x.shape[1], 1)


def _instance(given: Given) -> int:
    return math.prod(given.x.shape[2:])


NORMS = {
    "LayerNorm": Form(_layer_norm, _row, _row, stores=1),
    "RMSNorm": Form(_rms_norm, _row, _row, stores=2),
    "GroupNorm": Form(_group_norm, _group, _group, stores=1),
    **{f"InstanceNorm{n}d": Form(_instance_norm, _instance, _instance) for n in (1, 2, 3)},
    **{f"BatchNorm{n}d": Form(_batch_norm, _channel, _channel) for n in (1, 2, 3)},
}
