"""One loss function under the several names that programs give it: fused, in two steps, by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from tensortrace.tracer.types import PART_OF_LOSS, Entry, Kind

BY_HAND = "log_softmax.gather"
FAMILIES = (
    frozenset({"cross_entropy", "nll_loss", BY_HAND}),
    frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"}),
)
"""Names whose sums, counts and token weights are those of one function."""


@dataclass(frozen=True)
class Names:
    """The name by which each loss of a run goes; by one name, what number each call of several has."""

    names: dict[str, str] = field(default_factory=dict)
    calls: dict[tuple[str, int], int] = field(default_factory=dict)


def one_name(a: Iterable[Entry], b: Iterable[Entry]) -> tuple[Names, Names]:
    """Return for each run by which name of the other a loss goes, where each run has one of a family.

    The name is a's, but that of torch's function where ``a`` has it written by hand. A part of a loss that is
    written by hand has no counterpart in the whole: it goes by no name, "". A function that the runs call
    unequally often, one with labels and the other with probabilities, computes other terms of the objective:
    it goes by two names, so that what comes of it is compared and not its sums.
    """
    found = tuple([e for e in entries if e.kind == Kind.LOSS] for entries in (a, b))
    names_a, names_b = ({e.name for e in entries} for entries in found)
    parts = {e.name for entries in found for e in entries if e.meta.op == PART_OF_LOSS}
    in_a: dict[str, str] = {}
    in_b: dict[str, str] = {}
    calls: tuple[dict[tuple[str, int], int], ...] = ({}, {})
    for family in FAMILIES:
        here, there = names_a & family, names_b & family
        if len(here) == len(there) == 1 and here != there:
            [x], [y] = here, there
            if BY_HAND in parts:
                (in_a if x == BY_HAND else in_b)[BY_HAND] = ""
            elif x == BY_HAND:
                in_a[x] = y
            else:
                in_b[y] = x
        for one, other, side, names in ((here, there, 1, in_b), (there, here, 0, in_a)):
            if len(one) == 1 and one < other and BY_HAND not in parts:  # some calls go by another name
                ordered = _in_order(found[side], other)
                if len(ordered) == len(_in_order(found[1 - side], one)):
                    names.update(dict.fromkeys(other, *one))
                    calls[side].update({call: number for number, call in enumerate(ordered)})
    forms_a, forms_b = (_forms(entries) for entries in found)
    for name in (names_a & names_b) - {*in_a, *in_b}:
        (calls_a, with_a), (calls_b, with_b) = forms_a[name], forms_b[name]
        if calls_a != calls_b and with_a != with_b:
            in_a[name], in_b[name] = f"{name} of {with_a}", f"{name} of {with_b}"
    return Names(in_a, calls[0]), Names(in_b, calls[1])


def _in_order(entries: Sequence[Entry], names: set[str]) -> list[tuple[str, int]]:
    """Return the calls of some losses in a microbatch, in the order in which they were first recorded."""
    return list(dict.fromkeys((e.name, e.call) for e in sorted(entries, key=_event) if e.name in names))


def _event(entry: Entry) -> int:
    return entry.event


def _forms(entries: Sequence[Entry]) -> dict[str, tuple[int, str]]:
    """Return how often each loss is called in a microbatch, and with what: labels are recorded."""
    calls: dict[str, set[int]] = defaultdict(set)
    labelled: dict[str, set[int]] = defaultdict(set)
    for entry in entries:
        calls[entry.name].add(entry.call)
        if entry.slot == "target":
            labelled[entry.name].add(entry.call)
    words = {name: ("labels" if labelled[name] else "") for name in calls}
    for name, found in calls.items():
        if found - labelled[name]:
            words[name] = f"{words[name]} and values".removeprefix(" and ")
    return {name: (len(found), words[name]) for name, found in calls.items()}


def under_name(entry: Entry, names: Names) -> Entry | None:
    """Return the entry of a loss under the name that both runs have it by; None where it is to have none."""
    if entry.kind != Kind.LOSS or entry.name not in names.names:
        return entry
    name, call = names.names[entry.name], names.calls.get((entry.name, entry.call), entry.call)
    return replace(entry, name=name, call=call) if name else None
