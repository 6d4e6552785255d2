"""With ``--dedup-replicas`` one rank stores what several have, and a diff says the same as without."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tensortrace.cli.main import run
from tensortrace.diff import compare
from tensortrace.tracer.errors import NotKept
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.replicas import Spares, is_spare
from tensortrace.tracer.types import Kind, Mesh, Placement, Promise, Shard
from tests.integration.judged import Judge, codes, first
from tests.simulated import At, Program
from tests.synthetic import boundary_of, write_trace

MESHES = {"m": Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3))}
COPY, DATA, CUT = Placement("replicate"), Placement("data"), Placement("shard", dim=0)
DEDUP = Promise(dedup_replicas=True)
BIG = np.arange(600, dtype="f4").reshape(60, 10)


@pytest.mark.parametrize(
    ("kind", "coordinate", "placements", "spare"),
    [
        (Kind.PARAM, (0, 0), (COPY, COPY), False),
        (Kind.PARAM, (1, 0), (COPY, COPY), True),
        (Kind.PARAM, (0, 1), (COPY, CUT), False),
        (Kind.PARAM, (1, 1), (COPY, CUT), True),
        (Kind.ACTIVATION, (1, 0), (DATA, COPY), False),
        (Kind.ACTIVATION, (1, 1), (DATA, COPY), True),
        (Kind.REDUCED_GRAD, (1, 1), (COPY, COPY), True),
        (Kind.BUFFER, (1, 1), (COPY, COPY), False),
        (Kind.INPUT, (1, 1), (COPY, COPY), False),
    ],
)  # fmt: skip
def test_the_first_of_each_set_of_copies_stores(
    kind: Kind, coordinate: tuple[int, ...], placements: tuple[Placement, ...], spare: bool
) -> None:
    shard = Shard("m", coordinate, placements, (4,))
    assert is_spare(boundary_of(0, BIG, kind=kind, shard=shard)) == spare
    assert not is_spare(boundary_of(0, BIG, kind=kind))


def left_by(*boundaries: tuple[Kind, str]) -> list[bool]:
    """Return which of a second rank's boundaries of step 0 are left to the first; all declare copies."""
    spares = Spares()
    shard = Shard("ddp", (1,), (COPY,), BIG.shape)
    return [
        spares.leaves(boundary_of(0, BIG, kind=kind, name=name, shard=shard), f"digest {number}")
        for number, (kind, name) in enumerate(boundaries)
    ]


GRADIENTS = [(Kind.REDUCED_GRAD, "a"), (Kind.REDUCED_GRAD, "b")]


@pytest.mark.parametrize(("others", "left"), [(("a", "b"), True), (("a",), False)])
def test_what_optimizers_make_is_left_by_ranks_that_have_it_of_all_parameters(
    others: tuple[str, ...], left: bool
) -> None:
    """From the second step on; ranks that share the updates out (ZeRO) have each what no other has."""
    first = [(Kind.OPTIMIZER_STATE, name) for name in others]
    found = left_by(*GRADIENTS, *first, (Kind.OPTIMIZER_STATE, "a"))
    assert found == [True, True, *([False] * len(others)), left]


@pytest.mark.parametrize(("others", "left"), [(("a", "b"), True), (("a",), False)])
def test_parameters_are_left_at_once_by_ranks_that_have_the_state_of_all(
    others: tuple[str, ...], left: bool
) -> None:
    first = [(Kind.OPTIMIZER_STATE, name) for name in others]
    found = left_by(*GRADIENTS, *first, (Kind.PARAM, "a"), (Kind.PARAM, "b"))
    assert found == [True, True, *([False] * len(others)), left, left]


def two_ranks(root: Path, other: np.ndarray) -> Path:
    """Write a parameter that rank 1 declares a copy of rank 0's."""
    meshes = {"ddp": Mesh(("dp",), (2,), (0, 1))}
    ranks = [
        [({"kind": Kind.REDUCED_GRAD, "name": "w", "slot": "grad", "microbatch": None,
           "shard": Shard("ddp", (rank,), (COPY,), value.shape)}, value),
         ({"name": "own", "slot": "out"}, value + rank + 1)]
        for rank, value in enumerate((BIG, other))
    ]  # fmt: skip
    return write_trace(root, ranks, meshes=meshes, promise=DEDUP)


def test_a_copy_is_read_from_the_rank_that_stored_it(tmp_path: Path) -> None:
    root = two_ranks(tmp_path, BIG)
    trace = Trace.open(root)
    weight, own = trace.ranks[1].entries
    assert trace.ranks[1].manifest is not None
    assert trace.ranks[1].manifest.format == 4
    assert (weight.blob, weight.same_as, own.blob is None) == (None, None, False)
    assert trace.ranks[1].stored(weight)
    np.testing.assert_array_equal(trace.ranks[1].read(weight), BIG)
    np.testing.assert_array_equal(trace.ranks[1].read_range(weight, 7, 19), BIG.reshape(-1)[7:19])
    assert list(check(root)) == []


def test_a_copy_that_is_none_is_not_read_as_another(tmp_path: Path) -> None:
    root = two_ranks(tmp_path, BIG * 2)
    rank = Trace.open(root).ranks[1]
    assert not rank.stored(rank.entries[0])
    with pytest.raises(NotKept, match="no rank that is there has these"):
        rank.read(rank.entries[0])
    [problem] = check(root)
    assert "1 tensors were left to the first rank with a copy" in problem
    assert "event 0, reduced_grad w grad of step 0" in problem


def test_show_says_where_a_copy_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = two_ranks(tmp_path, BIG)
    assert run(["show", str(root), "--name", "w", "--rank", "1"]) == 0
    assert "stored by another rank, which has a copy" in capsys.readouterr().out


def test_show_counts_what_was_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(two_ranks(tmp_path, BIG))]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the bytes of 1 boundary were left to a rank that has a copy" in said
    assert "statistics alone" not in said


def trained(judge: Judge, **fields: object) -> Path:
    return judge.write(Program(ranks=2), **fields)


def test_a_diff_says_what_it_says_of_all_bytes(judge: Judge) -> None:
    whole, spared = trained(judge), trained(judge, promise=DEDUP)
    single = judge.write(Program())
    assert stored(spared) < stored(whole)
    results = [
        compare(single, whole),
        compare(single, spared),
        compare(spared, single),
        compare(whole, spared),
    ]
    assert [result.verdict for result in results] == ["equivalent"] * 4
    assert results[0].coverage.compared == results[1].coverage.compared == results[2].coverage.compared
    assert results[0].coverage.bitwise_equal == results[1].coverage.bitwise_equal


def stored(root: Path) -> int:
    return sum(entry.blob.length for rank in Trace.open(root).ranks for entry in rank.entries if entry.blob)


def test_without_the_rank_that_stores_the_copies_cannot_be_compared(judge: Judge) -> None:
    a, b = trained(judge), trained(judge, promise=DEDUP)
    shutil.rmtree(b / "rank00000")
    result = compare(a, b)
    assert result.verdict == "incomplete"
    assert any("rank 1 left the bytes of" in note for note in result.notes)


class Odd(Program):
    """Rank 1's hidden weights are a little larger after step 1."""

    def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
        odd = (at.kind, at.name, at.step, at.rank) == (Kind.PARAM, "hidden.weight", 1, 1)
        return value * np.float32(1.001) if odd else value


@pytest.mark.parametrize("reference", [1, 2])
def test_the_odd_rank_is_named_whose_bytes_were_not_stored(judge: Judge, reference: int) -> None:
    """Two copies have no majority: what rank 1's weights are at least apart is known by their norms."""
    result = judge(Program(ranks=reference), judge.write(Odd(ranks=2), promise=DEDUP))
    found = first(result)
    assert (found.where.step, found.where.kind, found.where.name) == (1, "param", "hidden.weight")
    assert (found.ranks, codes(result)) == ((1,), ["replica.disagrees"])
    assert "the bytes of rank 1 were not stored (--dedup-replicas)" in found.text
