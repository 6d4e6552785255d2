"""Declared differences as text: each rule with what it met, and what was not judged."""

from __future__ import annotations

import json

import msgspec

from tensortrace.cli.render.text import render
from tensortrace.diff.result import Declared, Expectation, Result
from tests.unit.cli.samples import EQUIVALENT, LR

RULE = Expectation("schedule * lr factor=0.5", "--expect", "halved", 10, 10, 0)
TYPO = Expectation("activation hiden out", "e.toml: rule 2", "", 0, 0, 0, "hidden")
NEEDLESS = Expectation("param * *", "e.toml: rule 3", "", 12, 0, 0)
BROKEN = Expectation("loss * weight", "e.toml: rule 4", "", 3, 1, 2)
FOUND = msgspec.structs.replace(LR, role="declared")


def declaring(*rules: Expectation, downstream: int = 0, unjudged: int = 0) -> Result:
    found = Declared(rules, (FOUND,), 10, downstream, unjudged)
    return msgspec.structs.replace(EQUIVALENT, declared=found)


def flowing(result: Result) -> str:
    return " ".join(render(result).split())


def test_each_rule_says_what_it_met_and_why_it_stands() -> None:
    text = flowing(declaring(RULE, NEEDLESS, BROKEN))
    assert "declared: schedule * lr factor=0.5 (halved): of 10 boundaries 10 differ as declared" in text
    assert "param * *: of 12 boundaries none differs by itself: the rule is not needed" in text
    assert "loss * weight: of 3 boundaries 1 differ as declared, 2 otherwise" in text


def test_a_rule_that_met_nothing_stands_first() -> None:
    text = flowing(declaring(RULE, TYPO))
    assert "activation hiden out: matches no boundary; did you mean hidden?" in text
    assert text.index("hiden") < text.index("schedule * lr")


def test_what_was_not_judged_is_said() -> None:
    assert "downstream" not in flowing(declaring(RULE))
    text = flowing(declaring(RULE, downstream=1280, unjudged=912))
    assert "1,280 boundaries differ because of what was declared; 912 of these were not judged" in text


def test_declared_findings_are_flat_in_json_as_others_are() -> None:
    document = json.loads(declaring(RULE, downstream=3).to_json())
    assert document["declared"]["downstream"] == 3
    assert document["declared"]["findings"][0]["kind"] == "schedule"
    assert document["declared"]["findings"][0]["role"] == "declared"
    assert document["declared"]["rules"][0]["declared"] == 10
    assert json.loads(EQUIVALENT.to_json())["declared"] is None
