"""DTensor, tensor parallel and fully_shard: recording changes nothing, and the parts make the whole.

Each rank's part is put in its place by hand here, and compared with an unwrapped model's float64 values.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tensortrace import tracer
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import INIT_STEP, Entry, Key, Kind, Mesh, Placement
from tests import harness

ZOO = harness.TRAINING / "dtensor_zoo.py"
Array = NDArray[np.float64]

ON_TWO = (
    "tp", "tp_uneven", "prepared", "sp", "sp_loss", "fsdp", "fsdp_kept", "fsdp_tied", "fsdp_no_sync",
    "fsdp_half", "fsdp_checkpointed", "fsdp_scaled", "sp_checkpointed", "hsdp",
)  # fmt: skip
ON_FOUR = ("tp_uneven_4", "hsdp_4", "fsdp_tp")
EVERY = (*ON_TWO, *ON_FOUR)
WITH_TENSOR_PARALLEL = ("tp", "tp_uneven", "prepared", "sp", "sp_loss", "tp_uneven_4", "fsdp_tp")
WITH_DATA_PARALLEL = ("fsdp", "fsdp_kept", "fsdp_tied", "fsdp_no_sync", "hsdp", "hsdp_4", "fsdp_tp")
CLIPPING = ("sp", "sp_loss", "fsdp", "fsdp_kept", "fsdp_tied", "fsdp_no_sync", "hsdp", "hsdp_4", "fsdp_tp")
COMPARABLE = tuple(name for name in EVERY if name not in ("fsdp_half", "fsdp_scaled"))
"""In half precision, with dropout, nothing is near the reference; under a loss scale gradients aren't."""

BLOCKS = ("blocks.0", "blocks.1")
HEADS = {f"{block}.attention.mix" for block in BLOCKS}
"""What attention over local heads returns: in the first call nothing tells that it is sharded."""


@dataclass(frozen=True)
class Part:
    """One rank's tensor of a boundary."""

    entry: Entry
    value: Array
    mesh: Mesh | None

    @property
    def cell(self) -> int:
        """Return which rows these are: the position along the axes that carry different samples."""
        index = 0
        for axis, placement in self.axes():
            if placement.kind == "data":
                assert self.mesh is not None
                index = index * self.mesh.shape[axis] + self.coordinate[axis]
        return index

    @property
    def coordinate(self) -> tuple[int, ...]:
        return () if self.entry.shard is None else self.entry.shard.coordinate

    def axes(self) -> Iterator[tuple[int, Placement]]:
        if self.entry.shard is not None:
            yield from enumerate(self.entry.shard.placements)

    def is_copy(self) -> bool:
        """Tell whether another rank holds the same."""
        return any(p.kind == "replicate" and self.coordinate[axis] for axis, p in self.axes())

    def rows(self) -> tuple[NDArray[np.int64], ...]:
        """Return the global indices of this part along each dimension, as torch shards a tensor."""
        assert self.entry.shard is not None
        assert self.entry.shard.global_shape is not None
        found = [np.arange(size) for size in self.entry.shard.global_shape]
        for axis, placement in self.axes():
            if placement.dim is not None:
                assert self.mesh is not None
                pieces = chunks(found[placement.dim], placement.split_factor or 1)
                mine = [chunks(piece, self.mesh.shape[axis])[self.coordinate[axis]] for piece in pieces]
                found[placement.dim] = np.concatenate(mine)
        return tuple(found)


def chunks(indices: NDArray[np.int64], count: int) -> list[NDArray[np.int64]]:
    """Split into ``count`` parts of equal size, the last ones shorter or empty."""
    size = -(-len(indices) // count)
    return [indices[i * size : (i + 1) * size] for i in range(count)]


def whole(parts: list[Part]) -> Array:
    """Put the parts of one cell together; copies must agree, and every element must be covered."""
    shard = parts[0].entry.shard
    if shard is None or shard.global_shape is None:  # every rank has all of it
        assert all(np.array_equal(part.value, parts[0].value) for part in parts)
        return parts[0].value
    total, covered = np.zeros(shard.global_shape), np.zeros(shard.global_shape, dtype=bool)
    squares = any(placement.op == "norm2" for _, placement in parts[0].axes())
    for part in parts:
        if part.is_copy():
            continue
        where = np.ix_(*part.rows())
        total[where] += part.value**2 if squares else part.value
        covered[where] = True
    assert covered.all()
    total = np.sqrt(total) if squares else total
    for part in parts:
        if part.is_copy() and not squares and not any(p.kind == "partial" for _, p in part.axes()):
            assert np.array_equal(total[np.ix_(*part.rows())], part.value)
    return total


class Recorded:
    """A layout's trace and its reference."""

    def __init__(self, folder: Path, name: str) -> None:
        self.trace = Trace.open(folder / name)
        self.reference: dict[str, Array] = dict(np.load(folder / f"{name}.npz"))

    @cached_property
    def first(self) -> dict[Key, list[Part]]:
        """Return the parts of each boundary of the state before the first step, and of that step."""
        found: dict[Key, list[Part]] = defaultdict(list)
        for rank in self.trace.ranks:
            for entry in rank.entries:
                if entry.recompute or entry.kind in (Kind.RNG, Kind.SCHEDULE):
                    continue
                if entry.step in (INIT_STEP, 0):
                    mesh = None if entry.shard is None else rank.manifest.meshes[entry.shard.mesh]
                    value = rank.read(entry)
                    if value.dtype.kind == "f":
                        found[entry.key].append(Part(entry, value.astype(np.float64), mesh))
        return found

    def of(self, kind: Kind, slot: str, *, step: int = 0) -> Iterator[tuple[Key, list[Part]]]:
        for key, parts in self.first.items():
            if (key.step, key.kind, key.slot) == (step, kind, slot):
                yield key, parts

    def last(self, kind: Kind, slot: str) -> dict[str, Array]:
        """Return the last value in the step of each name, whole."""
        found = {key.name: parts for key, parts in self.of(kind, slot) if key.microbatch is not None}
        return {name: whole(parts) for name, parts in found.items()}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    folder = tmp_path_factory.mktemp("dtensor")
    told = []
    for ranks, names in ((2, ON_TWO), (4, ON_FOUR)):
        done = harness.run(harness.torchrun(ranks, ZOO, folder, *names))
        assert done.exit_code == 0, done.errors
        told += [json.loads(line) for line in done.output.splitlines()]
    return folder, told


@pytest.fixture(scope="module")
def recorded(launched: tuple[Path, object]) -> dict[str, Recorded]:
    return {name: Recorded(launched[0], name) for name in EVERY}


def assert_near(found: Array, expected: Array, what: object) -> None:
    assert found.shape == expected.shape, what
    assert np.abs(found - expected).max(initial=0) <= 1e-5 * max(1.0, np.abs(expected).max(initial=0)), what


@pytest.mark.parametrize("name", EVERY)
def test_recording_changes_no_bit(launched: tuple[Path, list[dict[str, object]]], name: str) -> None:
    same = [one["same"] for one in launched[1] if one["layout"] == name]
    assert same == [True] * (4 if name in ON_FOUR else 2)


@pytest.mark.parametrize("name", EVERY)
def test_every_rank_finishes_its_trace(recorded: dict[str, Recorded], name: str) -> None:
    for rank in recorded[name].trace.ranks:
        assert rank.manifest.ended == "finished"
        assert rank.manifest.drops.count == 0
        assert not [entry for entry in rank.entries if entry.kind is Kind.COLLECTIVE]


@pytest.mark.parametrize("name", EVERY)
def test_modules_have_the_names_and_classes_that_the_program_gave_them(
    recorded: dict[str, Recorded], name: str
) -> None:
    found = {
        (entry.name, entry.meta.module)
        for entry in recorded[name].trace.ranks[0].entries
        if entry.kind is Kind.ACTIVATION and not entry.name.startswith("blocks.")
    }
    assert found == {("(root)", "Net"), ("embed", "Embedding"), ("norm", "LayerNorm"), ("head", "Linear")}


@pytest.mark.parametrize("name", COMPARABLE)
def test_the_parts_of_each_parameter_make_the_whole(recorded: dict[str, Recorded], name: str) -> None:
    run = recorded[name]
    expected = {key.removeprefix("param/") for key in run.reference if key.startswith("param/")}
    assert {key.name for key, _ in run.of(Kind.PARAM, "model", step=INIT_STEP)} == expected
    after = {key.name: whole(parts) for key, parts in run.of(Kind.PARAM, "model")}
    assert after.keys() == expected
    for parameter, value in after.items():
        if not parameter.endswith("k.bias"):  # its gradient is noise around 0, of which Adam takes the sign
            assert_near(value, run.reference[f"param/{parameter}"], parameter)


@pytest.mark.parametrize("name", EVERY)
def test_an_opened_trace_gives_what_the_parts_make(recorded: dict[str, Recorded], name: str) -> None:
    run = recorded[name]
    trace = tracer.open(run.trace.path)
    for key, parts in run.of(Kind.PARAM, "model"):
        assert np.array_equal(trace["param", key.name, 0], whole(parts)), key
    for key, parts in run.of(Kind.OPTIMIZER_STATE, "exp_avg"):
        found = trace.get("optimizer_state", key.name, step=0, slot="exp_avg")
        assert np.array_equal(found, whole(parts)), key
    for key, parts in run.of(Kind.ACTIVATION, "out"):
        if key.microbatch == 1 and key.name == "norm":
            cells = [
                [part for part in parts if part.cell == cell] for cell in sorted({p.cell for p in parts})
            ]
            found = trace["activation", "norm", 0, 1]
            assert np.array_equal(found, np.concatenate([whole(cell) for cell in cells]))


@pytest.mark.parametrize("name", COMPARABLE)
def test_local_gradients_sum_to_the_gradient_over_all_data_ranks(
    recorded: dict[str, Recorded], name: str
) -> None:
    run, seen = recorded[name], set()
    for key, parts in run.of(Kind.LOCAL_GRAD, "grad"):
        terms = [
            value for label, value in run.reference.items()
            if label.endswith(f"/local_grad/{key.name}")
            and (key.microbatch is None or label.split("/")[1] == str(key.microbatch))
        ]  # fmt: skip
        assert_near(whole(parts), np.sum(terms, axis=0), key)
        seen.add((key.name, key.microbatch))
    names = {key.name for key, _ in run.of(Kind.PARAM, "model")}
    assert seen == {(parameter, m) for parameter in names for m in (0, 1, None)}


@pytest.mark.parametrize("name", COMPARABLE)
@pytest.mark.parametrize("kind", [Kind.ACTIVATION, Kind.ACTIVATION_GRAD])
@pytest.mark.parametrize("slot", ["in.0", "out"])
def test_the_parts_of_each_activation_make_the_whole(
    recorded: dict[str, Recorded], name: str, kind: Kind, slot: str
) -> None:
    run, unplaced = recorded[name], set()
    compared = set()
    for key, parts in run.of(kind, slot):
        if key.microbatch is None:  # an eval pass
            continue
        cells = defaultdict(list)
        for part in parts:
            cells[part.cell].append(part)
        for cell, own in cells.items():
            label = f"{cell}/{key.microbatch}/{kind}/{slot}/{key.name}"
            expected = run.reference[label]
            is_placed = own[0].entry.shard is not None and own[0].entry.shard.global_shape is not None
            if not is_placed and own[0].value.shape != expected.shape:
                assert key.microbatch == 0, key
                unplaced.add(key.name)
                continue
            assert_near(whole(own), expected, key)
            compared.add(label)
    assert unplaced <= (HEADS if slot == "out" else set())
    missing = {label for label in run.reference if f"/{kind}/{slot}/" in label} - compared
    assert {label.split("/")[-1] for label in missing} == unplaced


@pytest.mark.parametrize("name", WITH_DATA_PARALLEL)
def test_reduced_gradients_are_the_mean_over_data_ranks(recorded: dict[str, Recorded], name: str) -> None:
    run = recorded[name]
    found = run.last(Kind.REDUCED_GRAD, "grad")
    assert found.keys() == {key.name for key, _ in run.of(Kind.PARAM, "model")}
    for parameter, value in found.items():
        assert_near(value, run.reference[f"reduced_grad/{parameter}"], parameter)


@pytest.mark.parametrize("name", CLIPPING)
def test_the_norm_the_factor_and_what_the_optimizer_consumes(
    recorded: dict[str, Recorded], name: str
) -> None:
    run = recorded[name]
    factor = run.reference["coefficient"]
    numbers = {
        slot: whole(parts)
        for slot in ("total_norm", "coefficient")
        for _, parts in run.of(Kind.CLIPPED_GRAD, slot)
    }
    assert_near(numbers["total_norm"], run.reference["total_norm"], "total_norm")
    assert_near(numbers["coefficient"], factor, "coefficient")
    consumed = [(k, parts) for k, parts in run.of(Kind.CLIPPED_GRAD, "grad") if k.microbatch is None]
    assert {key.name for key, _ in consumed} == {key.name for key, _ in run.of(Kind.PARAM, "model")}
    for key, parts in consumed:
        assert_near(whole(parts), factor * run.reference[f"reduced_grad/{key.name}"], key)
    for key, parts in run.of(Kind.OPTIMIZER_STATE, "exp_avg"):
        assert_near(whole(parts), 0.1 * factor * run.reference[f"reduced_grad/{key.name}"], key)


def test_gradients_are_recorded_before_and_after_they_are_cast_for_the_reduction(
    recorded: dict[str, Recorded],
) -> None:
    entries = recorded["fsdp_half"].trace.ranks[1].entries
    dtypes = {kind: {entry.dtype for entry in entries if entry.kind is kind} for kind in Kind}
    local = [entry for entry in entries if entry.kind is Kind.LOCAL_GRAD]
    assert {entry.dtype for entry in local if entry.microbatch is not None} == {"bfloat16"}
    assert dtypes[Kind.REDUCED_GRAD] == dtypes[Kind.PARAM] == {"float32"}
    reductions = {entry.microbatch for entry in entries if entry.kind is Kind.REDUCED_GRAD}
    assert reductions == {1}, "the first microbatch isn't reduced"


def test_recomputed_activations_lie_as_those_of_the_first_pass(recorded: dict[str, Recorded]) -> None:
    entries = [e for e in recorded["sp_checkpointed"].trace.ranks[1].entries if e.kind is Kind.ACTIVATION]
    first = {entry.key: entry.shard for entry in entries if not entry.recompute}
    again = {entry.key: entry.shard for entry in entries if entry.recompute}
    assert {key.name.split(".")[0] for key in again} == {"blocks"}
    assert again == {key: first[key] for key in again}


def test_gradients_are_recorded_after_the_loss_scale_is_divided_out(recorded: dict[str, Recorded]) -> None:
    run = recorded["fsdp_scaled"]
    scaled = run.last(Kind.REDUCED_GRAD, "grad")
    unscaled = run.last(Kind.UNSCALED_GRAD, "grad")
    assert unscaled.keys() == scaled.keys() == {key.name for key, _ in run.of(Kind.PARAM, "model")}
    for name, value in unscaled.items():
        assert_near(value, run.reference[f"reduced_grad/{name}"], name)
        assert np.array_equal(value * 16.0, scaled[name])


def test_each_use_of_a_tied_parameter_is_recorded_under_fully_shard(recorded: dict[str, Recorded]) -> None:
    run = recorded["fsdp_tied"]
    uses = {
        use: whole(parts)
        for use in ("use.embed", "use.head")
        for key, parts in run.of(Kind.LOCAL_GRAD, use)
        if key.microbatch == 0
    }
    [total] = [
        whole(parts) for key, parts in run.of(Kind.LOCAL_GRAD, "grad")
        if (key.name, key.microbatch) == ("embed.weight", 0)
    ]  # fmt: skip
    assert_near(uses["use.embed"] + uses["use.head"], total, "uses")


@pytest.mark.parametrize("name", WITH_TENSOR_PARALLEL)
def test_outputs_keep_the_placement_that_the_style_gives_up(recorded: dict[str, Recorded], name: str) -> None:
    placed = {
        key.name: parts[0].entry.shard.placements[-1]
        for key, parts in recorded[name].of(Kind.ACTIVATION, "out")
        if parts[0].entry.shard is not None
    }
    assert placed["blocks.0.up"] == Placement(kind="shard", dim=2)
    assert placed["blocks.0.down"] == Placement(kind="partial", op="sum")
    if name in ("sp", "sp_loss", "fsdp_tp"):
        assert placed["blocks.0.norm1"] == placed["blocks.0"] == Placement(kind="shard", dim=1)
        assert placed["embed"] == Placement(kind="partial", op="sum")


def test_an_eval_pass_of_fewer_rows_lies_as_the_training_did(recorded: dict[str, Recorded]) -> None:
    entries = recorded["sp"].trace.ranks[1].entries
    placed: dict[tuple[str, str], set[tuple[Placement, ...] | None]] = defaultdict(set)
    rows: dict[bool, set[int]] = defaultdict(set)
    for entry in entries:
        if entry.kind is Kind.ACTIVATION and entry.dtype == "float32" and entry.step == 1:
            placed[entry.name, entry.slot].add(None if entry.shard is None else entry.shard.placements)
            if entry.shard is not None and entry.shard.global_shape is not None:
                rows[entry.microbatch is None].add(entry.shard.global_shape[0])
    assert {key: found for key, found in placed.items() if len(found) != 1} == {}
    assert rows == {False: {3}, True: {2}}
