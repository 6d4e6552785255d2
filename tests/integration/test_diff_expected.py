"""Declared differences: they are told as such, what follows is kept apart, all else is still found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.result import Declared, Result
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import Kind
from tests.integration.judged import Judge, codes, first, lacking, place, tampering
from tests.simulated import At, Program

HALF = "schedule * lr factor=0.5"


def met(result: Result) -> Declared:
    """Return what was declared, of a result that must have been given rules."""
    assert result.declared is not None
    return result.declared


def is_excused(result: Result) -> bool:
    """Tell whether the runs are equivalent but for what was declared."""
    return bool(result) and result.headline.startswith("equivalent but for what was declared")


def test_another_learning_rate_that_was_declared_is_no_divergence(judge: Judge) -> None:
    result = judge(Program(), Program(ranks=2, lr=5e-3), expect=(HALF,))
    assert is_excused(result), result.headline
    assert result.origins == result.causes == ()
    (rule,) = met(result).rules
    assert (rule.met, rule.declared, rule.otherwise) == (6, 6, 0)  # two groups, three steps
    assert {f.where.slot for f in met(result).findings} == {"lr"}
    assert {f.role for f in met(result).findings} == {"declared"}
    assert met(result).downstream == result.receivers_total > 0


def test_an_update_is_judged_although_its_settings_were_declared_to_differ(judge: Judge) -> None:
    def wrong(value: np.ndarray) -> np.ndarray:
        return value * (1 + 1e-3)

    wrong_update = tampering(Kind.OPTIMIZER_STATE, "hidden.weight", "exp_avg_sq", wrong, step=1)
    result = judge(Program(), wrong_update(lr=5e-3), expect=(HALF,))
    assert place(result) == (1, None, "optimizer_state", "hidden.weight", "exp_avg_sq")
    assert not any(f.where.kind == "schedule" for f in result.origins)


def test_a_further_mistake_becomes_the_headline_and_its_cause_is_named(judge: Judge) -> None:
    class Unreduced(Program):
        def reductions(self, name: str) -> tuple[str, ...]:
            return ("alone",) if name == "hidden.weight" else ("mean",)

    result = judge(Program(ranks=2), Unreduced(ranks=2, lr=5e-3), expect=(HALF,))
    assert place(result)[2:4] == ("reduced_grad", "hidden.weight")
    assert codes(result)[0] == "reduction.missing"
    assert met(result).total > 0


def test_a_difference_that_exceeds_what_declared_inputs_explain_is_an_origin(judge: Judge) -> None:
    slightly = tampering(Kind.ACTIVATION, "hidden", "out", lambda v: v * np.float32(1 + 1e-4), step=0)

    class Both(slightly):  # type: ignore[misc,valid-type]
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.kind, at.name, at.slot, at.step) == (Kind.ACTIVATION, "head", "out", 0):
                return (value * np.float32(1.05)).astype(value.dtype)
            return np.asarray(super().tamper(at, value))

    rules = ("activation hidden out rel_l2=2e-4",)
    assert is_excused(judge(Program(), slightly(), expect=rules))
    result = judge(Program(), Both(), expect=rules)
    assert place(result) == (0, 0, "activation", "head", "out")


@pytest.mark.parametrize(
    "rule", ["schedule * lr factor=0.25", "schedule * lr rel_l2=0.4", "schedule * lr steps=1-2"]
)
def test_a_difference_that_is_not_as_declared_diverges(judge: Judge, rule: str) -> None:
    result = judge(Program(), Program(lr=5e-3), expect=(rule,))
    assert place(result)[:3] == (0, None, "schedule")
    assert codes(result)[0] == "optimizer.hyperparameter"
    if "steps" not in rule:
        assert "not as declared by --expect" in first(result).text
        assert met(result).rules[0].otherwise == 6


@pytest.mark.parametrize(
    ("rules", "excused"),
    [
        (("schedule optimizer.0.group.0 lr factor=2", "schedule * lr"), False),
        (("schedule * lr", "schedule optimizer.0.group.0 lr factor=2"), True),
    ],
    ids=["narrow first", "wide first"],
)
def test_the_first_rule_that_speaks_of_a_boundary_counts(
    judge: Judge, rules: tuple[str, ...], *, excused: bool
) -> None:
    assert is_excused(judge(Program(), Program(lr=5e-3), expect=rules)) is excused


def test_a_loss_divided_by_another_number_is_declared_by_its_factor(judge: Judge) -> None:
    class Summed(Program):
        def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
            return 8 * super().token_weight(counts, rank, microbatch)

    rules = ("loss * weight factor=8", "loss backward value")
    assert not judge(Program(), Summed())
    result = judge(Program(), Summed(), expect=rules)
    assert is_excused(result), result.headline
    assert not judge(Program(), Summed(), expect=("loss * weight factor=4", "loss backward value"))


def test_a_norm_that_couples_its_batch_is_told_by_its_cause(judge: Judge) -> None:
    # no such norm is in the program: what is declared by a cause that isn't found still diverges
    off = tampering(Kind.ACTIVATION, "hidden", "out", lambda v: v + 1)
    result = judge(Program(), off(), expect=("activation hidden out cause=batch.coupled",))
    assert place(result) == (0, 0, "activation", "hidden", "out")
    assert "not as declared by --expect" in first(result).text
    result = judge(Program(), off(), expect=("activation hidden out cause=value.offset",))
    assert is_excused(result), result.headline


@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.OPTIMIZER_STATE])
def test_what_only_one_run_has_is_declared_for_its_side_alone(judge: Judge, kind: Kind) -> None:
    fewer = lacking(kind, name="act" if kind is Kind.ACTIVATION else "hidden.bias")
    assert not judge(fewer(), Program())
    assert is_excused(judge(fewer(), Program(), expect=(f"{kind} * * only=b",)))
    assert not judge(fewer(), Program(), expect=(f"{kind} * * only=a",))
    assert not judge(fewer(), Program(), expect=(f"{kind} * *",))


def test_a_parameter_that_one_optimizer_lacks_is_declared_by_its_name(judge: Judge) -> None:
    class Frozen(Program):
        def groups(self) -> list[tuple[tuple[str, ...], dict[str, float]]]:
            return [(tuple(n for n in names if n != "hidden.bias"), own) for names, own in super().groups()]

    assert codes(judge(Program(), Frozen()))[0] == "optimizer.param_missing"
    rules = ("schedule hidden.bias members only=a", "optimizer_state,param hidden.bias *")
    with pytest.raises(BadRequest, match="kind"):  # lists are for files
        judge(Program(), Frozen(), expect=rules)
    rules = (
        "schedule hidden.bias members only=a",
        "optimizer_state hidden.bias * only=a",
        "param hidden.bias *",
    )
    result = judge(Program(), Frozen(), expect=rules)
    assert is_excused(result), result.headline
    assert not judge(Program(), Frozen(), expect=("schedule head.bias members only=a", *rules[1:]))


def test_states_that_were_declared_to_differ_at_the_start_do_not_end_the_comparison(judge: Judge) -> None:
    class Other(Program):
        def initial_params(self, rank: int) -> dict[str, np.ndarray]:
            found = super().initial_params(rank)
            return found | {"head.bias": found["head.bias"] + np.float32(0.01)}

    result = judge(Program(), Other(), expect=("param head.bias model steps=init",))
    assert is_excused(result), result.headline
    assert result.coverage.by_kind["activation"] > 0
    both = tampering(Kind.PARAM, "hidden.weight", "model", lambda v: -v, step=-1)
    result = judge(Program(), both(), expect=("param head.bias model steps=init",))
    assert place(result)[:4] == ("init", None, "param", "hidden.weight")


def test_a_rule_that_meets_nothing_is_told_with_what_may_have_been_meant(judge: Judge) -> None:
    result = judge(Program(), Program(order=1), expect=("activation hiden out", "schedule * lr"))
    assert result.headline.startswith("equivalent: ")
    typo, needless = met(result).rules
    assert (typo.met, typo.likely) == (0, "hidden")
    assert (needless.met, needless.declared) == (6, 0)


def test_rules_from_a_file_are_applied_in_order(judge: Judge, tmp_path: Path) -> None:
    path = tmp_path / "expect.toml"
    path.write_text(
        '[[expect]]\nkind = "schedule"\nname = "*"\nslot = "lr"\nfactor = "1/2"\nreason = "halved"\n'
        '[[expect]]\nkind = ["param", "buffer"]\nname = ["none*", "nothing"]\nslot = "*"\n'
    )
    result = judge(Program(), Program(lr=5e-3), expect=(str(path),))
    assert is_excused(result)
    assert [(rule.reason, rule.met > 0) for rule in met(result).rules] == [("halved", True), ("", False)]
    assert met(result).rules[0].place == f"{path}: rule 1"


BAD = [
    ("[[expect]]\nkind = 'schedule'\nname = '*'\nslot = 'lr'\nfactr = 2\n", "rule 1"),
    ("[[expect]]\nkind = '*'\nname = '*'\nslot = 'lr'\n[[expect]]\nkind = 'scedule'\nname='*'\nslot='*'\n",
     "rule 2: kind.*did you mean schedule"),
    ("[[expect]]\nkind = 'schedule'\nname = '*'\n", "slot.*rule 1"),
    ("[[expect]]\nkind = 'schedule'\nname = '*'\nslot = 'lr'\nfactor = 0\n", "rule 1: factor"),
    ("[[expect]]\nkind = 'schedule'\nname = '*'\nslot = 'lr'\nfactor = '1/0'\n", "rule 1: factor"),
    ("[[expect]]\nkind = 'schedule'\nname = '*'\nslot = 'lr'\nrel_l2 = -1.0\n", "rule 1: rel_l2"),
    ("[[expect]]\nkind = 'schedule'\nname = '*'\nslot = 'lr'\nrel_l2 = nan\n", "rule 1: rel_l2"),
    ("[[expect]]\nkind = 'schedule'\nname = '*'\nslot = 'lr'\nonly = 'b'\nfactor = 2\n", "rule 1: only"),
    ("[[expect]]\nkind = 'schedule'\nname = '*'\nslot = 'lr'\nonly = 'c'\n", "rule 1.*only|only.*rule 1"),
    ("[[expect]]\nkind = 'schedule'\nname = '*'\nslot = 'lr'\nsteps = '3-1'\n", "rule 1: steps"),
    ("[[expect]]\nkind = 'schedule'\nname = []\nslot = 'lr'\n", "rule 1: name"),
    ("[[expect]]\nkind = 'schedule'\nname = '*'\nslot = 'lr'\ncause = 'other'\n", "rule 1: cause"),
    ("[[expect]\n", "not TOML"),
    ("[[expects]]\n", "expect"),
    ("", "expect"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "complaint"), BAD, ids=lambda v: v[:0])
def test_a_file_that_is_no_file_of_rules_is_refused_in_one_line(
    judge: Judge, tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "expect.toml"
    path.write_text(text)
    with pytest.raises(BadRequest, match=complaint) as caught:
        judge(Path("nowhere"), Path("nowhere"), expect=(str(path),))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("schedule lr", "found 2 words"),
        ("schedul * lr", "did you mean schedule"),
        ("schedule * lr factr=2", "factr"),
        ("schedule * lr factor=2 factor=3", "factor"),
        ("schedule * lr factor=", "factor"),
        ("schedule * lr 'reason", "quotation"),
        ("no/such.toml", "cannot be read"),
        ("\0", "cannot be read"),
    ],
)
def test_a_rule_that_cannot_be_read_is_refused_in_one_line(judge: Judge, rule: str, complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint) as caught:
        judge(Path("nowhere"), Path("nowhere"), expect=(rule,))
    assert "\n" not in str(caught.value)
