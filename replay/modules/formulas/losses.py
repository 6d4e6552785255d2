"""Losses of scores and targets, with torch's reductions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tensortrace.replay.modules.given import Form, Given, NoFormula

Terms = Callable[[torch.Tensor, torch.Tensor, Given], torch.Tensor]


def _target(given: Given) -> torch.Tensor:
    target = given.of(1, "target")
    if target is None:
        raise NoFormula("it was given no targets")
    return target


def _reduced(terms: torch.Tensor, given: Given) -> torch.Tensor:
    way = given.settings.get("reduction")
    if way == "none":
        return terms
    if way == "batchmean":
        return terms.sum() / len(terms)
    if way not in ("mean", "sum"):
        raise NoFormula(f"its reduction is {way!r}")
    return terms.mean() if way == "mean" else terms.sum()


def _elementwise(terms: Terms) -> Callable[[Given], torch.Tensor]:
    def run(given: Given) -> torch.Tensor:
        given_target = _target(given).to(torch.float64)
        x, target = torch.broadcast_tensors(given.x, given_target)  # type: ignore[no-untyped-call]
        return _reduced(terms(x, target, given), given)

    return run


def _huber(x: torch.Tensor, target: torch.Tensor, given: Given) -> torch.Tensor:
    apart, delta = (x - target).abs(), given.settings.number("delta")
    return torch.where(apart <= delta, 0.5 * apart**2, delta * (apart - 0.5 * delta))


def _smooth(x: torch.Tensor, target: torch.Tensor, given: Given) -> torch.Tensor:
    apart, beta = (x - target).abs(), given.settings.number("beta")
    return apart if not beta else torch.where(apart < beta, 0.5 * apart**2 / beta, apart - 0.5 * beta)


def _weighted(terms: torch.Tensor, given: Given) -> torch.Tensor:
    weight = given.maybe("weight")
    return terms if weight is None else terms * weight


def _of_probabilities(x: torch.Tensor, target: torch.Tensor, given: Given) -> torch.Tensor:
    """Return binary cross entropies, whose logarithms end at -100."""
    yes, no = torch.log(x).clamp(min=-100), torch.log1p(-x).clamp(min=-100)
    return _weighted(-(target * yes + (1 - target) * no), given)


def _of_scores(x: torch.Tensor, target: torch.Tensor, given: Given) -> torch.Tensor:
    left = torch.clamp(x, min=0) + torch.log1p(torch.exp(-x.abs()))  # log(1 + exp(x))
    positive = given.maybe("pos_weight")
    yes = target if positive is None else target * positive
    return _weighted(yes * (left - x) + (1 - target) * left, given)


def _divergence(x: torch.Tensor, target: torch.Tensor, given: Given) -> torch.Tensor:
    if given.settings.flag("log_target"):
        return target.exp() * (target - x)
    return torch.where(target > 0, target * torch.log(target.clamp(min=1e-300)), 0.0) - target * x


def _classified(logs: torch.Tensor, given: Given, smoothing: float) -> torch.Tensor:
    """Return minus the log-probability of each target; classes are the dimension after the batch."""
    target, weight = _target(given), given.maybe("weight")
    if logs.dim() == 1:
        logs, target = logs[None], target[None]
    classes = logs.shape[1]
    weight = torch.ones(classes, dtype=torch.float64) if weight is None else weight
    way = given.settings.get("reduction")
    if target.is_floating_point():
        shape = (1, -1, *[1] * (logs.dim() - 2))
        wanted = target * (1 - smoothing) + smoothing / classes
        terms = -(wanted * logs * weight.reshape(shape)).sum(1)
        given_shape = given.x.dim()
        if way == "mean":
            return terms.sum() / (terms.numel() if given_shape > 1 else 1)
        return _reduced(terms if given_shape > 1 else terms[0], given)
    ignored = given.settings.whole("ignore_index")
    valid = target != ignored
    places = torch.where(valid, target, torch.zeros_like(target))
    share = torch.where(valid, weight[places], torch.zeros((), dtype=torch.float64))
    terms = -logs.gather(1, places[:, None])[:, 0] * share * (1 - smoothing)
    if smoothing:
        shape = (1, -1, *[1] * (logs.dim() - 2))
        spread = -(logs * weight.reshape(shape)).sum(1)
        terms = terms + torch.where(valid, spread, torch.zeros_like(spread)) * smoothing / classes
    if way == "mean":
        return terms.sum() / share.sum()
    return _reduced(terms if given.x.dim() > 1 else terms[0], given)


def _log_probabilities(x: torch.Tensor) -> torch.Tensor:
    dim = 1 if x.dim() > 1 else 0
    shifted = x - x.amax(dim, keepdim=True).detach()
    return shifted - shifted.exp().sum(dim, keepdim=True).log()


def _cross_entropy(given: Given) -> torch.Tensor:
    return _classified(_log_probabilities(given.x), given, given.settings.number("label_smoothing"))


def _likelihood(given: Given) -> torch.Tensor:
    return _classified(given.x, given, 0.0)


def _all(given: Given) -> int:
    return given.x.numel()


def _classes(given: Given) -> int:
    return given.x.shape[1 if given.x.dim() > 1 else 0]


LOSSES = {
    "CrossEntropyLoss": Form(_cross_entropy, _all, _classes),
    "NLLLoss": Form(_likelihood, _all, _classes),
    "MSELoss": Form(_elementwise(lambda x, y, _: (x - y) ** 2), _all),
    "L1Loss": Form(_elementwise(lambda x, y, _: (x - y).abs()), _all, kinked=True),
    "SmoothL1Loss": Form(_elementwise(_smooth), _all, kinked=True),
    "HuberLoss": Form(_elementwise(_huber), _all, kinked=True),
    "BCELoss": Form(_elementwise(_of_probabilities), _all),
    "BCEWithLogitsLoss": Form(_elementwise(_of_scores), _all),
    "KLDivLoss": Form(_elementwise(_divergence), _all),
}
