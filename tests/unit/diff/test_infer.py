"""Content tells which part of a whole tensor a rank holds, and in which grid the ranks stand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tensortrace.diff.infer.content import Lines
from tensortrace.diff.infer.found import Term
from tensortrace.diff.infer.grid import find_grid
from tensortrace.diff.infer.names import offset_renames, offsets_of, other_renames
from tensortrace.diff.infer.params import place, straightened
from tensortrace.diff.infer.passes import Reference, body_of
from tensortrace.diff.infer.terms import find_term
from tensortrace.diff.infer.values import Candidate, Joined, ways_to_join
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import Kind


def term(size: int, *vectors: list[int]) -> Term | None:
    return find_term([np.array(v) for v in vectors], size, "o", "tp")


def test_halves_are_a_contiguous_split() -> None:
    assert term(4, [0, 1], [2, 3]) == Term("o[tp]", "")


def test_equal_wholes_are_no_split() -> None:
    assert term(3, [0, 1, 2], [0, 1, 2]) == Term("o", "")


def test_uneven_chunks_state_the_size() -> None:
    assert term(5, [0, 1], [2, 3], [4]) == Term("o[tp]", "", (("o", 5),))


def test_lines_of_nothing_at_the_end_are_padding() -> None:
    assert term(5, [0, 1, 2, 3], [4, -1, -1, -1]) == Term("o[tp]", "", (("o", 8),), (("o", 5),))


def test_parts_of_two_blocks_are_blocks() -> None:
    found = term(8, [0, 1, 4, 5], [2, 3, 6, 7])
    assert found == Term("(o1|o2)[tp]", "", (("o1", 4), ("o2", 4)))


def test_a_block_that_every_rank_has_is_whole() -> None:
    assert term(6, [0, 1, 4, 5], [2, 3, 4, 5]) == Term("(o1[tp]|o2)", "", (("o1", 4), ("o2", 2)))


def test_many_equal_blocks_are_a_stride() -> None:
    first = [i for i in range(40) if i % 4 < 2]
    second = [i for i in range(40) if i % 4 >= 2]
    assert term(40, first, second) == Term("(o1 o2[tp])", "", (("o1", 10),))


def test_blocks_in_another_order_are_a_permutation() -> None:
    found = term(8, [4, 5, 0, 1], [6, 7, 2, 3])
    assert found == Term("(o2|o1)[tp]", "(o1|o2)", (("o1", 4), ("o2", 4)))
    assert found.permutes


def test_groups_in_another_order_inside_are_a_permutation() -> None:
    found = term(8, [0, 1, 3, 2], [4, 5, 7, 6])
    assert found == Term(
        "(o0[tp] (o1|o3|o2))", "(o0 (o1|o2|o3))", (("o0", 2), ("o1", 2), ("o2", 1), ("o3", 1))
    )


def test_no_pattern_is_none() -> None:
    assert term(6, [0, 5, 2], [3, 4, 1]) is None


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def test_rows_columns_and_transposes_are_found_under_any_name() -> None:
    lines = Lines({"w": random(6, 4), "v": random(5, 3)})
    rows = lines.find(random(6, 4)[2:5], "x")
    columns = lines.find(random(6, 4)[:, [1, 3]], "x")
    turned = lines.find(random(6, 4)[:, 2:].T.copy(), "x")
    assert rows is not None
    assert columns is not None
    assert turned is not None
    assert (rows.name, rows.dim, rows.of, list(rows.index)) == ("w", 0, 0, [2, 3, 4])
    assert (columns.dim, columns.of, list(columns.index)) == (1, 1, [1, 3])
    assert (turned.dim, turned.of, turned.transposed, list(turned.index)) == (0, 1, True, [2, 3])
    assert lines.find(random(7, 4), "w") is None


def test_an_exchange_on_one_rank_is_a_swap_and_straightens_to_the_layout() -> None:
    w = random(8, 3)
    lines = Lines({"w": w})
    good, bad = lines.find(w[:4], "w"), lines.find(w[[6, 7, 4, 5]], "w")
    assert good is not None
    assert bad is not None
    placed = place([good, bad], (8, 3))
    assert placed is not None
    assert placed.swap == "part 1: 4:6 holds 6:8, 6:8 holds 4:6"
    assert straightened(placed).term == Term("o[tp]", "")


def test_parts_on_the_wrong_ranks_are_a_swap() -> None:
    w = random(4, 3)
    lines = Lines({"w": w})
    matches = [lines.find(w[2:], "w"), lines.find(w[:2], "w")]
    placed = place([m for m in matches if m], (4, 3))
    assert placed is not None
    assert placed.swap == "part 0 holds 2:4; part 1 holds 0:2"


def test_the_grid_is_read_from_layers_and_parts() -> None:
    early, late = frozenset({"layers.0"}), frozenset({"layers.1"})
    layers = {0: early, 1: early, 2: early, 3: early, 4: late, 5: late, 6: late, 7: late}
    parts = {rank: (4 * (rank % 2),) for rank in layers}
    grid = find_grid(layers, parts)
    assert grid.axes == {"pp": 2, "dp": 2, "tp": 2}
    assert grid.where[6] == {"pp": 1, "dp": 1, "tp": 0}


def test_ranks_in_no_order_make_no_grid() -> None:
    same = frozenset({"w"})
    with pytest.raises(BadRequest, match="make no grid"):
        find_grid(dict.fromkeys(range(4), same), {0: (0,), 1: (4,), 2: (4,), 3: (0,)})


def test_layer_numbers_of_a_stage_become_an_offset() -> None:
    offsets = {0: offsets_of([("layers.0.w", "layers.0.w")]), 1: offsets_of([("layers.0.w", "layers.2.w")])}
    [rename] = offset_renames(offsets, {0: 0, 1: 1})
    assert (rename.glob, rename.add) == ("layers.{n}*", (("n", "pp", (0, 2)),))


def test_names_of_another_framework_become_renames() -> None:
    [rename] = other_renames([(f"blocks.{n}.fc.weight", f"layers.{n}.mlp.up.weight") for n in range(2)])
    assert (rename.glob, rename.to) == ("blocks.{n}.fc*", "layers.{n}.mlp.up*")


def test_values_tell_copies_from_sums_and_from_parts() -> None:
    whole = random(2, 4, 6)
    share = random(2, 4, 6) * 0.3 + 1

    def how(*parts: np.ndarray) -> list[str]:
        return [way.how for way in ways_to_join(parts, whole, [], scaled=False)]

    assert how(whole, whole) == ["same"]
    assert how(whole - share, share) == ["partial"]
    [way] = ways_to_join([whole[:, :2], whole[:, 2:]], whole, [], scaled=False)
    assert (way.how, way.dim, way.term) == ("split", 1, None)
    assert how(whole * 2, whole * 2) == []


def test_values_follow_the_blocks_of_a_parameter() -> None:
    whole = random(2, 8)
    vectors = (np.array([0, 1, 4, 5]), np.array([2, 3, 6, 7]))
    candidate = Candidate(Term("(o1|o2)[tp]", ""), 8, vectors)
    [way] = ways_to_join([whole[:, v] for v in vectors], whole, [candidate], scaled=False)
    assert (way.dim, way.term) == (1, candidate.term)


class Held:
    """Stands for a rank that holds one tensor."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def read(self, entry: object) -> np.ndarray:
        return self.value


ROWS = np.array([2, 3])


@pytest.mark.parametrize(
    ("shape", "shapes", "expected"),
    [
        ((4, 6, 5), ((2, 6, 5),), lambda v: [v[2:]]),
        ((6, 4, 5), ((6, 2, 5),), lambda v: [v[:, 2:]]),
        ((4, 4, 5), ((4, 2, 5),), lambda v: [v[:, 2:]]),
        ((24, 5), ((12, 5),), lambda v: [v[12:], v.reshape(6, 4, 5)[:, 2:].reshape(12, 5)]),
        ((5,), ((5,),), lambda v: [v]),
    ],
    ids=["first", "second", "square", "flattened", "none"],
)
def test_rows_of_the_reference_are_found_wherever_they_are(
    shape: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    expected: Callable[[np.ndarray], list[np.ndarray]],
) -> None:
    value = np.arange(np.prod(shape)).reshape(shape)
    slot = (Kind.ACTIVATION, "m", "out")
    reference = Reference(Held(value), {slot: None}, ROWS, 4, 6)  # type: ignore[arg-type, dict-item]
    found = reference.readings(slot, shapes)
    assert len(found) == len(expected(value))
    for cut, wanted in zip(found, expected(value), strict=True):
        np.testing.assert_array_equal(cut, wanted)


def test_a_term_shares_no_name_with_another_dimension() -> None:
    positions = Term("s[cp:zigzag]", "", (), ())
    assert body_of(Joined("split", 0.0, 0, positions), 2, split_axis=True).dims == "s[cp:zigzag] h"
    assert body_of(Joined("split", 0.0, 1, positions), 3, split_axis=True).dims == "b s[cp:zigzag] h"
    blocks = Term("(h1|h2)[tp]", "", (("h1", 2), ("h2", 2)), ())
    assert body_of(Joined("split", 0.0, 2, blocks), 3, split_axis=True).dims == "b s (h1|h2)[tp]"
