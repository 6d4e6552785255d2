"""Tests of what a promise selects."""

from __future__ import annotations

import pytest

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.selection import Selection, parse_kinds, parse_promise, parse_steps
from tensortrace.tracer.types import Kind, Promise


def test_an_empty_promise_wants_everything() -> None:
    selection = Selection(Promise())
    assert all(selection.wants(kind, "layers.0.attn", step=step) for kind in Kind for step in (-1, 0, 10**6))


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("5", ((5, 5),)),
        ("100,5-7", ((5, 7), (100, 100))),
        ("1-3,4-6", ((1, 6),)),
        ("2-9,3-4", ((2, 9),)),
        ("init", ((-1, -1),)),
        ("init, 7", ((-1, -1), (7, 7))),
    ],
)
def test_steps_are_parsed_sorted_and_merged(text: str, ranges: tuple[tuple[int, int], ...]) -> None:
    assert parse_steps(text) == ranges


def test_a_range_from_zero_includes_the_initial_state() -> None:
    assert parse_steps("0-3,100") == ((-1, 3), (100, 100))


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "1,,2", "init-3", "0x1"])
def test_malformed_steps_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="--steps"):
        parse_steps(text)


def test_kinds_come_in_the_order_of_the_ladder() -> None:
    assert parse_kinds("param, loss") == (Kind.LOSS, Kind.PARAM)


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(BadRequest, match="'weights'"):
        parse_kinds("loss,weights")


def test_a_star_matches_dots_and_case_matters() -> None:
    selection = Selection(parse_promise(include=["layers.*"]))
    assert selection.wants(Kind.PARAM, "layers.0.attn.weight", step=0)
    assert not selection.wants(Kind.PARAM, "Layers.0", step=0)
    assert not selection.wants(Kind.PARAM, "model.layers.0", step=0)


def test_exclude_wins_over_include() -> None:
    selection = Selection(parse_promise(include=["*.attn*", "(root)"], exclude=["*.bias"]))
    assert selection.wants(Kind.PARAM, "h.attn.weight", step=0)
    assert not selection.wants(Kind.PARAM, "h.attn.bias", step=0)
    assert selection.wants(Kind.INPUT, "(root)", step=0)
    assert not selection.wants(Kind.PARAM, "h.mlp.weight", step=0)


def test_steps_kinds_and_names_must_all_agree() -> None:
    selection = Selection(parse_promise(steps="2", kinds="loss", include=["cross*"]))
    assert selection.wants(Kind.LOSS, "cross_entropy", step=2)
    assert not selection.wants(Kind.LOSS, "cross_entropy", step=1)
    assert not selection.wants(Kind.PARAM, "cross_entropy", step=2)
    assert not selection.wants(Kind.LOSS, "mse_loss", step=2)
