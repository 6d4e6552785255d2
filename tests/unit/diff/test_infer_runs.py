"""Inference on small synthetic runs: parts of a sequence, owners of experts, what says nothing at init."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.diff.infer import Found, find_layout
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind
from tests.synthetic import Tensor, write_trace

W = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, 1000, (3, 8))
OUT = np.random.default_rng(2).normal(size=(3, 8, 2)).astype(np.float32)


def param(name: str, value: np.ndarray, step: int = -1) -> Tensor:
    return {"kind": Kind.PARAM, "name": name, "slot": "model", "step": step, "microbatch": None}, value


def batch(ids: np.ndarray, out: np.ndarray) -> list[Tensor]:
    root = {"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}
    return [(root, ids), ({"name": "mlp", "slot": "out"}, out)]


def found(folder: Path, a: list[Tensor], *b: list[Tensor]) -> Found:
    traces = [Trace.open(write_trace(folder / name, ranks)) for name, ranks in (("a", [a]), ("b", list(b)))]
    return find_layout(*traces)


def dims(layout: Found, name: str) -> str:
    return next(rule.body.dims for rule in layout.rules if rule.name == name)


PARTS = {
    "b s[cp] h": ([0, 1, 2, 3], [4, 5, 6, 7]),
    "b s[cp:zigzag] h": ([0, 1, 6, 7], [2, 3, 4, 5]),
}


@pytest.mark.parametrize("wanted", PARTS)
def test_ranks_that_were_given_parts_of_one_sequence_are_context_parallel(
    tmp_path: Path, wanted: str
) -> None:
    ranks = [[param("w", W), *batch(IDS[:, own], OUT[:, own])] for own in PARTS[wanted]]
    layout = found(tmp_path, [param("w", W), *batch(IDS, OUT)], *ranks)
    assert (layout.axes, layout.data, layout.swaps, layout.undecided) == ({"cp": 2}, (), [], [])
    assert dims(layout, "mlp") == wanted
    assert dims(layout, "w") == "o i same:cp"


def test_a_sequence_that_is_padded_to_be_split_is_found_too(tmp_path: Path) -> None:
    ids, out = (np.concatenate([x, np.zeros_like(x[:, :4])], axis=1) for x in (IDS, OUT))
    order = ([0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8])
    ranks = [[param("w", W), *batch(ids[:, own], out[:, own])] for own in order]
    layout = found(tmp_path, [param("w", W), *batch(IDS, OUT)], *ranks)
    assert layout.swaps == []
    assert dims(layout, "mlp") == "b s[cp:zigzag] h"


def test_copies_of_parts_of_a_sequence_are_data_parallel_beside_it(tmp_path: Path) -> None:
    halves = [(rows, own) for rows in (slice(0, 1), slice(1, 3)) for own in PARTS["b s[cp] h"]]
    ranks = [[param("w", W), *batch(IDS[rows, :][:, own], OUT[rows, :][:, own])] for rows, own in halves]
    layout = found(tmp_path, [param("w", W), *batch(IDS, OUT)], *ranks)
    assert (layout.axes, layout.data) == ({"dp": 2, "cp": 2}, ("dp",))
    assert dims(layout, "mlp") == "b s[cp] h"


def test_rows_of_their_own_are_no_parts_of_a_sequence(tmp_path: Path) -> None:
    ranks = [[param("w", W), *batch(IDS[own], OUT[own])] for own in (slice(0, 1), slice(1, 3))]
    layout = found(tmp_path, [param("w", W), *batch(IDS, OUT)], *ranks)
    assert (layout.axes, layout.data) == ({"dp": 2}, ("dp",))


def test_parts_of_the_sequence_on_the_wrong_ranks_are_a_swap(tmp_path: Path) -> None:
    ranks = [[param("w", W), *batch(IDS[:, own], OUT[:, own])] for own in ([4, 5, 6, 7], [0, 1, 2, 3])]
    layout = found(tmp_path, [param("w", W), *batch(IDS, OUT)], *ranks)
    assert layout.swaps == ["positions of the input: part 0 holds 4:8; part 1 holds 0:4"]
    assert dims(layout, "mlp") != "b s[cp:zigzag] h"


EXPERTS = [np.random.default_rng(10 + e).normal(size=(2, 3)).astype(np.float32) for e in range(4)]


def expert(number: int, content: int) -> Tensor:
    return param(f"layers.0.mlp.experts.{number}.up", EXPERTS[content])


def experts(folder: Path, *owned: dict[int, int], off: float = 0.0) -> Found:
    """Return the layout of ranks that hold these experts by number; ``off`` is added to their output."""
    ids = [IDS[n : n + 1] for n in range(len(owned))]
    module = {"name": "layers.0.mlp", "slot": "out"}
    root = {"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}
    a = [param("w", W), *(expert(e, e) for e in range(4)), (root, IDS), (module, OUT)]
    ranks = [
        [
            param("w", W),
            *(expert(n, e) for n, e in own.items()),
            (root, ids[r]),
            (module, OUT[r : r + 1] + off),
        ]
        for r, own in enumerate(owned)
    ]
    return found(folder, a, *ranks)


def test_experts_that_ranks_number_from_0_are_found_by_content(tmp_path: Path) -> None:
    layout = experts(tmp_path, {0: 0, 1: 1}, {0: 2, 1: 3})
    [rename] = layout.renames
    assert (layout.axes, layout.data, layout.swaps, layout.undecided) == ({"ep": 2}, ("ep",), [], [])
    assert (rename.glob, rename.add) == ("layers.{n}.mlp.experts.{e}.*", (("e", "ep", (0, 2)),))
    assert dims(layout, "layers.{n}.mlp.experts.*") == "... own:ep"


def test_experts_under_the_whole_programs_numbers_need_no_rename(tmp_path: Path) -> None:
    layout = experts(tmp_path, {0: 0, 3: 3}, {1: 1, 2: 2})
    assert (layout.renames, layout.swaps) == ([], [])
    assert dims(layout, "layers.{n}.mlp.experts.*") == "... own:ep"


def test_experts_dealt_in_turn_are_a_layout_if_their_module_agrees(tmp_path: Path) -> None:
    layout = experts(tmp_path, {0: 0, 1: 2}, {0: 1, 1: 3})
    [rename] = layout.renames
    assert layout.swaps == []
    assert rename.add == (("e", "ep", (0, 1)), ("e", "e", (0, 1)))


def test_exchanged_experts_under_the_whole_programs_numbers_are_a_swap(tmp_path: Path) -> None:
    layout = experts(tmp_path, {0: 0, 1: 1}, {2: 3, 3: 2})
    assert layout.swaps == ["layers.{n}.mlp.experts.*: 2 holds 3, 3 holds 2"]
    assert layout.renames == []


@pytest.mark.parametrize(
    "owned", [({0: 0, 1: 2}, {0: 1, 1: 3}), ({0: 1, 1: 0}, {0: 2, 1: 3}), ({0: 0, 1: 1}, {0: 3, 1: 2})]
)
def test_exchanged_experts_are_a_swap_where_their_module_differs(
    tmp_path: Path, owned: tuple[dict[int, int], ...]
) -> None:
    layout = experts(tmp_path, *owned, off=1.0)
    [swap] = layout.swaps
    [rename] = layout.renames
    assert swap.startswith("layers.{n}.mlp.experts.*: owner 0 holds ")
    assert rename.add == (("e", "ep", (0, 2)),), "the file is the one without the swap"


ZERO = np.zeros(8, np.float32)
STEP = np.random.default_rng(5).normal(size=8).astype(np.float32) * 0.01
RIGHT = ([0, 1, 4, 5], [2, 3, 6, 7])


def constants(
    folder: Path, weights: tuple[list[int], ...], *owned: list[int], step: np.ndarray = STEP
) -> Found:
    """Return the layout of ranks whose weight's rows are ``weights``, and whose bias changed as ``owned``."""
    up = np.random.default_rng(4).normal(size=(8, 3)).astype(np.float32)
    a = [param("up.weight", up), param("up.bias", ZERO), param("up.bias", step, 0)]
    ranks = [
        [param("up.weight", up[rows]), param("up.bias", ZERO[own]), param("up.bias", step[own], 0)]
        for rows, own in zip(weights, owned, strict=True)
    ]
    return found(folder, a, *ranks)


def test_a_bias_of_zeros_lies_as_its_first_update_says(tmp_path: Path) -> None:
    blocks = constants(tmp_path / "blocks", RIGHT, *RIGHT)
    assert (blocks.swaps, blocks.undecided) == ([], [])
    assert dims(blocks, "up.bias") == "(o1|o2)[tp]"
    other = constants(tmp_path / "other", RIGHT, [0, 1, 2, 3], [4, 5, 6, 7])
    assert (other.swaps, other.undecided) == ([], [])
    assert dims(other, "up.bias") == "o[tp]", "not as the weight lies, but as its own values say"


def test_zeros_that_are_whole_on_all_ranks_stay_whole(tmp_path: Path) -> None:
    layout = constants(tmp_path, RIGHT, list(range(8)), list(range(8)))
    assert dims(layout, "up.bias") == "o same:tp"
    [evidence] = [rule.evidence for rule in layout.rules if rule.name == "up.bias"]
    assert evidence == "constant at init: whole by its first update"


@pytest.mark.parametrize("owned", [([2, 3, 6, 7], [0, 1, 4, 5]), ([4, 5, 0, 1], [6, 7, 2, 3])])
def test_zeros_on_the_wrong_ranks_or_in_the_wrong_order_are_a_swap(
    tmp_path: Path, owned: tuple[list[int], ...]
) -> None:
    layout = constants(tmp_path, RIGHT, *owned)
    [swap] = layout.swaps
    assert swap.startswith("up.bias: ")
    assert dims(layout, "up.bias") == "(o1|o2)[tp]", "the file is the one without the swap"


def test_zeros_whose_update_says_nothing_are_undecided(tmp_path: Path) -> None:
    layout = constants(tmp_path, RIGHT, *RIGHT, step=np.full(8, 0.5, np.float32))
    assert layout.undecided == ["up.bias: constant at init, and its first update fits (o1|o2)[tp] and o[tp]"]
