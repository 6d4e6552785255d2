"""Hand-made results: what each test of a renderer starts from."""

from __future__ import annotations

from tensortrace.diff.result import (
    Cause,
    Coverage,
    Finding,
    Judgement,
    Metrics,
    Missing,
    Power,
    Result,
    Side,
    StepLabel,
    Where,
)


def where(
    kind: str = "loss",
    name: str = "cross_entropy",
    slot: str = "weight",
    *,
    step: StepLabel = 0,
    microbatch: int | None = 0,
    call: int = 0,
) -> Where:
    return Where(step, microbatch, kind, name, slot, call)


SIDE_A = Side("runs/a", 1, 5, 4, "finished")
SIDE_B = Side("runs/b", 2, 5, 4, "finished")

COVERAGE = Coverage(
    compared=1204,
    bitwise_equal=803,
    by_kind={"input": 4, "activation": 600, "param": 600},
    missing=(),
    complete=True,
)

EQUIVALENT = Result(
    verdict="equivalent",
    headline="nothing diverges",
    a=SIDE_A,
    b=SIDE_B,
    first_divergent=None,
    causes=(),
    origins=(),
    receivers=(),
    receivers_total=0,
    coverage=COVERAGE,
    policy="error-model",
    power=Power(1.2e-6, 3.4e-4, where("param", "fc.weight", "model", microbatch=None)),
)

TOKEN_WEIGHT = Finding(
    where=where(),
    role="origin",
    ranks=(0, 1),
    text="rank 0's tokens weigh 1/8, rank 1's 1/4; the reference 1/6",
    metrics=Metrics(
        elements=12, equal=False, rel_l2=0.35355, abs_l2=0.2, norm_a=0.57735, norm_b=0.6, projection=1.0625,
        projection_error=0.09, cosine=0.97, max_abs=1 / 12, max_abs_at=(8,), max_abs_a=1 / 6, max_abs_b=0.25,
        max_ulp=4.2e6, outside=0.75, max_rel=0.5, max_rel_at=(9,),
    ),
    judgement=Judgement(
        "error-model", 1e-6, 0.35355, 353550.0, "c·eps of float32 for a weight", 2e-6, 3e-5
    ),
    dtype_a="float64",
    dtype_b="float64",
    shape=(12,),
    source="train_gpt.py:88",
    inputs=("activation head out",),
    evidence=("rank 0: 8 valid tokens, weight 0.125", "rank 1: 4 valid tokens, weight 0.25"),
)  # fmt: skip

TOKEN_RATIO = Cause(
    code="scale.token_ratio",
    text="local means are averaged over ranks although the ranks hold unequal numbers of tokens",
    number=0.75,
    equals="tokens of rank 0 over the mean per rank: 6/8",
    residual_before=0.35355,
    residual_after=2.1e-8,
    floor=1e-6,
    evidence=("weights expected 1/8 and 1/4, measured 0.125 and 0.25",),
)

LR = Finding(
    where=where("schedule", "optimizer.0.group.1", "lr", step=2, microbatch=None),
    role="origin",
    ranks=(0, 1),
    text="0.001 against 0.002",
    metrics=Metrics(elements=1, equal=False, rel_l2=1.0, max_abs=1e-3),
    judgement=Judgement("exact", 0.0, 1.0, float("inf"), "values of the update formula"),
)

DIVERGENT = Result(
    verdict="divergent",
    headline="the loss weighs tokens differently (scale.token_ratio)",
    a=SIDE_A,
    b=SIDE_B,
    first_divergent=TOKEN_WEIGHT,
    causes=(TOKEN_RATIO,),
    origins=(TOKEN_WEIGHT, LR),
    receivers=(),
    receivers_total=317,
    coverage=COVERAGE,
    policy="error-model",
    notes=("steps align by index",),
    hints=("record with --zoom head to name the operation",),
)

INCOMPLETE = Result(
    verdict="incomplete",
    headline="what was compared agrees, but boundaries are missing",
    a=SIDE_A,
    b=Side("runs/b", 2, 3, 4, "killed", ("rank 1: the index ends without a manifest",)),
    first_divergent=None,
    causes=(),
    origins=(),
    receivers=(),
    receivers_total=0,
    coverage=Coverage(
        compared=700,
        bitwise_equal=500,
        by_kind={"param": 700},
        missing=(
            Missing("b", "rng", "not judged", 9, (), counts_as_incomplete=False),
            Missing(
                "a", "param", "rank 1 of b ended before", 24,
                (where("param", "fc.weight", "model", step=3, microbatch=None),), counts_as_incomplete=True,
            ),
        ),
        complete=False,
    ),
    policy="error-model",
)  # fmt: skip
