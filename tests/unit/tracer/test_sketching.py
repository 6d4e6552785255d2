"""Sketches of what ranks hold: parts add up to the whole, samples meet wherever they are."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortrace.tracer.codec_values import digest
from tensortrace.tracer.geometry import Held, held, placed
from tensortrace.tracer.geometry_cover import one_copy
from tensortrace.tracer.sketch import sketch_flat, sketch_product, whole_sides
from tensortrace.tracer.sketch_record import decode_numbers
from tensortrace.tracer.sketching import Sketcher
from tensortrace.tracer.types import Box, Kind, Mesh, Placement, Shard, Sketch
from tests.synthetic import boundary_of

SIZE = (16, 16)


def sketcher(mesh: Mesh | None = None) -> Sketcher:
    found = Sketcher()
    found.know({} if mesh is None else {"m": mesh})
    return found


def see(of: Sketcher, event: int, array: np.ndarray, **fields: object) -> None:
    of.see(boundary_of(event, array, **fields), np.ascontiguousarray(array).reshape(-1).view("u1"))


def sketch(of: Sketcher, event: int, array: np.ndarray, **fields: object) -> Sketch:
    array = np.ascontiguousarray(array)
    boundary, data = boundary_of(event, array, **fields), array.reshape(-1).view("u1")
    of.see(boundary, data)
    found = of.sketch(boundary, data, digest(boundary.dtype, boundary.local_shape, data), SIZE)
    assert isinstance(found, Sketch)
    return found


def of_whole(values: np.ndarray) -> np.ndarray:
    flat, sides = values.reshape(-1), whole_sides(values.shape)
    if values.ndim == 1:
        return sketch_flat(lambda a, b: flat[a:b], sides, [(0, flat.size)])
    return sketch_product(lambda a, b: flat[a:b], sides)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh, tuple[Placement, ...], int]:
    """A global shape, a mesh, placements on it, and how much padding the last dimension has."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    dims = st.integers(0, len(shape) - 1)
    placement = st.one_of(
        st.just(Placement("replicate")),
        st.just(Placement("partial", op="sum")),
        dims.map(lambda dim: Placement("shard", dim=dim)),
        dims.map(lambda dim: Placement("strided_shard", dim=dim, split_factor=2)),
    )
    placements = tuple(draw(placement) for _ in sizes)
    ranks = tuple(range(math.prod(sizes)))
    mesh = Mesh(tuple("abc"[: len(sizes)]), sizes, ranks)
    return shape, mesh, placements, draw(st.integers(0, 2))


def local(values: np.ndarray, part: Held) -> np.ndarray:
    """What a rank holds of its contribution, NaN where it is padding."""
    indices = [[i for a, b in dims for i in range(a, b)] for dims in part.region.dims]
    found = np.full(part.local_shape, np.nan, values.dtype)
    found[tuple(slice(n) for n in part.region.shape)] = values[np.ix_(*indices)]
    return found


@given(meshes(), st.sampled_from(["f4", "f8"]))
@settings(max_examples=80, deadline=None)
def test_sketches_of_parts_and_contributions_add_up_to_the_whole(
    case: tuple[tuple[int, ...], Mesh, tuple[Placement, ...], int], dtype: str
) -> None:
    shape, mesh, placements, pad = case
    partial_shape = [n for n, p in zip(mesh.shape, placements, strict=True) if p.kind == "partial"]
    generator = np.random.default_rng(0)
    contributions = {
        key: generator.standard_normal(shape).astype(dtype) for key in product(*map(range, partial_shape))
    }
    parts: dict[int, tuple[Held, Shard]] = {}
    for rank, coordinate in enumerate(product(*map(range, mesh.shape))):
        padding = (0,) * (len(shape) - 1) + (pad,)
        shard = Shard("m", coordinate, placements, shape, padding=padding)
        inside = placed(shard, mesh).shape
        parts[rank] = held(rank, shard, mesh, (*inside[:-1], inside[-1] + pad)), shard
    total, count = np.zeros(SIZE), 0
    for part in one_copy([part for part, _ in parts.values()]):
        if not part.region.size:
            continue
        array = local(contributions[part.partial], part)
        found = sketch(sketcher(mesh), 0, array, kind=Kind.PARAM, shard=parts[part.rank][1])
        total += decode_numbers(found)
        count += 1
    expected = of_whole(sum(c.astype("f8") for c in contributions.values()))
    rounding = 2.0**-24 + 2.0**-22 if dtype == "f4" else 1e-14  # of the record, and of sums in float32
    bound = rounding * count * sum(np.abs(c).sum() for c in contributions.values()) + 1e-12
    np.testing.assert_allclose(total, expected, rtol=0, atol=bound)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_flat_parts_that_begin_in_the_middle_of_a_row_add_up(shape: list[int], ranks: int) -> None:
    values = np.random.default_rng(0).standard_normal(shape)
    mesh = Mesh(("dp",), (ranks,), tuple(range(ranks)))
    each = -(-values.size // ranks)
    total = np.zeros(SIZE)
    for rank in range(ranks):
        start, stop = min(rank * each, values.size), min((rank + 1) * each, values.size)
        shard = Shard("m", (rank,), (Placement("flat"),), tuple(shape), (Box((start,), (stop - start,)),))
        part = values.reshape(-1)[start:stop]
        total += decode_numbers(sketch(sketcher(mesh), 0, part, kind=Kind.PARAM, shard=shard))
    np.testing.assert_allclose(total, of_whole(values), rtol=0, atol=1e-11)


def test_equal_content_at_the_same_place_has_one_sketch_and_elsewhere_its_own() -> None:
    mesh = Mesh(("tp",), (2,), (0, 1))
    values = np.random.default_rng(0).standard_normal((4, 6))
    of = sketcher(mesh)
    sketch(of, 0, values, kind=Kind.PARAM)
    data = values.reshape(-1).view("u1")
    again = boundary_of(1, values, kind=Kind.LOCAL_GRAD)
    name = digest(again.dtype, again.local_shape, data)
    assert of.sketch(again, data, name, SIZE) == 0
    shard = Shard("m", (1,), (Placement("shard", dim=0),), (8, 6))
    assert isinstance(of.sketch(boundary_of(2, values, shard=shard), data, name, SIZE), Sketch)
    assert isinstance(of.sketch(boundary_of(3, values), data, name, (8, 8)), Sketch)


def test_a_shard_that_makes_no_sense_has_no_sketch() -> None:
    values = np.ones((4, 6))
    boundary = boundary_of(0, values, shard=Shard("m", (0,), (Placement("shard", dim=0),), (9, 6)))
    assert (
        sketcher(Mesh(("tp",), (2,), (0, 1))).sketch(boundary, values.reshape(-1).view("u1"), "d", SIZE)
        is None
    )
    assert sketcher().sketch(boundary, values.reshape(-1).view("u1"), "d", SIZE) is None


def batch(rows: list[int], shape: str) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of some rows, and what a module made of each: as [rows, positions, width], or as named."""
    everything = np.random.default_rng(0).standard_normal((9, 5, 4))
    tokens = np.random.default_rng(1).integers(0, 99, (9, 5))
    made = everything[rows]
    if shape == "flat":
        made = made.reshape(-1, 4)
    if shape == "second":
        made = made.swapaxes(0, 1)
    if shape == "vector":
        made = made[:, :, 0].reshape(-1)
    return tokens[rows], made


def of_passes(passes: list[list[int]], shape: str, kind: Kind = Kind.ACTIVATION) -> tuple[np.ndarray, Sketch]:
    of, total = sketcher(), np.zeros(SIZE)
    for number, rows in enumerate(passes):
        tokens, made = batch(rows, shape)
        see(of, 2 * number, tokens, kind=Kind.INPUT, name="(root)", slot="in.0", microbatch=number)
        record = sketch(of, 2 * number + 1, made, kind=kind, slot="out", microbatch=number)
        total += decode_numbers(record)
    return total, record


@pytest.mark.parametrize(
    ("shape", "rows", "positions"), [("rows", 0, None), ("flat", 0, 5), ("second", 1, None), ("vector", 0, 5)]
)
def test_samples_meet_in_any_order_and_any_split_into_passes(
    shape: str, rows: int, positions: int | None
) -> None:
    one, record = of_passes([[0, 1, 2, 3]], shape)
    other, _ = of_passes([[3, 0], [2], [1]], shape)
    assert (record.rows, record.positions) == (rows, positions)
    np.testing.assert_allclose(other, one, rtol=0, atol=1e-11)
    wrong, _ = of_passes([[3, 0], [2], [4]], shape)
    assert np.abs(wrong - one).max() > 0.1


def test_flattened_and_separate_positions_of_samples_have_the_same_sketch() -> None:
    np.testing.assert_allclose(
        of_passes([[1, 2, 3]], "flat")[0], of_passes([[3, 2, 1]], "rows")[0], atol=1e-11
    )


def test_without_a_known_input_indices_are_the_ranks_own() -> None:
    tokens, made = batch([0, 1, 2, 3], "rows")
    of = sketcher()
    assert sketch(of, 0, made, kind=Kind.ACTIVATION, microbatch=0).rows is None
    see(of, 1, tokens, kind=Kind.INPUT, name="(root)", microbatch=0)
    see(of, 2, tokens + 1, kind=Kind.INPUT, name="Critic", microbatch=0)
    assert sketch(of, 3, made + 1, kind=Kind.ACTIVATION, microbatch=0).rows is None
    assert sketch(of, 4, made + 2, kind=Kind.ACTIVATION, microbatch=1).rows is None


def test_the_next_pass_without_gradients_has_samples_of_its_own() -> None:
    of, found = sketcher(), []
    for number, rows in enumerate(([0, 1], [2, 3])):
        tokens, made = batch(rows, "rows")
        see(of, 2 * number, tokens, kind=Kind.INPUT, name="(root)", microbatch=None)
        found.append(decode_numbers(sketch(of, 2 * number + 1, made, kind=Kind.ACTIVATION, microbatch=None)))
    np.testing.assert_allclose(sum(found), of_passes([[3, 1, 2, 0]], "rows")[0], rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0,)])
def test_inputs_without_elements_are_samples_like_others(shape: tuple[int, ...]) -> None:
    of = sketcher()
    see(of, 0, np.zeros(shape, "i8"), kind=Kind.INPUT, name="(root)", microbatch=0)
    made = np.random.default_rng(0).standard_normal((shape[0], 300))
    assert sketch(of, 1, made, kind=Kind.ACTIVATION, microbatch=0).rows == 0


def test_a_mesh_that_is_declared_late_is_known_from_then_on() -> None:
    values, shard = np.ones((4, 6)), Shard("m", (0,), (Placement("shard", dim=0),), (8, 6))
    boundary, data, of = boundary_of(0, values, shard=shard), values.reshape(-1).view("u1"), sketcher()
    assert of.sketch(boundary, data, "d", SIZE) is None
    of.know({"m": Mesh(("tp",), (2,), (0, 1))})
    assert isinstance(of.sketch(boundary, data, "d", SIZE), Sketch)
