"""A layout that does not fit a trace is told with ranks and ranges."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tensortrace.diff.audit import audit, shapes_of
from tensortrace.diff.relaid import laid_out, relaid
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.rules import RunLayout
from tensortrace.tracer.types import Kind
from tests.synthetic import Tensor, write_trace

W = np.arange(24, dtype=np.float32).reshape(6, 4)


def param(name: str, value: np.ndarray) -> Tensor:
    return {"kind": Kind.PARAM, "name": name, "slot": "model", "step": -1, "microbatch": None}, value


def trace_of(folder: Path, *ranks: list[Tensor]) -> Trace:
    return Trace.open(write_trace(folder / "trace", ranks))


def layout_of(folder: Path, rules: str, axes: str = "tp = 2") -> RunLayout:
    path = folder / "layout.toml"
    path.write_text(f"format = 1\n[axes]\n{axes}\n{rules}")
    return RunLayout.load(path)


def rule(name: str, dims: str, more: str = "") -> str:
    return f'[[rule]]\nname = "{name}"\ndims = "{dims}"\n{more}\n'


def test_a_layout_that_fits_leaves_nothing_to_say(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [param("w", W[:3])], [param("w", W[3:])])
    layout = layout_of(tmp_path, rule("w", "o[tp] i"))
    assert audit(trace, layout) == []


def test_copies_that_differ_name_the_ranks(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [param("w", W)], [param("w", W)], [param("w", W + 1)])
    [problem] = audit(trace, layout_of(tmp_path, rule("w", "o i same:tp"), "tp = 3"))
    assert problem == "init: param w model: rank 2: other values in [0:6, 0:4] than ranks 0, 1"


def test_a_hole_names_its_range(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [param("w", W[:3])], [param("v", W[3:])])
    problems = audit(trace, layout_of(tmp_path, rule("w", "o[tp] i")))
    assert problems == [
        "init: param w model: no rank holds [3:6, 0:4] (rank 0 hold other parts)",
    ]


def test_a_shape_that_no_rank_can_have_names_rule_and_rank(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [param("w", W[:3])], [param("w", W[:2])])
    [problem, *_] = audit(trace, layout_of(tmp_path, rule("w", "o[tp] i", "sizes = { o = 6 }")))
    assert "rule 1 (w): dims 'o[tp] i': param w of shape (2, 4) on rank 1" in problem


def test_a_glob_that_matches_nothing_is_told(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [param("w", W[:3])], [param("w", W[3:])])
    [problem] = audit(trace, layout_of(tmp_path, rule("w", "o[tp] i") + rule("x.*", "o[tp] i")))
    assert "rule 2 (x.*): name: 'x.*' matches nothing" in problem


def test_tensors_that_differ_without_a_rule_are_told(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [param("w", W[:3])], [param("w", W[3:])])
    [problem] = audit(trace, layout_of(tmp_path, ""))
    assert problem == "init: param w model: ranks 0, 1 hold different tensors and no rule is of them"


def test_axes_that_make_another_world_are_told(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [param("w", W)], [param("w", W)])
    [problem] = audit(trace, layout_of(tmp_path, "", "tp = 4"))
    assert "tp 4 make 4 ranks, expected 2" in problem


def test_a_global_shape_that_is_not_the_other_traces_is_told(tmp_path: Path) -> None:
    whole = Trace.open(write_trace(tmp_path / "whole", [[param("w", W)]]))
    trace = trace_of(tmp_path, [param("w", W[:3])], [param("w", W[3:])])
    [problem] = audit(trace, layout_of(tmp_path, rule("w", "o i[tp]")), shapes_of(whole))
    assert problem == "init: param w model: global shape (3, 8), expected (6, 4) as in the other trace"


def test_a_fused_tensor_is_read_as_the_tensors_of_the_other_run(tmp_path: Path) -> None:
    q, k = W, W + 100
    trace = trace_of(
        tmp_path, [param("qk", np.concatenate([q[:3], k[:3]]))], [param("qk", np.concatenate([q[3:], k[3:]]))]
    )
    to = 'sizes = { q = 6, k = 6 }\nto = { "q" = "q i", "k" = "k i" }'
    seen = relaid(trace, layout_of(tmp_path, rule("qk", "(q|k)[tp] i", to)))
    found = [(e.name, rank.read(e)) for rank in seen.ranks for e in rank.entries]
    assert [name for name, _ in found] == ["q", "k", "q", "k"]
    for (_, value), wanted in zip(found, [q[:3], k[:3], q[3:], k[3:]], strict=True):
        assert np.array_equal(value, wanted)


def test_a_layout_that_was_recorded_with_the_trace_is_used_unless_another_is_given(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [param("w", W[:3])], [param("w", W[3:])])
    layout_of(trace.path, rule("w", "o[tp] i"))
    other = layout_of(tmp_path, rule("w", "o i[tp]")).path
    shapes = [
        [e.shard.global_shape for e in laid_out(trace, path)[0].ranks[0].entries if e.shard]
        for path in (None, other)
    ]
    assert shapes == [[(6, 4)], [(3, 8)]]


def test_blocks_that_ranks_share_beside_split_ones_are_copies_all_of_them(tmp_path: Path) -> None:
    ranks = [np.concatenate([W[2 * r : 2 * r + 2], W[4:] + (r == 1)]) for r in (0, 1, 0)]
    layout = layout_of(tmp_path, rule("w", "(q[tp]|k) i", "sizes = { k = 2 }"), "tp = 3")
    problems = audit(trace_of(tmp_path, *([param("w", value)] for value in ranks)), layout)
    wanted = "init: param w model: rank 1: other values in blocks that all ranks have than the other ranks"
    assert problems == [wanted]
