"""A common start on every layout, of a model whose own numbers differ by layout and rank."""

from __future__ import annotations

import math
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.result import Finding
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Entry
from tests.integration.layouts import Case, Compared, Ran, diffed, launch, references

REFERENCE = Case("single", 1)
SPREAD = [Case(name, 2, spread=f"--layout {name}") for name in ("ddp", "fsdp2", "fsdp1", "tp", "tp-sp", "pp")]
MORE = [Case(name, 2, spread=f"--layout {name}") for name in ("hsdp", "fsdp1-flat", "zero1")]
BY_HAND = [
    Case("cp", 2, "--whole-attention", "--layout cp", layout="cp"),
    Case("cp-zigzag", 2, "--whole-attention", "--layout cp-zigzag", layout="cp-zigzag"),
]
TIED = "--depth 3 --tied"
MISTAKES = [
    Case("swapped", 2, spread="--layout tp", plant="kv-blocks-read-swapped"),
    Case("exchanged", 2, spread="--layout tp", plant="gate-up-exchanged"),
    Case("bias", 2, spread="--layout tp", plant="bias-on-every-rank"),
    Case("kv", 2, "--kv-heads 1", "--layout tp", plant="kv-not-summed"),
    Case("norms", 2, spread="--layout tp-sp", plant="norm-grads-not-reduced"),
    Case("tied", 2, TIED, "--layout pp", plant="tied-not-summed", layout="pp-tied"),
    Case("positions", 2, spread="--layout cp", plant="local-positions", layout="cp"),
    Case("tokens", 2, "--experts", "--layout ep", plant="outputs-to-wrong-tokens", layout="ep"),
]
FIRST = {
    "swapped": ("activation", "layers.1.attention.out", "in.0"),
    "exchanged": ("activation", "layers.0.mlp.down", "in.0"),
    "bias": ("activation", "layers.1.attention.out", "out"),
    "kv": ("activation_grad", "layers.1.attention.kv", "out"),
    "norms": ("clipped_grad", "*norm.*", "before"),
    "tied": ("clipped_grad", "token.weight", "before"),
    "positions": ("activation", "position", "in.0"),
    "tokens": ("activation", "layers.0.mlp", "out"),
}
"""Kind, name (a glob) and slot where each mistake acts first, by what it does; all at step 0."""

EPS = 2.0**-23
OWN = ("--own-seed", "--steps", "2")
DRAWN = {"init_seed": 5, "adversarial": True, "dropout_seed": 9, "pad_id": 0}

Parts = dict[int, tuple[np.ndarray, Entry]]
"""By rank: the tensor and what the trace says of it."""

pytestmark = pytest.mark.slow
"""Four launches of seven layouts; tests/unit/tracer/test_start_*.py are quick."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran]:
    """Record all layouts with drawn parameters and masks, on one rank and on two."""
    folder, options = tmp_path_factory.mktemp("drawn"), (*OWN, "--dropout", "0.25")
    one = launch(folder / "one", 1, [REFERENCE, *references(BY_HAND)], *options, start=DRAWN)
    return one, launch(folder / "two", 2, [*SPREAD, *BY_HAND], *options, start=DRAWN)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran]:
    """Record one rank that has stepped before, and all layouts begun from there."""
    folder = tmp_path_factory.mktemp("loaded")
    one = launch(folder / "one", 1, [REFERENCE], *OWN, "--warm")
    start = {"init_from": str(one.trace(REFERENCE))}
    return one, launch(folder / "two", 2, [*SPREAD, *MORE], *OWN, start=start)


def tensors(path: Path, step: int, *kinds: str) -> dict[tuple[str, ...], Parts]:
    """Return what each rank recorded, by kind, name, slot, microbatch and call."""
    found: dict[tuple[str, ...], Parts] = defaultdict(dict)
    for rank in Trace.open(path).ranks:
        for entry in rank.entries:
            if entry.step == step and entry.kind in kinds:
                key = (entry.kind.value, entry.name, entry.slot, str(entry.microbatch), str(entry.call))
                found[key][rank.rank] = (rank.read(entry), entry)
    return found


def whole(parts: Parts) -> np.ndarray:
    """Return a tensor of at most one sharded axis: pieces in order of the coordinate, or equal copies."""
    shards = [entry.shard for _, entry in parts.values()]
    if shards[0] is not None and shards[0].placements[-1].kind == "flat":
        flat = np.full(math.prod(shards[0].global_shape), np.nan, np.float32)
        for value, entry in parts.values():
            [box] = entry.shard.boxes
            flat[box.offset[0] : box.offset[0] + box.shape[0]] = value
        return flat.reshape(shards[0].global_shape)
    for axis, placements in enumerate(zip(*(s.placements for s in shards if s is not None), strict=True)):
        if placements[0].kind == "shard":
            pieces = {s.coordinate[axis]: value for s, (value, _) in zip(shards, parts.values(), strict=True)}
            return np.concatenate([pieces[place] for place in sorted(pieces)], placements[0].dim)
    first, *others = [value for value, _ in parts.values()]
    assert all(np.array_equal(first, other) for other in others)
    return first


def assert_same_beginning(one: Path, other: Path) -> None:
    wanted = tensors(one, -1, "param", "buffer", "optimizer_state")
    found = tensors(other, -1, "param", "buffer", "optimizer_state")
    assert found.keys() == wanted.keys()
    for key, parts in wanted.items():
        assert np.array_equal(whole(found[key]), whole(parts)), key


@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_parameters_have_the_same_bits_on_every_layout(drawn: tuple[Ran, Ran], case: Case) -> None:
    one, two = drawn
    assert_same_beginning(one.trace(REFERENCE), two.trace(case))


@pytest.mark.parametrize("case", [*SPREAD, *MORE], ids=lambda case: case.name)
def test_another_runs_beginning_is_taken_over_on_every_layout(loaded: tuple[Ran, Ran], case: Case) -> None:
    one, two = loaded
    assert len(tensors(one.trace(REFERENCE), -1, "optimizer_state")) == 3 * 37
    assert_same_beginning(one.trace(REFERENCE), two.trace(case))


def dropped(path: Path, name: str) -> list[np.ndarray]:
    """Return the zeros of a module's outputs at step 0, by rank or by microbatch."""
    found = tensors(path, 0, "activation")
    return [
        value == 0
        for key in sorted(found)
        if key[1:3] == (name, "out") and key[4] == "0"
        for _, (value, _) in sorted(found[key].items())
    ]


def rows_of(case: Case, masks: list[np.ndarray], length: int) -> np.ndarray:
    """Put the masks of one module together as on one rank, cut to ``length`` positions."""
    if case.name == "tp-sp":
        return np.concatenate(masks, 1)[:, :length]
    masks = [np.pad(mask, ((0, 0), (0, length), (0, 0)))[:, :length] for mask in masks]
    if case.name == "tp":
        assert np.array_equal(*masks)
        return masks[0]
    if case.name == "pp":
        return np.concatenate(masks)
    interleaved = np.empty((8, *masks[0].shape[1:]), bool)
    interleaved[0::2], interleaved[1::2] = masks
    return interleaved


@pytest.mark.parametrize("name", ["dropout", "layers.0.dropout", "layers.1.dropout"])
@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_each_row_has_the_same_mask_on_every_layout(drawn: tuple[Ran, Ran], case: Case, name: str) -> None:
    one, two = drawn
    [reference] = dropped(one.trace(REFERENCE), name)
    found = rows_of(case, dropped(two.trace(case), name), reference.shape[1])
    lengths = tensors(one.trace(REFERENCE), 0, "input")["input", "(root)", "in.0", "0", "0"][0][0] != 0
    assert 0.2 < reference[lengths].mean() < 0.3
    assert np.array_equal(found[lengths], reference[lengths])


@pytest.mark.parametrize("case", [*SPREAD, *BY_HAND], ids=lambda case: case.name)
def test_every_layout_is_equivalent_though_all_draw_their_own(drawn: tuple[Ran, Ran], case: Case) -> None:
    one, two = drawn
    compared = diffed(one.trace(case.reference() if case in BY_HAND else REFERENCE), two.trace(case))
    assert compared.result.verdict == "equivalent", compared.summary()


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran]:
    """Record planted mistakes of meaning with adversarial parameters, and their references."""
    folder, start = tmp_path_factory.mktemp("mistaken"), {"init_seed": 0, "adversarial": True}
    one = launch(folder / "one", 1, references(MISTAKES), *OWN, start=start)
    return one, launch(folder / "two", 2, MISTAKES, *OWN, start=start)


def beyond(case: Case, one: Path, two: Path, compared: Compared) -> float:
    """Return how many times the allowance the mistake is, where the error model judges it first.

    Ranks that disagree about what all should hold, and ids, aren't judged by it. Of the former each rank's
    gradient is held against the reference, allowed 8 roundings of all ranks' together; of the latter what
    was computed from them counts.
    """
    result = compared.result
    first = result.first_divergent
    assert first is not None
    if "replicas disagree" in first.text:
        [[(wanted, _)]] = [parts.values() for parts in found(one, first).values()]
        [held] = [[value for value, _ in parts.values()] for parts in found(two, first).values()]
        allowed = 8 * EPS * sum(np.linalg.norm(value) for value in held)
        return min(float(np.linalg.norm(value - wanted)) for value in held) / allowed
    judged = [f for f in (*result.origins, *result.receivers) if f.judgement and f.judgement.allowed > 0]
    at = min((f for f in judged if f.where.step == 0), key=lambda f: f.where.kind != first.where.kind)
    assert at.judgement is not None
    assert at.judgement.policy == "error-model"
    return at.judgement.ratio


def found(path: Path, first: Finding) -> dict[tuple[str, ...], Parts]:
    """Return what each rank recorded at the boundary of a finding."""
    all_of = tensors(path, 0, first.where.kind)
    return {key: parts for key, parts in all_of.items() if key[1:3] == (first.where.name, first.where.slot)}


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.name)
def test_adversarial_parameters_put_a_mistake_far_above_what_is_allowed(
    mistaken: tuple[Ran, Ran], case: Case
) -> None:
    one, two = mistaken
    a, b = one.trace(case.reference()), two.trace(case)
    compared = diffed(a, b)
    first = compared.result.first_divergent
    assert first is not None, compared.summary()
    kind, name, slot = FIRST[case.name]
    assert (first.where.step, first.where.kind, first.where.slot) == (0, kind, slot), compared.summary()
    assert fnmatchcase(first.where.name, name), compared.summary()
    assert beyond(case, a, b, compared) >= 100
