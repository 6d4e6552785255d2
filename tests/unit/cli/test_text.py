"""The outcome of a diff as text, from hand-made results."""

from __future__ import annotations

import math
import unicodedata

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from tensortrace.cli.render.page import Look
from tensortrace.cli.render.text import ROWS, hints, render
from tensortrace.diff.result import Coverage, Judgement, Metrics, Missing, Power, Result, Where
from tests.unit.cli.samples import COVERAGE, DIVERGENT, EQUIVALENT, INCOMPLETE, LR, TOKEN_WEIGHT, where

replace = msgspec.structs.replace


def flowing(result: Result, **options: str) -> str:
    """Return the text with every wrap undone."""
    return " ".join(render(result, **options).split())  # type: ignore[arg-type]


def test_the_verdict_and_the_headline_stand_first() -> None:
    first = render(DIVERGENT).splitlines()[0]
    assert first == "DIVERGENT: the loss weighs tokens differently (scale.token_ratio)"


def test_a_headline_that_repeats_the_verdict_is_not_printed_twice() -> None:
    result = replace(DIVERGENT, headline="divergent at step 0: loss")
    assert render(result).startswith("DIVERGENT at step 0: loss\n")


def test_what_the_headline_says_is_not_said_again() -> None:
    cause = DIVERGENT.causes[0]
    result = replace(DIVERGENT, headline=f"divergent at step 0: {cause.text}; {TOKEN_WEIGHT.text}")
    text = flowing(result)
    assert text.count(cause.text) == 1
    assert text.count(TOKEN_WEIGHT.text) == 1
    assert "cause scale.token_ratio: as the headline says" in text


def test_a_single_number_is_told_by_both_values() -> None:
    metrics = Metrics(elements=1, equal=False, rel_l2=1.0, max_abs=1e-3, max_abs_a=1e-3, max_abs_b=2e-3)
    finding = replace(LR, metrics=metrics, dtype_a="float64", dtype_b="float64")
    text = flowing(replace(DIVERGENT, first_divergent=finding, causes=()))
    assert "relative L2 error 1; float64 a 0.001, b 0.002 compared exactly: values of the update" in text


def test_quiet_is_the_headline_alone() -> None:
    assert render(DIVERGENT, detail="quiet").count("\n") == 1


@pytest.mark.parametrize(
    "part",
    [
        "first divergent boundary: step 0, microbatch 0: loss cross_entropy weight",
        "the token weights in cross_entropy, called at train_gpt.py:88, on ranks 0-1 of b",
        "9 of 12 elements outside, relative L2 error 0.3535; float64 [12]",
        "greatest absolute difference 0.08333 at [8]: a 0.1667, b 0.25",
        "greatest relative difference 0.5 at [9], at most 4.2e6 ULP",
        "error 0.3535, allowed 1e-6 by the error model: 3.536e5 times as much (c·eps of float32",
    ],
)
def test_a_mismatch_is_told_in_five_parts(part: str) -> None:
    assert part in flowing(DIVERGENT)


def test_the_cause_shows_its_number_the_known_quantity_and_both_residuals() -> None:
    text = flowing(DIVERGENT)
    assert "cause scale.token_ratio: local means are averaged" in text
    assert "measured 0.75 = tokens of rank 0 over the mean per rank: 6/8" in text
    assert "falls from 0.3535 to 2.1e-8 (floor 1e-6)" in text


def test_a_divergence_without_a_cause_is_called_unexplained() -> None:
    assert "cause: unexplained" in flowing(replace(DIVERGENT, causes=()))


def test_the_first_origin_is_not_listed_again_among_the_further_ones() -> None:
    text = flowing(DIVERGENT)
    assert "1 further origin" in text
    assert text.count("cross_entropy weight") == 1
    assert "schedule optimizer.0.group.1 lr" in text


def test_further_origins_are_bounded_and_the_rest_is_counted() -> None:
    many = tuple(replace(LR, where=where("param", f"p{n}", "model")) for n in range(ROWS + 5))
    result = replace(DIVERGENT, origins=many)
    assert f"p{ROWS - 1} model … 5 more with -v or in --json" in flowing(result)
    assert f"p{ROWS + 4} model" in flowing(result, detail="verbose")


def test_receivers_are_counted_and_not_listed() -> None:
    assert "receivers: 317 boundaries downstream of these" in flowing(DIVERGENT)


def test_coverage_says_what_was_compared_by_kind() -> None:
    expected = "compared: 1,204 boundaries, 803 bitwise equal: 4 input, 600 activation, 600 param"
    assert expected in flowing(DIVERGENT)


def test_the_policy_and_the_power_stand_on_one_line() -> None:
    assert "policy: error model; flags errors above 1.2e-6 (coherent), 3.4e-4 (incoherent)\n" in (
        render(EQUIVALENT)
    )


def test_a_boundary_that_hides_great_errors_is_named() -> None:
    at = Where(2, None, "reduced_grad", "key.bias", "grad", 0)
    weak = msgspec.structs.replace(EQUIVALENT, power=Power(None, 3.3, at, None, 2e-6))
    said = "flags errors above 3.3 (incoherent) at reduced_grad key.bias grad; at most boundaries 2e-6"
    assert said in flowing(weak)


def test_both_sides_are_shown() -> None:
    assert "b: runs/b: 2 ranks, 5 steps, 4 microbatches a step, finished" in flowing(DIVERGENT)


@pytest.mark.parametrize("missing", [0, 3])
def test_an_equivalent_outcome_takes_three_to_six_lines(missing: int) -> None:
    groups = tuple(
        Missing("b", "rng", f"reason {n}", 2, (where("rng", "cpu", "state"),), counts_as_incomplete=False)
        for n in range(missing)
    )
    result = replace(EQUIVALENT, coverage=replace(COVERAGE, missing=groups))
    assert 3 <= render(result).count("\n") <= 6


def test_what_an_equivalent_outcome_did_not_compare_is_still_counted() -> None:
    group = Missing("b", "rng", "never judged", 2, (), counts_as_incomplete=False)
    result = replace(EQUIVALENT, coverage=replace(COVERAGE, missing=(group,)))
    assert "not compared: 2 boundaries in 1 group" in flowing(result)
    assert "not compared: 2 rng only in b: never judged" in flowing(result, detail="verbose")


def test_missing_boundaries_stand_before_those_that_nobody_promised() -> None:
    text = flowing(INCOMPLETE)
    lost = "missing: 24 param only in a: rank 1 of b ended before (e.g. step 3: param fc.weight model)"
    assert lost in text
    assert text.index(lost) < text.index("not compared: 9 rng only in b: not judged")


def test_a_recording_that_lost_something_is_told_without_a_kind() -> None:
    group = Missing("b", "any", "rank 1 dropped boundaries: 3 full", 3, (), counts_as_incomplete=True)
    result = replace(INCOMPLETE, coverage=replace(COVERAGE, missing=(group,), complete=False))
    assert "missing: in b: rank 1 dropped boundaries: 3 full" in flowing(result)


def test_problems_of_a_trace_are_told_beside_it() -> None:
    assert "killed rank 1: the index ends without a manifest" in flowing(INCOMPLETE)


def test_an_infinite_error_and_an_exact_comparison_are_told_as_such() -> None:
    finding = replace(
        TOKEN_WEIGHT,
        metrics=Metrics(elements=4, equal=False, rel_l2=math.inf, nonfinite_b=2),
        judgement=Judgement("exact", 0.0, 1.0, math.inf, "integers"),
    )
    text = flowing(replace(DIVERGENT, first_divergent=finding, origins=(finding,)))
    assert "4 elements, relative L2 error inf" in text
    assert "compared exactly: integers" in text
    assert "NaN or Inf: 0 elements of a, 2 of b" in text


def test_a_boundary_that_only_the_reference_has_names_the_reference_ranks() -> None:
    finding = replace(TOKEN_WEIGHT, metrics=None, dtype_b=None)
    assert "on ranks 0-1 of a" in flowing(replace(DIVERGENT, first_divergent=finding))


def test_the_next_command_shows_the_first_divergent_boundary() -> None:
    assert hints(DIVERGENT) == (
        "record with --zoom head to name the operation",
        "next: trace show runs/b --step 0 --kind loss --name cross_entropy --values",
    )


def test_the_next_command_counts_steps_as_the_shown_trace_does() -> None:
    finding = replace(TOKEN_WEIGHT, where=where(step=100))
    result = replace(DIVERGENT, first_divergent=finding, step_offset=98)
    assert hints(result)[-1].startswith("next: trace show runs/b --step 2 ")


def test_there_is_no_next_command_after_equivalent_runs() -> None:
    assert hints(EQUIVALENT) == ()


def test_the_next_command_after_a_damaged_trace_is_a_check() -> None:
    assert hints(INCOMPLETE) == ("next: trace check runs/b",)


def test_a_name_with_shell_syntax_is_quoted_in_the_next_command() -> None:
    finding = replace(TOKEN_WEIGHT, where=where("param", "x; rm -rf ~", "model"))
    assert "--name 'x; rm -rf ~' --values" in hints(replace(DIVERGENT, first_divergent=finding))[-1]


hostile = st.text(st.characters(codec=None), max_size=300) | st.just("\x1b]0;owned\x07[bold]" * 20)


@settings(max_examples=60, deadline=None)
@given(hostile, st.sampled_from(["normal", "verbose"]), st.sampled_from([80, 40]))
def test_hostile_strings_neither_drive_the_terminal_nor_break_the_page(
    text: str, detail: str, width: int
) -> None:
    place = where(text, text, text)
    finding = replace(
        TOKEN_WEIGHT, where=place, text=text, dtype_a=text, source=text, inputs=(text,), evidence=(text,),
        judgement=replace(TOKEN_WEIGHT.judgement, reason=text),
    )  # fmt: skip
    missing = Missing("a", text, text, 1, (place,), counts_as_incomplete=True)
    cause = replace(DIVERGENT.causes[0], code=text, text=text, equals=text, evidence=(text,))
    side = replace(DIVERGENT.a, path=text, ended=text, problems=(text,))
    result = replace(
        DIVERGENT, headline=text, first_divergent=finding, origins=(finding, replace(finding, text="")),
        causes=(cause,), a=side, policy=text, notes=(text,), hints=(text,),
        coverage=Coverage(1, 0, {text: 1}, (missing,), complete=False),
    )  # fmt: skip
    out = render(result, look=Look(width), detail=detail)  # type: ignore[arg-type]
    assert max(cell_len(line) for line in out.splitlines()) <= width
    for line in (*out.splitlines(), *hints(result)):
        assert not [c for c in line if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
