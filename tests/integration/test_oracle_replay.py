"""One recorded run is held against what its own inputs give: correct runs agree, mistakes are named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

from tensortrace.diff import compare
from tensortrace.replay import Replay, ReplayOptions, replay
from tensortrace.tracer.types import Kind
from tests.harness import BIN, run
from tests.integration.judged import Judge
from tests.replayed import FUSED, OF_COMPLEX, OPTIMIZERS, Branch, Mystery, Run, recorded
from tests.simulated import CLIP, NAMES, At, Program, Setup

Place = tuple[object, ...]


def place(result: Replay) -> Place:
    """Return (step, microbatch, kind, name, slot) of the first mismatch."""
    assert result.verdict == "mismatch", result.headline
    assert result.first_mismatch is not None
    at = result.first_mismatch.where
    return at.step, at.microbatch, at.kind, at.name, at.slot


def codes(result: Replay) -> list[str]:
    return [cause.code for cause in result.causes]


def left_out(result: Replay, kind: str) -> set[str]:
    """Return why boundaries of a kind were not replayed."""
    return {group.reason for group in result.not_replayed if group.kind == kind}


# --- correct runs ------------------------------------------------------------------------------------

L = torch.optim.lr_scheduler


class Scheduled(Run):
    """All optimizers, some with schedulers that have a closed form."""

    schedules: ClassVar[dict[str, Any]] = {
        "sgd": lambda o: L.StepLR(o, 2, 0.5),
        "momentum": lambda o: L.OneCycleLR(o, 0.2, total_steps=8),
        "adam": lambda o: L.CyclicLR(o, 1e-3, 1e-2, 4, mode="triangular2", cycle_momentum=False),
        "adamw": lambda o: L.CosineAnnealingLR(o, 10, 1e-3),
        "adamax": lambda o: L.MultiStepLR(o, [1, 1, 2]),
        "nadam": lambda o: L.LinearLR(o, 0.25, total_iters=4),
        "radam": lambda o: L.ConstantLR(o, 0.5, total_iters=2),
        "adagrad": lambda o: L.ExponentialLR(o, 0.9),
        "adadelta": lambda o: L.PolynomialLR(o, 4, 2.0),
        "rmsprop": lambda o: L.CosineAnnealingWarmRestarts(o, 1, 2),
    }


class OfComplex(Run):
    names = OF_COMPLEX


class Fused(Run):
    names = FUSED


@pytest.mark.parametrize("way", ["foreach", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_correct_runs_of_every_optimizer_agree(tmp_path: Path, dtype: torch.dtype, way: str) -> None:
    result = replay(recorded(tmp_path / "a", Scheduled(dtype, foreach=way == "foreach")))
    assert result.verdict == "agrees", result.headline
    assert result.notes == ()
    # weights and biases after each of three steps
    assert result.replayed["param"] == 2 * 3 * len(OPTIMIZERS)
    assert left_out(result, "param") == {"what the run began with, which nothing computes"}
    assert left_out(result, "optimizer_state") == {"what the run began with, which nothing computes"}
    rates = {n.where.name for n in result.boundaries if n.where.slot == "lr"}
    assert len(rates) == len(Scheduled.schedules)
    assert result.objective is not None
    assert result.objective.name == "mean"


def test_complex_parameters_are_updated_in_pairs(tmp_path: Path) -> None:
    result = replay(recorded(tmp_path / "a", OfComplex(torch.complex64)))
    assert result.verdict == "agrees", result.headline
    assert result.replayed["param"] == 2 * 3 * len(OF_COMPLEX)


def test_fused_optimizers_follow_the_same_formulas(tmp_path: Path) -> None:
    result = replay(recorded(tmp_path / "a", Fused(fused=True)))
    assert result.verdict == "agrees", result.headline
    assert result.replayed["param"] == 2 * 3 * len(FUSED)


class Unknown(Run):
    names = ("sgd", "adam")
    classes: ClassVar[dict[str, Any]] = {"sgd": Mystery}


def test_an_unknown_optimizer_is_not_replayed_and_counted(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(OPTIMIZERS, "sgd", (Mystery, {"lr": 0.1}))
    result = replay(recorded(tmp_path / "a", Unknown()))
    assert result.verdict == "agrees", result.headline
    assert "the formula of Mystery is not known" in left_out(result, "param")
    [group] = [g for g in result.not_replayed if "Mystery" in g.reason]
    assert group.count == 6  # a weight and a bias in three steps
    assert result.replayed["param"] == 6  # those of Adam


@pytest.mark.parametrize(
    "setup",
    [
        {}, {"accumulate": 2}, {"ranks": 2}, {"ranks": 2, "accumulate": 2, "loss_scale": 1024.0},
        {"optimizer": "SGD"}, {"resumed": True}, {"max_norm": 1e9}, {"norm_type": float("inf"), "ranks": 2},
    ],
    ids=str,
)  # fmt: skip
def test_correct_runs_of_any_layout_agree(judge: Judge, setup: dict[str, Any]) -> None:
    result = replay(judge.write(Program(Setup(**setup))))
    assert result.verdict == "agrees", result.headline
    assert result.objective is not None
    assert (result.objective.name, result.objective.declared) == ("mean", False)
    assert result.replayed["param"] == len(NAMES) * 3
    assert not {g.kind for g in result.not_replayed} & {"reduced_grad", "unscaled_grad"}


# --- planted mistakes, in the only run there is ----------------------------------------------------------


class LocalMeans(Program):
    """Each rank takes the mean over its own tokens, and ranks are averaged."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return 1 / counts[rank, microbatch]


class TimesNothing(Program):
    """Multiplies its loss by zero."""

    times = 0.0

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return self.times


class TimesNaN(TimesNothing):
    """Multiplies its loss by what isn't a number."""

    times = math.nan


class PaddingCounted(Program):
    """The sum over valid tokens is divided by all positions, padding included."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        self.now = getattr(self, "now", -1) + (rank == microbatch == 0)
        parts = [self.share(self.documents(self.now), *place) for place in counts]
        return self.setup.ranks / sum(len(part) * (max(map(len, part)) - 1) for part in parts)


class FirstCounted(Program):
    """The sum is divided by all tokens, though the first of each document is no target."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return self.setup.ranks / (sum(counts.values()) + self.setup.rows)


class NotDivided(Program):
    """The loss is not divided by the number of microbatches."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return super().token_weight(counts, rank, microbatch) * self.setup.accumulate


class Summed(Program):
    """Ranks are added up where the mean is meant."""

    def reductions(self, name: str) -> tuple[str, ...]:
        return ("sum",)


class OneAlone(Program):
    """One parameter's gradient is not reduced."""

    def reductions(self, name: str) -> tuple[str, ...]:
        return ("alone",) if name == "head.weight" else ("mean",)


class LocalNorm(Program):
    """Ranks clip by the norm of their own gradients before the reduction."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        own = self.__dict__.setdefault("squares", {})
        if at.kind == Kind.LOCAL_GRAD and at.slot == "grad":
            own[at.step, at.rank] = own.get((at.step, at.rank), 0.0) + float(np.sum(value.astype(float) ** 2))
        if (at.kind, at.name, at.slot) == (Kind.CLIPPED_GRAD, CLIP, "total_norm"):
            return np.float64(np.sqrt(own[at.step, 0]))
        return value


class ClippedScaled(Program):
    """Gradients are clipped while they carry the loss scale."""

    def _unscale(self, step: int) -> None:
        pass

    def _clip(self, step: int, microbatch: int, call: int) -> None:
        super()._clip(step, microbatch, call)
        super()._unscale(step)


class NotClipped(Program):
    """The coefficient is computed, and not applied."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        held = self.__dict__.setdefault("held", {})
        if at.kind == Kind.CLIPPED_GRAD and at.slot == "before":
            held[at.rank, at.name] = value
        after = at.kind == Kind.CLIPPED_GRAD and at.slot == "grad" and at.microbatch is not None
        return held[at.rank, at.name] if after else value


class ClippedAmid(Program):
    """Gradients are clipped after each microbatch."""

    def clips_after(self, step: int, microbatch: int) -> bool:
        return True


class Jumping(Program):
    """The optimizer's count of updates jumps."""

    def before_update(self, step: int, rank: int) -> None:
        for own in self.state[rank].values() if step == 1 else ():
            own["step"] = np.float32(5)


class Forgetful(Program):
    """The second moment is lost amid the run."""

    def before_update(self, step: int, rank: int) -> None:
        for own in self.state[rank].values() if step == 1 else ():
            own["exp_avg_sq"] = np.zeros_like(own["exp_avg_sq"])


class Coupled(Program):
    """AdamW that adds the decay to the gradient."""

    def _update_one(self, rank: int, name: str, gradient: np.ndarray, hypers: dict[str, float]) -> None:
        decay = np.float32(hypers["weight_decay"]) * self.params[rank][name]
        super()._update_one(rank, name, gradient + decay, hypers | {"weight_decay": 0.0})


class OtherRate(Program):
    """The update is made at another rate than the group says."""

    def _update_one(self, rank: int, name: str, gradient: np.ndarray, hypers: dict[str, float]) -> None:
        super()._update_one(rank, name, gradient, hypers | {"lr": 1.1 * hypers["lr"]})


class SwappedBetas(Program):
    """Each moment is averaged by the other's beta."""

    def _update_one(self, rank: int, name: str, gradient: np.ndarray, hypers: dict[str, float]) -> None:
        swapped = {"betas.0": hypers["betas.1"], "betas.1": hypers["betas.0"]}
        super()._update_one(rank, name, gradient, hypers | swapped)


class Uncorrected(Program):
    """The moments are used with their bias."""

    def _update_one(self, rank: int, name: str, gradient: np.ndarray, hypers: dict[str, float]) -> None:
        state = self.state[rank].setdefault(name, {})
        count = np.float32(state.get("step", 0.0))
        state["step"] = np.float32(1e6)
        super()._update_one(rank, name, gradient, hypers)
        state["step"] = np.float32(count + 1)


class Frozen(Program):
    """The optimizer passes over a parameter."""

    def updates(self, step: int, rank: int, name: str) -> bool:
        return name != "hidden.weight"


class Hasty(Program):
    """The scheduler is stepped once per microbatch."""

    def position(self, step: int) -> int:
        return 2 * step


class NotZeroed(Program):
    """Gradients are kept from one window to the next."""

    def zeroes(self, step: int) -> bool:
        return False


WEIGHT = (0, 0, "loss", "cross_entropy", "weight")
NORM = (0, 0, "clipped_grad", CLIP, "total_norm")

PLANTED: dict[str, tuple[type[Program], dict[str, Any], Place, str]] = {
    "local means": (LocalMeans, {"ranks": 2}, WEIGHT, "scale.token_ratio"),
    "padding counted": (PaddingCounted, {}, WEIGHT, "scale.other"),
    "not divided": (NotDivided, {"accumulate": 4}, WEIGHT, "scale.accumulation"),
    "summed": (Summed, {"ranks": 2}, (0, 0, "reduced_grad", "embed.weight", "grad"), "scale.world_size"),
    "not reduced": (
        OneAlone, {"ranks": 2}, (0, 0, "reduced_grad", "head.weight", "grad"), "reduction.missing",
    ),
    "local norm": (LocalNorm, {"ranks": 2}, NORM, "clip.local_norm"),
    "clipped scaled": (ClippedScaled, {"loss_scale": 1024.0}, NORM, "clip.before_unscale"),
    "not clipped": (NotClipped, {}, (0, 0, "clipped_grad", "embed.weight", "grad"), "clip.skipped"),
    "clipped amid": (ClippedAmid, {"accumulate": 2}, NORM, "clip.before_accumulation"),
    "jumping": (Jumping, {}, (1, None, "optimizer_state", "embed.weight", "step"), "optimizer.step_counter"),
    "forgetful": (
        Forgetful, {}, (1, None, "optimizer_state", "embed.weight", "exp_avg_sq"), "optimizer.lost_moment",
    ),
    "coupled": (
        Coupled, {}, (0, None, "optimizer_state", "embed.weight", "exp_avg"), "optimizer.weight_decay_mode",
    ),
    "other rate": (OtherRate, {}, (0, None, "param", "embed.weight", "model"), "optimizer.hyperparameter"),
    "swapped betas": (
        SwappedBetas, {}, (0, None, "optimizer_state", "embed.weight", "exp_avg"), "optimizer.hyperparameter",
    ),
    "uncorrected": (
        Uncorrected, {"betas": (0.9, 0.999)}, (0, None, "param", "embed.weight", "model"),
        "optimizer.step_counter",
    ),
    "frozen": (
        Frozen, {"resumed": True}, (0, None, "optimizer_state", "hidden.weight", "exp_avg"),
        "optimizer.param_frozen",
    ),
    "hasty": (
        Hasty, {"accumulate": 2}, (1, None, "schedule", "scheduler.0", "position"), "schedule.position",
    ),
    "not zeroed": (NotZeroed, {}, (1, None, "local_grad", "embed.weight", "start"), "grad.not_zeroed"),
    "loss times 0": (TimesNothing, {}, (0, 0, "loss", "cross_entropy", "weight"), "scale.other"),
    "loss times NaN": (
        TimesNaN, {"ranks": 2}, (0, 0, "loss", "cross_entropy", "weight"), "value.nonfinite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named_in_the_only_run_there_is(judge: Judge, name: str) -> None:
    program, setup, where, code = PLANTED[name]
    result = replay(judge.write(program(Setup(**setup))))
    assert place(result) == where
    assert codes(result)[0] == code
    assert not any("search for a cause failed" in note for note in result.notes)


def test_mean_of_local_means_tells_both_weights(judge: Judge) -> None:
    result = replay(judge.write(LocalMeans(ranks=2)))
    counts = [sum(len(d) - 1 for d in Program().documents(0)[rank::2]) for rank in (0, 1)]
    assert f"each of the {counts[0]} tokens of rank 0 weighs 1/{2 * counts[0]}" in result.headline
    assert f"in the reference every token weighs 1/{sum(counts)}" in result.headline


def test_a_denominator_that_counts_padding_is_told_as_such(judge: Judge) -> None:
    result = replay(judge.write(PaddingCounted()))
    assert "padding is counted" in result.headline


def test_both_runs_with_one_mistake_are_equivalent_and_the_oracle_names_it(judge: Judge) -> None:
    one, two = judge.write(FirstCounted()), judge.write(FirstCounted(ranks=2))
    assert compare(one, two).verdict == "equivalent"
    for trace in (one, two):
        result = replay(trace)
        assert place(result) == (0, 0, "loss", "cross_entropy", "weight")
        assert codes(result)[0] == "scale.other"


# --- what else a run has ---------------------------------------------------------------------------------


class SumOfTokens(Program):
    """The loss is a sum, not a mean."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return float(self.setup.ranks)


def test_a_sum_is_inferred_and_stated(judge: Judge) -> None:
    result = replay(judge.write(SumOfTokens(ranks=2, accumulate=2)))
    assert result.verdict == "agrees", result.headline
    assert result.objective is not None
    assert result.objective.name == "sum"
    assert result.objective.weights[0].startswith("step 0: cross_entropy: a token weighs 1/1:")


def test_a_declared_objective_is_held_against_a_run_that_has_another(judge: Judge) -> None:
    trace = judge.write(SumOfTokens())
    result = replay(trace, options=ReplayOptions(objective="mean"))
    assert place(result) == (0, 0, "loss", "cross_entropy", "weight")
    assert result.objective is not None
    assert result.objective.declared
    assert result.hints == ()
    assert replay(trace, options=ReplayOptions(objective="sum")).verdict == "agrees"


class Overwritten(Run):
    """A parameter is written to between two steps."""

    names = ("adam",)

    def step(self, step: int) -> None:
        if step == 2:
            with torch.no_grad():
                self.model["adam"].weight[0, 0] += 1e-3
        super().step(step)


def test_a_parameter_that_is_written_to_between_steps_is_named(tmp_path: Path) -> None:
    result = replay(recorded(tmp_path / "a", Overwritten()))
    assert place(result) == (2, None, "param", "adam.weight", "start")


class Doubled(Run):
    """The learning rate is changed behind the scheduler's back."""

    names = ("sgd",)
    schedules: ClassVar[dict[str, Any]] = {"sgd": lambda o: L.StepLR(o, 2, 0.5)}

    def step(self, step: int) -> None:
        if step == 1:
            self.optimizers["sgd"].param_groups[0]["lr"] *= 2
        super().step(step)


def test_a_learning_rate_off_its_schedule_is_named_with_both_values(tmp_path: Path) -> None:
    result = replay(recorded(tmp_path / "a", Doubled()))
    assert place(result) == (1, None, "schedule", "optimizer.0.group.0", "lr")
    assert codes(result)[0] == "optimizer.hyperparameter"
    assert "0.2, in the reference 0.1" in result.headline


class Noise(torch.nn.Module):
    """Draws other noise each time that it is computed."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.size = size

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.size * torch.randn(rows.shape)


class Checkpointed(torch.nn.Module):
    """Computes its inner modules again in backward."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(Noise(noise), Branch(torch.float32))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        again = torch.utils.checkpoint.checkpoint(
            self.inner, rows, use_reentrant=False, preserve_rng_state=False
        )
        assert isinstance(again, torch.Tensor)
        return again


class Recomputing(Run):
    names = ("sgd",)
    noise = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.model["sgd"] = Checkpointed(self.noise)
        self.optimizers["sgd"] = torch.optim.SGD(self.model.parameters(), lr=0.1)


class OtherNoise(Recomputing):
    noise = 0.1


def test_recomputed_passes_are_held_against_the_first(tmp_path: Path) -> None:
    right = replay(recorded(tmp_path / "a", Recomputing()))
    assert right.verdict == "agrees", right.headline
    assert right.recomputed > 0
    wrong = replay(recorded(tmp_path / "b", OtherNoise()))
    assert wrong.first_mismatch is not None
    assert "recomputed" in wrong.first_mismatch.where.slot
    assert codes(wrong)[0] == "recompute.differs"


def test_replicas_that_differ_are_named_with_the_odd_rank(judge: Judge) -> None:
    class Odd(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            odd = (at.step, at.rank, at.kind, at.name) == (1, 2, Kind.PARAM, "head.bias")
            return value + np.float32(1e-3) if odd else value

    result = replay(judge.write(Odd(ranks=3)))
    assert place(result) == (1, None, "param", "head.bias", "model")
    assert result.first_mismatch is not None
    assert result.first_mismatch.ranks == (2,)
    assert codes(result)[0] == "replica.disagrees"


# --- the command -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    return {
        "right": Program().write(folder / "right"),
        "wrong": OtherRate().write(folder / "wrong"),
        "killed": Program().write(folder / "killed", ended=None),
    }


@pytest.mark.parametrize(
    ("name", "code", "word"), [("right", 0, "AGREES"), ("wrong", 1, "MISMATCH"), ("killed", 1, "INCOMPLETE")]
)
def test_the_exit_code_says_whether_the_run_agrees(
    traces: dict[str, Path], name: str, code: int, word: str
) -> None:
    done = run([str(BIN / "trace"), "replay", str(traces[name])])
    assert done.exit_code == code, done.errors
    assert done.output.startswith(word)
    assert "not replayed:" in done.output
    assert "objective: the mean over the step's valid tokens" in " ".join(done.output.split())


def test_the_command_writes_json_and_refuses_what_is_no_trace(
    traces: dict[str, Path], tmp_path: Path
) -> None:
    done = run([str(BIN / "trace"), "replay", str(traces["wrong"]), "--format", "json"])
    document = json.loads(done.output)
    assert document["schema"] == "tensortrace.replay/1"
    assert document["verdict"] == "mismatch"
    assert document["first_mismatch"]["kind"] == "param"
    assert document["causes"][0]["code"] == "optimizer.hyperparameter"
    assert document["causes"][0]["number"] == pytest.approx(0.011, rel=1e-3)
    assert run([str(BIN / "trace"), "replay", str(tmp_path)]).exit_code == 2
