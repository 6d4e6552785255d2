"""One mistake planted in each layout: the diff names the first boundary where it acts.

``FIRST`` was written by hand from what each mistake does, before these tests first ran.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest

from tests.integration.layout_cases import PLANTS
from tests.integration.layouts import Case, Compared, Launched


@dataclass(frozen=True)
class At:
    """Where a mistake acts first; ``name`` is a glob where it acts in several places at once."""

    step: int | str
    kind: str
    name: str
    slot: str


FIRST = {
    # no gradient is averaged: ranks clip what each of them computed
    "ddp-no-sync": At(0, "clipped_grad", "*", "before"),
    # twice the mean
    "fsdp2-sum": At(0, "reduced_grad", "*", "grad"),
    # the last norm is outside FSDP: nobody averages its gradient
    "fsdp1-ignored": At(0, "clipped_grad", "norm.*", "before"),
    # sharded over the mesh of one replica: what it leaves on each is not averaged
    "hsdp-replicas": At(0, "reduced_grad", "*", "grad"),
    # the ranks that don't own the embedding's state keep its old value
    "zero1-stale": At(0, "param", "token.weight", "model"),
    # the shards hold value rows where key rows belong
    "tp-swapped": At("init", "param", "layers.1.attention.kv.weight", "model"),
    # silu of the wrong half: gate and up themselves are right
    "tp-exchanged": At(0, "activation", "layers.0.mlp.down", "in.0"),
    # two biases
    "tp-bias": At(0, "activation", "layers.1.attention.out", "out"),
    # each rank has the gradient that its own queries give; backward reaches the last layer first
    "tp-kv": At(0, "activation_grad", "layers.1.attention.kv", "out"),
    # each rank has the gradient of its own positions
    "tp-sp-norms": At(0, "clipped_grad", "*norm.*", "before"),
    # each stage has the gradient of its own use
    "pp-tied-apart": At(0, "clipped_grad", "token.weight", "before"),
    # every rank counts from 0
    "cp-positions": At(0, "activation", "position", "in.0"),
    # keys and values get the gradient of the rank's own queries only
    "cp-kv": At(0, "activation_grad", "layers.1.attention.kv", "out"),
    # experts are right, the answers go to the neighbours
    "ep-tokens": At(0, "activation", "layers.0.mlp", "out"),
    "fsdp2-tp-bias": At(0, "activation", "layers.1.attention.out", "out"),
    "dp-tp-pp-bias": At(0, "activation", "layers.1.attention.out", "out"),
}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched(tmp_path_factory.mktemp("mistakes"), PLANTS)


def parametrized(cases: list[Case]) -> list[object]:
    return [pytest.param(case, id=case.name) for case in cases]


def assert_named(case: Case, compared: Compared) -> None:
    assert compared.result.verdict == "divergent", compared.summary()
    first = compared.result.first_divergent
    assert first is not None
    at, wanted = first.where, FIRST[case.name]
    found = At(at.step, at.kind, at.name, at.slot)
    assert (found.step, found.kind, found.slot) == (wanted.step, wanted.kind, wanted.slot), compared.summary()
    assert fnmatchcase(found.name, wanted.name), compared.summary()


@pytest.mark.slow  # with its diffs two minutes; tests/integration/test_diff_resharded.py is quick
@pytest.mark.parametrize("case", parametrized([case for case in PLANTS if case.ranks == 2]))
def test_a_mistake_of_two_ranks_is_named_where_it_acts(launched: Launched, case: Case) -> None:
    assert_named(case, launched.diff(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", parametrized([case for case in PLANTS if case.ranks > 2]))
def test_a_mistake_of_more_ranks_is_named_where_it_acts(launched: Launched, case: Case) -> None:
    assert_named(case, launched.diff(case))
