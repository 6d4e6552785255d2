"""``trace show`` and ``trace check`` on small traces whose contents are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tensortrace.cli import main
from tensortrace.tracer.types import Kind, LevelRule, Mesh, Meta, Placement, Promise, Shard
from tests.synthetic import write_trace

X = np.arange(6, dtype=np.float32).reshape(2, 3)
HALVES = np.array([1.5, -2], np.float32)
W = np.full((4,), 0.5, dtype=np.float32)
PARAM = {"microbatch": None, "kind": Kind.PARAM, "name": "fc.w", "slot": "model"}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    ranks = [
        [
            ({**PARAM, "step": -1, "shard": Shard("ddp", (rank,), (Placement("replicate"),), (4,))}, W),
            ({"step": 0, "name": "fc", "slot": "in.0"}, X),
            (
                {
                    "step": 0, "name": "fc", "slot": "out", "producers": (1,),
                    "meta": Meta(source="train.py:12", module="Linear", training=True, autocast="bfloat16"),
                },
                X * (rank + 2),
            ),
            ({"step": 0, "name": "head", "slot": "in.0", "dtype": "bfloat16"}, HALVES),
            ({**PARAM, "step": 0}, W),
            ({**PARAM, "step": 1}, W + 1),
        ]
        for rank in range(2)
    ]  # fmt: skip
    meshes = {"ddp": Mesh(("dp",), (2,), (0, 1))}
    absent = {"unscaled_grad": "no GradScaler was used"}
    return write_trace(tmp_path / "a", ranks, meshes=meshes, absent=absent)


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run ``trace show`` and return its stdout with every wrap undone."""
    assert main.run(["show", *map(str, arguments)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_summary_counts_ranks_steps_kinds_and_bytes(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, trace)
    assert "2 ranks, 2 steps (0-1) and init, 1 microbatch a step at most" in text
    # per rank: two of 6 float32 and one of 2 bfloat16; three of 4 float32
    assert f"activation 2 6 {2 * (24 + 24 + 4)} B" in text
    assert f"param 1 6 {2 * 48} B" in text
    assert "absent: unscaled_grad: no GradScaler was used (ranks 0-1)" in text
    assert "selected: everything" in text
    assert "exit code 0" in text


def test_bytes_that_are_stored_once_count_once(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["show", str(trace), "--kind", "param", "--rank", "0", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["tensors"]
    assert [row["same_as"] for row in rows] == [None, 0, None]
    assert [row["stored_bytes"] > 0 for row in rows] == [True, False, True]
    assert [row["raw_bytes"] for row in rows] == [16, 16, 16]


def test_several_boundaries_are_listed_one_a_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, trace, "--name", "fc*", "--step", "0", "--rank", "1")
    l2 = np.linalg.norm(X * 3)
    assert f"0 0 1 {l2:.6g} float32[2, 3] activation fc out" in text
    assert "0 - 1 1 float32[4] param fc.w model" in text


def test_one_boundary_is_shown_in_full_on_each_rank(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    selection = ("--name", "fc", "--kind", "activation", "--step", "0", "--rank", "0")
    text = shown(capsys, trace, *selection, "--values")
    for part in (
        "step 0, microbatch 0: activation fc out on rank 0, event 2",
        "float32 [2, 3], 24 B",
        "6 finite elements: min 0, max 10, mean 5, L2 14.8324",  # sqrt(4 * 55)
        "computed from activation fc in.0",
        "called at train.py:12, in Linear, training, autocast bfloat16",
        "[[ 0., 2., 4.], [ 6., 8., 10.]]",
    ):
        assert part in text


def test_a_layout_is_told_in_words(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, trace, "--step", "init", "--rank", "1")
    assert "layout: replicate over dp (1 of 2), global [4]" in text


def test_step_zero_does_not_include_init(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "init:" not in shown(capsys, trace, "--step", "0", "--kind", "param")
    assert "init:" in shown(capsys, trace, "--step", "init", "--kind", "param")


def test_values_in_json_are_those_recorded(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["show", str(trace), "--name", "head", "--rank", "0", "--values", "--json", "-"]) == 0
    row = json.loads(capsys.readouterr().out)["tensors"][0]
    assert (row["dtype"], row["values"], row["values_left_out"]) == ("bfloat16", [1.5, -2.0], 0)


def test_values_in_json_are_bounded_and_the_rest_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "big", [[({}, np.arange(5000, dtype=np.int64))]])
    assert main.run(["show", str(path), "--name", "m", "--values", "--json", "-"]) == 0
    row = json.loads(capsys.readouterr().out)["tensors"][0]
    assert (len(row["values"]), row["values_left_out"]) == (4096, 904)


def test_values_that_are_not_finite_are_null_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "nan", [[({}, np.array([np.nan, 1.0, np.inf], np.float32))]])
    assert main.run(["show", str(path), "--name", "m", "--values", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"][0]["values"] == [None, 1.0, None]
    assert "1 finite elements; 1 NaN, 1 Inf" in shown(capsys, path, "--name", "m")


def test_complex_values_are_pairs_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "c", [[({}, np.array([1 + 2j], np.complex64))]])
    assert main.run(["show", str(path), "--name", "m", "--values", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"][0]["values"] == [[1.0, 2.0]]


def test_the_json_summary_lists_no_tensor_unless_asked(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["show", str(trace), "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["tensors"]) == ("tensortrace.show/1", [])
    assert (document["trace"]["steps"], document["trace"]["init"]) == ([0, 1], True)


def test_a_selection_that_matches_nothing_is_trouble_and_says_what_to_do(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["show", str(trace), "--name", "nope"]) == 2
    assert "no boundary" in capsys.readouterr().err


def test_values_without_a_selection_are_refused(trace: Path) -> None:
    assert main.run(["show", str(trace), "--values"]) == 2


def test_a_name_with_brackets_is_found_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "br", [[({"name": "w[0]"}, X)]])
    assert "activation w[0] out" in shown(capsys, path, "--name", "w[0]")


def test_hostile_strings_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b[2J\u202e"
    meta = Meta(source=hostile, module=hostile, autocast=hostile, op=hostile, aliases=(hostile,))
    fields = {"name": "w[red]", "meta": meta}
    path = write_trace(tmp_path / "h", [[(fields, X)]], ended=f"exception: {hostile}")
    for arguments in ((path,), (path, "--rank", "0"), (path, "--step", "0", "--values")):
        text = shown(capsys, *arguments)
        assert not {"\x1b", "\u202e"} & set(text)
    assert "w[red]" in text


def test_a_trace_of_a_killed_run_is_shown_with_its_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_trace(tmp_path / "killed", [[({}, X)]], finish=False)
    text = shown(capsys, path)
    assert "did not finish" in text
    assert "problem:" in text


def test_an_intact_trace_checks_out_and_says_how_much_was_verified(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["check", str(trace)]) == 0
    assert "intact: every digest of 12 boundaries on 2 ranks holds" in capsys.readouterr().out


def test_a_flipped_bit_is_named_with_its_file(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = next((trace / "rank00001").glob("seg*"))
    data = bytearray(segment.read_bytes())
    data[-40] ^= 1
    segment.write_bytes(data)
    assert main.run(["check", str(trace)]) == 1
    out, err = capsys.readouterr()
    assert segment.name in out
    assert "not intact" in out.splitlines()[-1]
    assert "next: trace show" in err


def test_a_flipped_bit_in_the_index_is_damage(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = trace / "rank00000" / "index.jsonl"
    data = bytearray(index.read_bytes())
    data[5] ^= 1
    index.write_bytes(data)
    assert main.run(["check", str(trace)]) == 1
    assert "index.jsonl: offset 0" in capsys.readouterr().out


def test_a_quiet_check_only_exits(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["check", "-q", str(trace)]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_folder_that_is_no_trace_is_trouble(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert main.run(["check", str(tmp_path / "empty")]) == 2
    assert main.run(["show", str(tmp_path / "nowhere")]) == 2


def test_show_says_what_levels_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = np.arange(300, dtype="f4")
    tensors = [
        ({"kind": Kind.PARAM, "name": "w", "slot": "model"}, big),
        ({"kind": Kind.LOCAL_GRAD, "name": "w", "slot": "grad"}, big + 1),
    ]
    promise = Promise(level="sketch:8x4", levels=(LevelRule("stats", (Kind.LOCAL_GRAD,), ((-1, 3),)),))
    write_trace(tmp_path / "a", [tensors], promise=promise)
    text = shown(capsys, tmp_path / "a")
    assert "selected: level sketch:8x4; local_grad steps init-3 at level stats" in text
    assert "of 1 boundaries a sketch was kept in place of values, of 1 digest and statistics alone" in text
    one = shown(capsys, tmp_path / "a", "--kind", "param")
    assert "only digest, statistics and a sketch of 8x4 were kept" in one
