"""Rows first in one run, positions first in the other: one size in each run says which is which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortrace.tracer.types import ROOT, Kind
from tests.integration.judged import Judge, assert_equivalent, judge_in, place
from tests.simulated import Documents, Program
from tests.synthetic import Tensor

PASSES = (Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION_GRAD)
INNER = ("hidden", "act")


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    return judge_in(tmp_path)


class Turned(Program):
    """Records what some modules are given and make with the positions first; flattened where ``flat``."""

    modules: tuple[str, ...] = INNER
    flat = False
    square = False

    def documents(self, step: int) -> Documents:
        found = super().documents(step)
        if self.square:  # as many positions as rows, on every rank and in every microbatch
            count = self.setup.rows // self.setup.ranks // self.setup.accumulate
            rng = np.random.default_rng(step)
            return [rng.integers(1, 23, size=count + 1) for _ in found]
        return found

    def run(self) -> list[list[Tensor]]:
        self.records = [[self.turned(r) for r in records] for records in super().run()]
        return self.records

    def turned(self, record: Tensor) -> Tensor:
        fields, value = record
        if fields["kind"] == Kind.LOSS and fields["slot"] == "target" and ROOT in self.modules:
            return fields, self.target(fields, value)
        if fields["kind"] not in PASSES or fields["name"] not in self.modules:
            return record
        found = np.swapaxes(value, 0, 1)
        if self.flat and found.ndim > 2:
            found = found.reshape(-1, *found.shape[2:])
        return self.planted(fields, np.ascontiguousarray(found))

    def target(self, fields: dict[str, Any], value: np.ndarray) -> np.ndarray:
        """Return the labels with the positions first, as many rows as this rank has in a microbatch."""
        rows = self.setup.rows // self.setup.ranks // self.setup.accumulate
        return np.ascontiguousarray(value.reshape(rows, -1).T).reshape(-1)

    def planted(self, fields: dict[str, Any], value: np.ndarray) -> Tensor:
        return fields, value


class Flat(Turned):
    flat = True


class Square(Turned):
    square = True


class AllTurned(Turned):
    modules = (ROOT, "embed", *INNER, "head")


class AllFlat(AllTurned):
    """The root is given tokens positions first, and everything else is flattened."""

    flat = True


class SquareReference(Square):
    modules = ()


SPLITS = [{}, {"accumulate": 4}, {"ranks": 2}, {"ranks": 2, "accumulate": 2, "rows": 12}]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("program", [Turned, Flat, AllTurned, AllFlat])
def test_positions_first_meet_rows_first(judge: Judge, program: type[Program], split: Any) -> None:
    rows = {"rows": split["rows"]} if "rows" in split else {}
    assert_equivalent(judge(Program(order=1, **rows), program(**split)))
    assert_equivalent(judge(program(**split), Program(order=1, **rows)))


@pytest.mark.parametrize("split", [{}, {"ranks": 2}])
def test_as_many_rows_as_positions_meet_by_value(judge: Judge, split: Any) -> None:
    assert_equivalent(judge(SquareReference(order=1, **split), Square(**split)))


class RowsSwapped(Turned):
    """Two rows change places in what one module is given, where positions come first."""

    def planted(self, fields: dict[str, Any], value: np.ndarray) -> Tensor:
        if (fields["name"], fields["kind"], fields["step"]) == ("act", Kind.ACTIVATION, 1):
            value = value.copy()
            value[:, [0, 1]] = value[:, [1, 0]]
        return fields, value


class FlatSwapped(RowsSwapped):
    flat = True

    def planted(self, fields: dict[str, Any], value: np.ndarray) -> Tensor:
        if (fields["name"], fields["kind"], fields["step"]) == ("act", Kind.ACTIVATION, 1):
            value = value.copy()
            value[[0, 2]] = value[[2, 0]]  # the first tokens of two rows
        return fields, value


class SquareSwapped(RowsSwapped):
    square = True


class OneOff(Turned):
    """One element is wrong by a thousandth of the greatest."""

    def planted(self, fields: dict[str, Any], value: np.ndarray) -> Tensor:
        if (fields["name"], fields["kind"], fields["step"]) == ("act", Kind.ACTIVATION, 1):
            value = value.copy()
            value[0, 1, 2] += np.float32(1e-3) * np.abs(value).max()
        return fields, value


@pytest.mark.parametrize("program", [RowsSwapped, FlatSwapped, SquareSwapped, OneOff])
def test_a_mistake_is_found_whatever_comes_first(judge: Judge, program: type[Turned]) -> None:
    reference = SquareReference if program.square else Program
    result = judge(reference(order=1), program())
    assert place(result) == (1, 0, "activation", "act", "in.0")
