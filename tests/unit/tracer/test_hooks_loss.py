"""Loss boundaries: local sum, valid count, denominator and token weight."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tensortrace.tracer.hooks import handwritten
from tests.memory_sink import recording

LOGITS = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 1.0]], requires_grad=True)
TARGET = torch.tensor([0, 2, -100])
CLASS_WEIGHT = torch.tensor([1.0, 2.0, 3.0])


def token_losses() -> list[float]:
    """Return the two valid tokens' losses, by hand: log(sum of exp) minus the target's logit."""
    return [
        math.log(math.e**2 + 1 + math.e) - 2.0,
        math.log(1 + math.e + 1) - 0.0,
    ]


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 0.5), ("sum", 1.0)])
def test_cross_entropy_states_sum_count_and_weight(reduction: str, factor: float) -> None:
    with recording() as sink:
        (F.cross_entropy(LOGITS, TARGET, reduction=reduction) * 8).backward()
    assert sink.one("loss", "cross_entropy", "sum").item() == pytest.approx(sum(token_losses()), rel=1e-6)
    assert sink.one("loss", "cross_entropy", "count").item() == 2
    assert sink.one("loss", "cross_entropy", "target").tolist() == [0, 2, -100]
    assert sink.one("loss", "cross_entropy", "weight").item() == 8 * factor
    value = sink.one("loss", "cross_entropy", "value").item()
    assert value == pytest.approx(sum(token_losses()) * factor, rel=1e-6)
    assert sink.one("loss", "backward", "value").item() == pytest.approx(8 * value)
    meta = sink.find("loss", "cross_entropy", "value")[0].boundary.meta
    assert (meta.reduction, meta.ignore_index, meta.denominator) == (reduction, -100, 2.0)


def test_unreduced_losses_have_a_weight_per_token() -> None:
    with recording() as sink:
        losses = F.cross_entropy(LOGITS, TARGET, reduction="none")
        (losses * torch.tensor([1.0, 0.5, 1.0])).sum().backward()
    assert sink.one("loss", "cross_entropy", "weight").tolist() == [1.0, 0.5, 1.0]
    assert sink.one("loss", "cross_entropy", "sum").item() == pytest.approx(sum(token_losses()), rel=1e-6)
    assert sink.one("loss", "cross_entropy", "count").item() == 2


def test_class_weights_weigh_the_sum_and_the_denominator() -> None:
    with recording() as sink:
        F.cross_entropy(LOGITS, TARGET, weight=CLASS_WEIGHT).backward()
    first, second = token_losses()
    assert sink.one("loss", "cross_entropy", "sum").item() == pytest.approx(first + 3 * second, rel=1e-6)
    assert sink.find("loss", "cross_entropy", "sum")[0].boundary.meta.denominator == 4.0
    assert sink.one("loss", "cross_entropy", "count").item() == 2


def test_a_batch_without_valid_tokens_sums_to_zero() -> None:
    with recording() as sink:
        F.cross_entropy(LOGITS, torch.full((3,), -100))
    assert sink.one("loss", "cross_entropy", "sum").item() == 0.0
    assert sink.one("loss", "cross_entropy", "count").item() == 0


def test_probability_targets_count_the_batch() -> None:
    with recording() as sink:
        value = F.cross_entropy(LOGITS, torch.full((3, 3), 1 / 3))
    assert sink.one("loss", "cross_entropy", "count").item() == 3
    assert sink.one("loss", "cross_entropy", "sum").item() == pytest.approx(3 * value.item())
    assert sink.find("loss", "cross_entropy", "target") == []


A, B = torch.randn(4, 3).sigmoid(), torch.randn(4, 3).sigmoid()
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
CASES = {
    "mse_loss": (lambda r: F.mse_loss(A, B, reduction=r), 12),
    "l1_loss": (lambda r: F.l1_loss(A, B, reduction=r), 12),
    "smooth_l1_loss": (lambda r: F.smooth_l1_loss(A, B, reduction=r), 12),
    "huber_loss": (lambda r: F.huber_loss(A, B, reduction=r), 12),
    "binary_cross_entropy": (lambda r: F.binary_cross_entropy(A, B, reduction=r), 12),
    "binary_cross_entropy_with_logits": (lambda r: F.binary_cross_entropy_with_logits(A, B, reduction=r), 12),
    "poisson_nll_loss": (lambda r: F.poisson_nll_loss(A, B, reduction=r), 12),
    "gaussian_nll_loss": (lambda r: F.gaussian_nll_loss(A, B, torch.ones(4, 3), reduction=r), 12),
    "soft_margin_loss": (lambda r: F.soft_margin_loss(A, B.sign(), reduction=r), 12),
    "hinge_embedding_loss": (lambda r: F.hinge_embedding_loss(A[:, 0], SIGNS, reduction=r), 4),
    "margin_ranking_loss": (lambda r: F.margin_ranking_loss(A[:, 0], B[:, 0], SIGNS, reduction=r), 4),
    "cosine_embedding_loss": (lambda r: F.cosine_embedding_loss(A, B, SIGNS, reduction=r), 4),
    "multi_margin_loss": (lambda r: F.multi_margin_loss(A, torch.tensor([0, 1, 2, 0]), reduction=r), 4),
    "multilabel_margin_loss": (
        lambda r: F.multilabel_margin_loss(A, torch.tensor([[0, 1, -1]] * 4), reduction=r), 4,
    ),
    "multilabel_soft_margin_loss": (lambda r: F.multilabel_soft_margin_loss(A, B.round(), reduction=r), 4),
    "triplet_margin_loss": (lambda r: F.triplet_margin_loss(A, B, A.flip(0), reduction=r), 4),
    "nll_loss": (lambda r: F.nll_loss(A.log(), torch.tensor([0, 1, 2, 0]), reduction=r), 4),
    "kl_div": (lambda r: F.kl_div(A.log(), B, reduction=r), 12),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_the_mean_of_every_loss_is_its_sum_over_its_denominator(name: str) -> None:
    run, elements = CASES[name]
    with recording() as sink:
        mean = run("mean")
        total = run("sum")
        each = run("none")
    sums = [kept.value.item() for kept in sink.find("loss", name, "sum")]
    assert sums == pytest.approx([total.item()] * 3, rel=1e-5)
    assert each.double().sum().item() == pytest.approx(total.item(), rel=1e-5)
    metas = [kept.boundary.meta for kept in sink.find("loss", name, "value")]
    assert [meta.denominator for meta in metas] == [elements] * 3
    assert mean.item() == pytest.approx(sums[0] / elements, rel=1e-5)
    assert [kept.boundary.call for kept in sink.find("loss", name, "value")] == [0, 1, 2]
    assert sink.names("loss") == [name]


def test_batchmean_divides_by_the_batch() -> None:
    with recording() as sink:
        F.kl_div(A.log(), B, reduction="batchmean")
    assert sink.find("loss", "kl_div", "sum")[0].boundary.meta.denominator == 4


def test_ctc_loss_means_over_batch_and_target_lengths() -> None:
    logs = torch.randn(6, 2, 4).log_softmax(-1)
    targets, given, wanted = torch.tensor([[1, 2], [3, 3]]), torch.tensor([6, 6]), torch.tensor([2, 1])
    with recording() as sink:
        value = F.ctc_loss(logs, targets, given, wanted)
        each = F.ctc_loss(logs, targets, given, wanted, reduction="none")
    # The mean divides each sequence's loss by its target length, then by the batch of 2.
    by_hand = (each[0] / 2 + each[1] / 1).item() / 2
    assert value.item() == pytest.approx(by_hand)
    first = sink.find("loss", "ctc_loss", "sum", call=0)[0]
    assert first.value.item() / first.boundary.meta.denominator == pytest.approx(by_hand)


def test_loss_modules_and_functions_bound_early_are_seen() -> None:
    with recording() as sink:
        nn.CrossEntropyLoss()(LOGITS, TARGET).backward()
    assert len(sink.find("loss", "cross_entropy", "weight")) == 1


def test_the_loss_names_what_its_scores_came_from() -> None:
    with recording() as sink:
        model = nn.Linear(3, 3)
        scores = model(torch.ones(3, 3)).view(-1, 3) / 0.5
        (F.cross_entropy(scores, TARGET) / 2).backward()
    (summed,) = sink.find("loss", "cross_entropy", "sum")
    assert [sink.kept[e].boundary.slot for e in summed.boundary.producers] == ["out"]
    (root,) = sink.find("loss", "backward")
    assert [sink.kept[e].boundary.slot for e in root.boundary.producers] == ["value"]


@pytest.mark.parametrize("style", ["gather", "index"])
def test_a_loss_written_by_hand_is_found_from_its_graph(style: str) -> None:
    index = TARGET.clamp(min=0)
    with recording() as sink:
        logs = F.log_softmax(LOGITS, dim=-1)
        picked = (
            logs.gather(1, index[:, None]).squeeze(1) if style == "gather" else logs[torch.arange(3), index]
        )
        loss = -(picked * (TARGET != -100)).sum() / 2
        loss.backward()
    name = "log_softmax.gather"
    assert sink.one("loss", name, "sum").item() == pytest.approx(sum(token_losses()), rel=1e-6)
    assert sink.one("loss", name, "count").item() == 2
    assert sink.one("loss", name, "weight").flatten().tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("style", ["choose", "where"])
def test_a_loss_by_hand_may_choose_its_tokens_after_the_gather(style: str) -> None:
    valid = TARGET != -100
    with recording() as sink:
        logs = F.log_softmax(LOGITS, dim=-1).gather(1, TARGET.clamp(min=0)[:, None])[..., 0]
        kept = logs[valid] if style == "choose" else torch.where(valid, logs, 0.0)
        (-kept.sum() / 2).backward()
    name = "log_softmax.gather"
    assert sink.one("loss", name, "sum").item() == pytest.approx(sum(token_losses()), rel=1e-6)
    assert sink.one("loss", name, "count").item() == 2
    assert sink.one("loss", name, "weight").flatten().tolist() == [0.5, 0.5, 0.0]


def test_smoothed_labels_by_hand_weigh_and_lose_what_cross_entropy_does() -> None:
    labels = TARGET.clamp(min=0)
    wanted = F.cross_entropy(LOGITS.double(), labels, reduction="sum", label_smoothing=0.2)
    with recording() as sink:
        logs = F.log_softmax(LOGITS, dim=-1)
        picked = logs.gather(1, labels[:, None]).squeeze(1)
        (-(0.8 * picked + 0.2 * logs.mean(1)).sum() / 6).backward()
    name = "log_softmax.gather"
    assert sink.one("loss", name, "sum").item() == pytest.approx(wanted.item(), rel=1e-6)
    assert sink.one("loss", name, "weight").flatten().tolist() == pytest.approx([1 / 6] * 3, rel=1e-6)


@pytest.mark.parametrize("block", [1, 4, 1 << 18])
def test_smoothed_labels_are_summed_block_by_block(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(handwritten, "BLOCK", block)
    scores = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    labels = torch.tensor([[1, 0, 4], [2, 2, 3]])
    wanted = F.cross_entropy(scores.double(), labels, reduction="sum", label_smoothing=0.5)
    with recording() as sink:
        logs = F.log_softmax(scores, dim=1)
        picked = logs.gather(1, labels[:, None]).squeeze(1)
        (-(0.5 * picked + 0.5 * logs.mean(1)).sum()).backward()
    name = "log_softmax.gather"
    assert sink.one("loss", name, "sum").item() == pytest.approx(wanted.item(), rel=1e-6)
    assert sink.one("loss", name, "weight").flatten().tolist() == pytest.approx([1.0] * 6, rel=1e-6)


def test_a_loss_that_is_kept_keeps_no_log_probabilities() -> None:
    with recording():
        logs = F.log_softmax(LOGITS, dim=-1)
        storage = StorageWeakRef(logs.untyped_storage())
        loss = -(0.8 * logs.gather(1, TARGET.clamp(min=0)[:, None]).squeeze(1) + 0.2 * logs.mean(1)).sum()
        del logs
        loss.backward()
    assert storage.expired()
    assert loss.grad_fn is not None


def test_an_entropy_beside_a_loss_by_hand_is_no_smoothing() -> None:
    labels = TARGET.clamp(min=0)
    with recording() as sink:
        logs = F.log_softmax(LOGITS, dim=-1)
        entropy = -(logs.exp() * logs).sum()
        (0.5 * -logs.gather(1, labels[:, None]).sum() - 0.1 * entropy).backward()
    assert sink.one("loss", "log_softmax.gather", "weight").flatten().tolist() == [0.5] * 3


def test_gathered_log_probabilities_that_are_used_otherwise_too_are_a_part_of_a_loss() -> None:
    with recording() as sink:
        logs = F.log_softmax(LOGITS, dim=-1)
        picked = logs.gather(1, TARGET.clamp(min=0)[:, None])
        (-picked.mean() + 0.1 * (logs.exp() * logs).sum()).backward()
    (kept,) = sink.find("loss", "log_softmax.gather", "sum")
    assert kept.boundary.meta.op == "part"
    with recording() as sink:
        F.log_softmax(LOGITS, dim=-1).gather(1, TARGET.clamp(min=0)[:, None]).mean().backward()
    (kept,) = sink.find("loss", "log_softmax.gather", "sum")
    assert kept.boundary.meta.op is None


def test_rows_picked_from_a_parameter_are_no_loss() -> None:
    with recording() as sink:
        rows = torch.ones(3, 3, requires_grad=True)
        rows[torch.arange(3), TARGET.clamp(min=0)].sum().backward()
    assert sink.names("loss") == ["backward"]


def test_a_loss_inside_a_loss_counts_once() -> None:
    with recording() as sink:
        loss = nn.TripletMarginWithDistanceLoss(distance_function=lambda a, b: F.mse_loss(a, b))
        loss(A, B, A.flip(0))
    assert sink.names("loss") == ["triplet_margin_with_distance_loss"]


def test_each_root_of_a_backward_is_recorded_once() -> None:
    with recording() as sink:
        weight = torch.ones(2, requires_grad=True)
        torch.autograd.backward([weight.sum(), (2 * weight).sum()])
    assert [kept.value.item() for kept in sink.find("loss", "backward")] == [2.0, 4.0]
    assert [kept.boundary.call for kept in sink.find("loss", "backward")] == [0, 1]
