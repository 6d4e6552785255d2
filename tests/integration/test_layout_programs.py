"""The training programs of the layout table compute what one rank computes, no recorder being near.

In float64 a layout's round-off is below 1e-10 of the weights; a mistake in a program would be far above.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.layout_cases import CASES, PLANTS
from tests.integration.layouts import Case, Ran, launch, references

COUPLED = {"ddp-batch-norm"}  # each rank's batch norm sees other rows than one rank's

ALLOWED = {"float64": (1e-10, 1e-9), "float32": (1e-5, 2e-3)}
"""Of losses and weights; in float32 the first step of Adam makes 0.01 of the sign of a rounding error."""


def dtype(case: Case) -> str:
    return "float32" if "fsdp1" in case.spread else "float64"  # FSDP1 computes its norm in float32


class Trained:
    """Trains cases and their references, each size and dtype in one launch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ran: dict[tuple[int, str], Ran] = {}

    def train(self, ranks: int, cases: list[Case]) -> None:
        for name in ALLOWED:
            mine = [case for case in cases if dtype(case) == name]
            folder = self.folder / f"{ranks}.{name}"
            if mine:
                self.ran[ranks, name] = launch(folder, ranks, mine, "--dtype", name, recorded=False)
                self.ran[-ranks, name] = launch(
                    folder / "alone", 1, references(mine), "--dtype", name, recorded=False
                )

    def differences(self, case: Case) -> tuple[float, float]:
        """Return how far losses and weights are from those of one rank."""
        ran, alone = self.ran[case.ranks, dtype(case)], self.ran[-case.ranks, dtype(case)]
        mine, other = self.computed(ran, case), self.computed(alone, case.reference())
        loss = max(abs(x - y) for x, y in zip(mine[0], other[0], strict=True))
        assert mine[1].keys() - {"head.weight"} == other[1].keys() - {"head.weight"}
        weights = max(float((mine[1][n] - w).abs().max()) for n, w in other[1].items())
        return loss, weights

    @staticmethod
    def computed(ran: Ran, case: Case) -> tuple[list[float], dict[str, Tensor]]:
        losses = ran.told(case)[0]["losses"]
        assert isinstance(losses, list)
        return losses, torch.load(ran.folder / f"{case.name}.pt", weights_only=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return what trains nothing yet."""
    return Trained(tmp_path_factory.mktemp("programs"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_layout_computes_what_one_rank_computes(trained: Trained, ranks: int) -> None:
    cases = [case for case in CASES if case.ranks == ranks]
    trained.train(ranks, cases)
    wrong = {}
    for case in cases:
        found = trained.differences(case)
        equal = all(x <= y for x, y in zip(found, ALLOWED[dtype(case)], strict=True))
        if equal == (case.name in COUPLED):
            wrong[case.name] = found
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_planted_mistake_changes_what_is_computed(trained: Trained, ranks: int) -> None:
    plants = [case for case in PLANTS if case.ranks == ranks]
    trained.train(ranks, plants)
    # AdamW forgives a gradient of another scale almost wholly: what matters is that the weights
    # are far outside what correct programs differ by.
    same = {}
    for case in plants:
        found = trained.differences(case)[1]
        if found < 10 * ALLOWED[dtype(case)][1]:
            same[case.name] = found
    assert same == {}
