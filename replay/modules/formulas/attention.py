"""Multi-head attention, as its module computes it: projections, softmax of scaled products, projection."""

from __future__ import annotations

import math

import torch

from tensortrace.replay.modules.given import Form, Given, NoFormula


def _projected(given: Given, x: torch.Tensor, number: int) -> torch.Tensor:
    """Return queries (0), keys (1) or values (2)."""
    if "in_proj_weight" in given.own:
        weight = given.parameter("in_proj_weight").chunk(3)[number]
    else:
        weight = given.parameter(f"{'qkv'[number]}_proj_weight")
    bias = given.maybe("in_proj_bias")
    made = x @ weight.T
    return made if bias is None else made + bias.chunk(3)[number]


def _added(mask: torch.Tensor) -> torch.Tensor:
    """Return what a mask adds to scores: nothing or minus infinity, or itself."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)
    return mask.to(torch.float64)


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


def _attention(given: Given) -> torch.Tensor:
    settings = given.settings
    if given.training and settings.number("dropout"):
        raise NoFormula("it draws numbers")
    if "bias_k" in given.own or settings.flag("add_zero_attn"):
        raise NoFormula("it adds keys of its own")
    query, key, value = given.x, given.of(1, "key"), given.of(2, "value")
    if key is None or value is None or query.dim() != 3:
        raise NoFormula("it was not given three batches")
    batch_first = settings.flag("batch_first")
    q, k, v = (x if batch_first else x.transpose(0, 1) for x in (query, key, value))
    heads = settings.whole("num_heads")
    q, k, v = (_by_head(_projected(given, x, n), heads) for n, x in enumerate((q, k, v)))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    padding, mask = given.of(3, "key_padding_mask"), given.of(5, "attn_mask")
    if padding is not None:
        scores = scores + _added(padding)[:, None, None, :]
    if mask is not None:
        added = _added(mask)
        scores = scores + (added if added.dim() == 2 else added.reshape(-1, heads, *added.shape[1:]))
    if bool(torch.isneginf(scores).all(-1).any()):
        raise NoFormula("a query sees no key at all")
    weights = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    made: torch.Tensor = (weights / weights.sum(-1, keepdim=True)) @ v
    made = made.transpose(1, 2).flatten(-2) @ given.parameter("out_proj.weight").T
    bias = given.maybe("out_proj.bias")
    made = made if bias is None else made + bias
    return made if batch_first else made.transpose(0, 1)


def _longest(given: Given) -> int:
    return int(max(*given.x.shape, 3 * given.x.shape[-1]))


ATTENTION = {
    "MultiheadAttention": Form(
        _attention, _longest, _longest, needs=("out_proj.weight", "out_proj.bias"), only=frozenset({"out.0"})
    ),
}
