"""Rules of boundaries from what was found of each, one for those that differ in a number only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from tensortrace.diff.infer.found import Body, FoundRule
from tensortrace.diff.infer.names import glob_of
from tensortrace.tracer.types import Kind

BY_VALUE = "by shape and value at the first microbatch"
BY_SHAPE = "by shape alone: the values are not the other run's"


class Guess(NamedTuple):
    """A boundary's rule, from the values or, where these differ from the reference's, from shapes alone."""

    body: Body
    by_value: bool


def rules_of(found: Mapping[tuple[str, str, str], Mapping[Kind, Guess]]) -> dict[str, list[FoundRule]]:
    """Return rules of boundaries from what was found of values, and of gradients where they differ."""
    grouped: dict[str, list[FoundRule]] = defaultdict(list)
    for (name, slot, what), by_kind in found.items():
        values = [by_kind[kind] for kind in (Kind.ACTIVATION, Kind.INPUT, Kind.LOSS) if kind in by_kind]
        grads = [by_kind[Kind.ACTIVATION_GRAD]] if Kind.ACTIVATION_GRAD in by_kind else []
        body, by_value = (values or grads)[0]
        if values and grads and grads[0].by_value and grads[0].body.dims != body.dims:
            sizes = tuple(dict([*body.sizes, *grads[0].body.sizes]).items())
            body = replace(body, grad=grads[0].body.dims, sizes=sizes)
        kinds = ("loss",) if what == "loss" else ("input", "activation", "activation_grad")
        evidence = BY_VALUE if by_value else BY_SHAPE
        grouped[f"{glob_of(name)} {slot} {what}"].append(FoundRule(name, slot, kinds, body, evidence))
    return grouped


def merged(grouped: dict[str, list[FoundRule]]) -> list[FoundRule]:
    """Return one rule for each group of names that differ in a number only; those that deviate go first."""
    first, rest = [], []
    for key, rules in grouped.items():
        glob = key.split(" ")[0]
        sure = [rule for rule in rules if rule.evidence != BY_SHAPE]
        rules = sure or rules  # what one layer's values tell holds for layers whose values are off
        usual = Counter(rule.body for rule in rules).most_common()[0][0]
        first += [rule for rule in rules if rule.body != usual]
        same = [rule for rule in rules if rule.body == usual]
        evidence = (
            f"{same[0].evidence}: {len(same)} of {len(rules)} such tensors"
            if len(rules) > 1
            else same[0].evidence
        )
        rest.append(replace(same[0], name=glob, evidence=evidence))
    return [*first, *rest]
