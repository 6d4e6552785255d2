"""Boundaries in plain words."""

from __future__ import annotations

import pytest

from tensortrace.cli.render import words
from tensortrace.diff.result import Where
from tests.unit.cli.samples import where


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (where(), "token weights in cross_entropy"),
        (where(slot="sum", call=1), "sum of the token losses in cross_entropy, call 1"),
        (where("loss", "backward", "value"), "loss that backward starts from"),
        (where("activation", "h.0", "out"), "output of h.0"),
        (where("activation", "h.0", "in.1"), "input of h.0 (in.1)"),
        (where("activation_grad", "h.0", "out.0"), "gradient at the output of h.0 (out.0)"),
        (where("input", "(root)", "in.0"), "input given to the model (in.0)"),
        (where("local_grad", "fc.w", "grad"), "local gradient of fc.w, before any reduction"),
        (
            where("local_grad", "fc.w", "grad", microbatch=None),
            "local gradient of fc.w summed over the window, before any reduction",
        ),
        (where("local_grad", "wte", "use.head"), "local gradient of wte from one of its uses (use.head)"),
        (where("reduced_grad", "fc.w", "grad", call=2), "gradient of fc.w after reduction 2"),
        (where("clipped_grad", "fc.w", "before", call=1), "gradient of fc.w before clip 1"),
        (where("clipped_grad", "fc.w", "grad", call=1), "gradient of fc.w after clip 1"),
        (
            where("clipped_grad", "fc.w", "grad", microbatch=None),
            "gradient of fc.w that the optimizer consumes",
        ),
        (where("clipped_grad", "(clip)", "coefficient"), "coefficient of clip 0"),
        (where("schedule", "optimizer.0.group.1", "lr", microbatch=None), "lr of optimizer.0.group.1"),
        (
            where("optimizer_state", "fc.w", "exp_avg", microbatch=None),
            "optimizer's exp_avg of fc.w after the update",
        ),
        (where("param", "fc.w", "model", step="init", microbatch=None), "fc.w at init"),
        (where("collective", "all_reduce", "in", microbatch=None), "input of the collective all_reduce"),
        (where("new_kind", "x", "y"), "y of x"),
    ],
)
def test_a_boundary_is_described(place: Where, text: str) -> None:
    assert words.boundary(place) == text


def test_the_moment_names_step_and_microbatch() -> None:
    assert words.moment(where(step=3, microbatch=1)) == "step 3, microbatch 1"
    assert words.moment(where(step="init", microbatch=None)) == "init"


def test_the_key_shows_a_call_only_where_there_was_an_earlier_one() -> None:
    assert words.key(where("param", "fc.w", "model")) == "param fc.w model"
    assert words.key(where("param", "fc.w", "model", call=1)) == "param fc.w model [1]"


def test_braces_in_a_name_are_text() -> None:
    assert words.boundary(where("param", "{slot}", "model")) == "{slot} after the update"
