"""Records the loss functions of ``torch.nn.functional``: local sum, valid count and token weight."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.hooks.source import user_line
from tensortrace.tracer.placements import Spec, split
from tensortrace.tracer.types import OF_RECORDED, SCORES, WEIGHTED, Kind, Meta, Placement

CLASSIFYING = ("cross_entropy", "nll_loss")
"""Losses with class targets, an ignored index and class weights; all others average over elements."""

OTHERS = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)

ROW_LOSSES = frozenset(
    {
        "cosine_embedding_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
        "triplet_margin_loss",
        "triplet_margin_with_distance_loss",
    }
)
"""Losses with one term per row: they reduce over the class or feature dimension themselves."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a loss function was given, as far as its accounting needs it; targets and weights are local."""

    scores: torch.Tensor | None
    target: torch.Tensor | None
    target_spec: Spec | None
    class_weight: torch.Tensor | None
    smoothing: float
    ignore_index: int | None
    reduction: str
    weighted: bool


@dataclass(frozen=True, slots=True)
class Account:
    """``count`` valid tokens or elements; mean = sum / ``denominator``."""

    count: torch.Tensor
    denominator: float


class _Local(threading.local):
    def __init__(self) -> None:
        self.depth = 0


def install(session: Session) -> None:
    """Wrap every loss function; those that call another count once, for the outermost."""
    local = _Local()
    for name in (*CLASSIFYING, *OTHERS):
        original = getattr(F, name, None)
        if original is not None:
            session.patches.function(original, _wrapped(session, local, name, original))


def _wrapped(session: Session, local: _Local, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def loss(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or local.depth:
            return original(*args, **kwargs)
        local.depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            local.depth -= 1
        _record(session, name, signature, args, kwargs, result)
        return result

    return loss


@guard("loss")
def _record(
    session: Session,
    name: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: object,
) -> None:
    at = session.clock.forward_moment()
    if not isinstance(result, torch.Tensor) or not session.wants(Kind.LOSS, name, at):
        return
    given = _arguments(signature, args, kwargs)
    value, spec = split(result)
    with unobserved():
        account = _account(name, given, value)
        total = _total(given.reduction, account, value)
    meta = Meta(
        reduction=given.reduction,
        ignore_index=given.ignore_index,
        denominator=account.denominator,
        source=user_line(),
        grad_enabled=session.clock.grad_enabled(),
        text=_said(name, given, session),
        op=OF_RECORDED if given.scores is not None and session.producers.holds(given.scores) else None,
    )
    producers = session.producers.find(given.scores) if given.scores is not None else ()
    call = session.clock.take(at, Kind.LOSS, name, "value")
    tensors: dict[str, tuple[torch.Tensor, Spec | None]] = {
        "sum": (total, _of_sum(spec)),
        "count": (account.count, _of_sum(spec if given.reduction == "none" else given.target_spec)),
        "value": (value, spec),
    }
    if given.target is not None and not given.target.is_floating_point():
        tensors["target"] = given.target, given.target_spec
    for slot, (tensor, own) in tensors.items():
        event = session.emit(
            tensor, at, Kind.LOSS, name, slot,
            call=call.number, recompute=call.recompute, producers=producers, meta=meta, spec=own,
        )  # fmt: skip
        if slot == "value" and event is not None:
            session.producers.add(result, event, is_output=True)
    if result.requires_grad:
        scale = account.denominator if given.reduction in ("mean", "batchmean") else None
        watch_weight(session, result, at, name, call.number, meta, scale)


def watch_weight(
    session: Session, result: torch.Tensor, at: Moment, name: str, call: int, meta: Meta, scale: float | None
) -> None:
    """Record, in backward, what each token's loss weighs: the gradient of the value over ``scale``."""

    def hook(gradient: torch.Tensor) -> None:
        record_weight(session, gradient, at, name, call, meta, scale)

    result.register_hook(hook)  # type: ignore[no-untyped-call]


@guard("loss weight")
def record_weight(
    session: Session,
    gradient: torch.Tensor | None,
    at: Moment,
    name: str,
    call: int,
    meta: Meta,
    scale: float | None,
) -> None:
    """Record a token weight in float64; a further backward through the same loss is left out."""
    if (
        gradient is None
        or session.muted
        or session.clock.ordinal_in(at, Kind.LOSS, f"{name}#{call}", "weight")
    ):
        return
    local, spec = split(gradient)
    with unobserved():
        weight = local.detach().to(torch.float64)
        if scale is not None:
            weight = weight / scale
    session.emit(weight, at, Kind.LOSS, name, "weight", call=call, meta=meta, spec=spec)


def _arguments(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    names = list(signature.parameters)
    reduction = given.get("reduction", "none")
    if given.get("size_average") is not None or given.get("reduce") is not None:
        reduction = _reduction.legacy_get_string(given.get("size_average"), given.get("reduce"), False)
    classified = "ignore_index" in names
    target, target_spec = _local(given.get("target", given.get("targets")))
    return Arguments(
        scores=_tensor(given[names[0]]),
        target=target,
        target_spec=target_spec,
        class_weight=_local(given.get("weight"))[0] if classified else None,
        smoothing=given.get("label_smoothing", 0.0),
        ignore_index=given.get("ignore_index"),
        reduction=reduction,
        weighted=given.get("weight") is not None or given.get("pos_weight") is not None,
    )


def _said(name: str, given: Arguments, session: Session) -> str | None:
    """Say of a loss of classes what it was given, where its scores are a recorded tensor in its order.

    Of a loss with weights of classes or elements say that: what its mean is over may depend on them.
    """
    if given.weighted:
        return WEIGHTED
    scores, target = given.scores, given.target
    if name not in CLASSIFYING or target is None or scores is None:
        return None
    if target.is_floating_point() or not session.producers.in_order(scores):
        return None
    shape = ",".join(map(str, scores.shape))
    return f"{SCORES}{shape} label_smoothing={float(given.smoothing):g}"


def _tensor(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) else None


def _local(value: object) -> tuple[torch.Tensor | None, Spec | None]:
    return split(value) if isinstance(value, torch.Tensor) else (None, None)


def _of_sum(spec: Spec | None) -> Spec | None:
    """Return how a scalar lies that each rank has summed over its own part of a tensor."""
    if spec is None:
        return None
    placements = tuple(
        Placement(kind="partial", op="sum") if placement.dim is not None else placement
        for placement in spec.placements
    )
    return dataclasses.replace(spec, placements=placements, global_shape=())


def _account(name: str, given: Arguments, result: torch.Tensor) -> Account:
    """Count what the mean is over. On CUDA this waits for the device once, to know the number."""
    if name in CLASSIFYING and given.target is not None and not given.target.is_floating_point():
        return _account_of_classes(given, given.target)
    elements = _elements(name, given, result)
    count = torch.tensor(elements, dtype=torch.int64)
    if given.reduction == "batchmean" and given.scores is not None:  # the terms are those of any reduction
        return Account(count, float(given.scores.shape[0] if given.scores.dim() else 1))
    return Account(count, float(elements))


def _account_of_classes(given: Arguments, target: torch.Tensor) -> Account:
    valid = torch.ne(target, given.ignore_index if given.ignore_index is not None else -1)
    count = valid.sum()
    if given.class_weight is None:
        return Account(count, float(count))
    weights = given.class_weight.detach().to(torch.float64)[target.clamp(0, len(given.class_weight) - 1)]
    return Account(count, float((weights * valid).sum()))


def _elements(name: str, given: Arguments, result: torch.Tensor) -> int:
    """Return how many terms were summed, from the shapes alone."""
    if given.reduction == "none":
        return result.numel()
    scores, target = given.scores, given.target
    if scores is None:
        return 1
    if name in CLASSIFYING:
        return scores.numel() // max(scores.shape[1 if scores.dim() > 1 else 0], 1)
    if name in ROW_LOSSES:
        return scores.shape[0] if scores.dim() > 1 else 1
    if name == "ctc_loss":
        return scores.shape[1] if scores.dim() == 3 else 1
    if target is None:
        return scores.numel()
    shape = target.shape if given.target_spec is None else given.target_spec.global_shape
    return int(torch.broadcast_shapes(scores.shape, shape).numel())  # type: ignore[no-untyped-call]


def _total(reduction: str, account: Account, result: torch.Tensor) -> torch.Tensor:
    value = result.detach().to(torch.float64)
    if reduction == "none":
        return value.sum()
    if reduction in ("mean", "batchmean"):
        return value * account.denominator if account.denominator else torch.zeros_like(value)
    return value
