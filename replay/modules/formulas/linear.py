"""Products with a weight, look-ups in one, and what only passes on or arranges."""

from __future__ import annotations

import math

import torch

from tensortrace.replay.modules.given import Form, Given, NoFormula


def _linear(given: Given) -> torch.Tensor:
    bias, product = given.maybe("bias"), given.x @ given.parameter("weight").T
    return product if bias is None else product + bias


def _bilinear(given: Given) -> torch.Tensor:
    other, bias = given.of(1, "input2"), given.maybe("bias")
    if other is None:
        raise NoFormula("it was not given two tensors")
    product = torch.einsum("...i,oij,...j->...o", given.x, given.parameter("weight"), other)
    return product if bias is None else product + bias


def _looked_up(given: Given) -> torch.Tensor:
    """Return the rows of ids; the row of the padding id gets no gradient."""
    settings = given.settings
    if settings.get("max_norm") is not None:
        raise NoFormula("it changes its weight (max_norm)")
    if settings.flag("scale_grad_by_freq"):
        raise NoFormula("its gradients are scaled by how often ids occur")
    ids, weight, padding = given.x, given.parameter("weight"), settings.get("padding_idx")
    rows = weight[ids]
    if padding is None:
        return rows
    if type(padding) is not int:
        raise NoFormula(f"its setting padding_idx is {padding!r}")
    is_padding = (ids == padding % len(weight))[..., None]
    return torch.where(is_padding, rows.detach(), rows)


def _bag(given: Given) -> torch.Tensor:
    """Return one row for each row of ids, or for the ids from each offset on."""
    settings, ids = given.settings, given.x
    if settings.get("max_norm") is not None or settings.flag("scale_grad_by_freq"):
        raise NoFormula("it changes its weight or scales its gradients")
    if settings.flag("include_last_offset"):
        raise NoFormula("its offsets have an end of their own")
    mode, weights, offsets = settings.get("mode"), given.of(2, "per_sample_weights"), given.of(1, "offsets")
    bags, padding = len(ids), settings.get("padding_idx")
    if ids.dim() == 2:
        of_bag = torch.arange(bags).repeat_interleave(ids.shape[1])
    elif offsets is not None:
        bags = len(offsets)
        of_bag = torch.searchsorted(offsets, torch.arange(len(ids)), right=True) - 1
    else:
        raise NoFormula("it was given no offsets")
    table = given.parameter("weight")
    rows, flat = table[ids.reshape(-1)], ids.reshape(-1)
    counted = torch.ones(len(rows), dtype=torch.bool)
    if type(padding) is int:
        counted = torch.ne(flat, padding % len(table))
    rows = torch.where(counted[:, None], rows, torch.zeros((), dtype=rows.dtype))
    if weights is not None:
        rows = rows * weights.reshape(-1, 1)
    if mode not in ("sum", "mean"):
        raise NoFormula(f"bags by {mode}")
    total = torch.zeros(bags, rows.shape[1], dtype=rows.dtype).index_add(0, of_bag, rows)
    if mode == "sum":
        return total
    counts = torch.zeros(bags, dtype=rows.dtype).index_add(0, of_bag, counted.to(rows.dtype))
    return total / counts.clamp(min=1)[:, None]


def _same(given: Given) -> torch.Tensor:
    return given.x


def _flat(given: Given) -> torch.Tensor:
    return given.x.flatten(given.settings.whole("start_dim"), given.settings.whole("end_dim"))


def _dropped(given: Given) -> torch.Tensor:
    """Return the input, or where some is dropped scaled but for what came out as 0 and was not before."""
    p = given.settings.number("p")
    if not given.training or p == 0:
        return given.x
    if given.out is None or p >= 1:
        return given.x * 0
    return torch.where((given.out == 0) & (given.x != 0), torch.zeros_like(given.x), given.x / (1 - p))


def _kept(given: Given) -> torch.Tensor:
    if given.training and given.settings.number("p"):
        raise NoFormula("it draws numbers")
    return given.x


def _width(given: Given) -> int:
    return int(given.parameter("weight").shape[-1])


def _outputs(given: Given) -> int:
    return int(given.parameter("weight").shape[0])


def _longest_bag(given: Given) -> int:
    return max(given.x.shape[-1], 1)


def _of_bilinear(given: Given) -> int:
    return math.prod(given.parameter("weight").shape[1:])


LINEAR = {
    "Linear": Form(_linear, _width, _outputs),
    "Bilinear": Form(_bilinear, _of_bilinear, _of_bilinear),
    "Embedding": Form(_looked_up, stores=1),
    "EmbeddingBag": Form(_bag, _longest_bag),
    "Identity": Form(_same, stores=1),
    "Flatten": Form(_flat, stores=1),
    "Dropout": Form(_dropped, stores=2, random=True),
    "Dropout1d": Form(_dropped, stores=2, random=True),
    "Dropout2d": Form(_dropped, stores=2, random=True),
    "Dropout3d": Form(_dropped, stores=2, random=True),
    "AlphaDropout": Form(_kept, stores=1),
    "FeatureAlphaDropout": Form(_kept, stores=1),
}
