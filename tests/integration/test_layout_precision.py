"""Precisions, checkpoints and optimizers on layouts: invisible, equivalent to one rank, mistakes named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.layouts import Case, Compared, Ran, diffed, launch, references
from tests.integration.precision_cases import FOUR, PLANTS, PRECISE, WITHOUT
from tests.integration.test_layout_invisibility import assert_recorded
from tests.integration.test_layout_table import assert_equivalent_and_complete, kinds

pytestmark = pytest.mark.slow

PARTS = 4
"""The cases of two ranks are dealt to so many tests, each of four launches."""

SCALED = "unscaled_grad"


def compare(alone: Ran, traced: Ran, case: Case) -> Compared:
    return diffed(alone.trace(case.reference()), traced.trace(case))


def assert_as_one_rank(folder: Path, ranks: int, cases: list[Case]) -> None:
    """Train the cases with and without recording, their references with; both promises must hold."""
    plain = launch(folder / "plain", ranks, cases, recorded=False)
    traced = launch(folder / "traced", ranks, cases)
    assert "tensortrace" not in (traced.folder / "errors.txt").read_text(), "the recorder had nothing to say"
    alone = launch(folder / "alone", 1, references(cases))
    assert [case.name for case in cases if plain.told(case) != traced.told(case)] == []
    for case in cases:
        assert_recorded(traced, case)
        more = {SCALED} if "amp-fp16" in case.model else {"buffer"} if "average" in case.model else set()
        assert_equivalent_and_complete(case, compare(alone, traced, case), kinds(case) | more)


@pytest.mark.parametrize("part", range(PARTS))
def test_two_ranks_are_as_one_bit_by_bit_when_recorded(tmp_path: Path, part: int) -> None:
    assert_as_one_rank(tmp_path, 2, PRECISE[part::PARTS])


def test_four_ranks_are_as_one_bit_by_bit_when_recorded(tmp_path: Path) -> None:
    assert_as_one_rank(tmp_path, 4, FOUR)


EXPECTED = {
    "ddp-scaled-when-clipped": (1, "clipped_grad", "clip.before_unscale"),
    "fsdp2-scaled-when-clipped": (1, "clipped_grad", "clip.before_unscale"),
    "tp-skips-alone": (1, "schedule", "step.skipped_on_some_ranks"),
    "ddp-reduced-in-fp16": (0, "reduced_grad", "precision.reduce_dtype"),
    "fsdp2-reduced-in-bf16": (0, "reduced_grad", "precision.rounded"),  # each rank's own were in bf16 before
    "fsdp1-recomputed-anew": (0, "activation", "recompute.differs"),
}
"""Step, kind and cause of the first divergent boundary, as worked out from what each mistake does."""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran]:
    folder = tmp_path_factory.mktemp("planted")
    traced = launch(folder / "two", 2, [*PLANTS, *WITHOUT.values()])
    return launch(folder / "one", 1, references(PLANTS)), traced


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in PLANTS])
def test_a_mistake_of_precision_is_named_where_it_acts_first(planted: tuple[Ran, Ran], case: Case) -> None:
    alone, traced = planted
    without = WITHOUT.get(case.name)
    reference = traced.trace(without) if without else alone.trace(case.reference())
    compared = diffed(reference, traced.trace(case))
    first = compared.result.first_divergent
    assert first is not None
    found = first.where.step, first.where.kind, compared.result.causes[0].code
    assert found == EXPECTED[case.name], compared.summary()
