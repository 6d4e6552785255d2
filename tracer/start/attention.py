"""``--eager-attention``: attention with dropout, computed step by step so that its mask can be set."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tensortrace.tracer.start.dropout import Dropout
from tensortrace.tracer.start.refusal import refuse


def replacement(dropout: Dropout, *, eager: bool) -> Callable[..., torch.Tensor]:
    """Return what stands in for fused attention: refuses to drop in a kernel unless ``eager``."""
    original = F.scaled_dot_product_attention

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p == 0 or not dropout.active():
            options = {"enable_gqa": True} if enable_gqa else {}
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)
        if not eager:
            refuse(
                f"{dropout.name()}: fused attention draws dropout inside its kernel: add --eager-attention, "
                "which computes it step by step"
            )
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        weights = _weights(query, key, attn_mask, is_causal=is_causal, scale=scale)
        stays = dropout.mask(weights, dropout_p, features=False, merged=False)
        return weights * (stays.to(weights.dtype) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)) @ value

    return scaled_dot_product_attention


def _weights(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
) -> torch.Tensor:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1)
