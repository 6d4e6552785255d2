"""``trace report``: what it gathers, the file it writes, what it refuses."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensortrace.cli import main
from tensortrace.cli.report.page import Page, of_comparison
from tensortrace.diff.causality import Node
from tensortrace.diff.engine import CompareOptions, compare
from tensortrace.diff.examined import Examined
from tensortrace.diff.result import Result
from tensortrace.diff.series import Series, series_of
from tensortrace.diff.shares import Share, shares
from tensortrace.diff.survey import Surveyed, survey
from tensortrace.tracer.types import Kind
from tests.simulated import At, Program


class LocalMeans(Program):
    """Each rank averages over its own tokens: DDP's mean then weighs tokens of few more."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        return 1 / counts[(rank, microbatch)]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("traces")
    programs = {"one": Program(), "two": Program(ranks=2, order=1), "means": LocalMeans(ranks=2)}
    return {name: program.write(folder / name) for name, program in programs.items()}


@dataclass
class Seen:
    """What a report sees of one comparison, gathered while its traces were open."""

    result: Result
    rows: list[Surveyed]
    parents: dict[Node, tuple[Node, ...]]
    shares: tuple[tuple[Share, ...], tuple[Share, ...]]
    series: Series
    page: Page


def seen(a: Path, b: Path, **options: Any) -> Seen:
    found: list[Seen] = []

    def look(examined: Examined) -> None:
        rows = list(survey(examined.execution, examined.result))
        graph = examined.execution.graph
        outcomes, near = examined.execution.outcomes, examined.nearest.found()
        pair = outcomes[0].pair if outcomes else near[0].pair
        assert pair is not None
        found.append(
            Seen(
                examined.result, rows, {row.node: graph.parents(row.node) for row in rows}, shares(pair),
                series_of(examined.b, examined.steps), of_comparison(examined, (), "r.html"),
            )
        )  # fmt: skip

    compare(a, b, options=CompareOptions(**options), look=look)
    return found[0]


@pytest.fixture(scope="module")
def divergent(traces: dict[str, Path]) -> Seen:
    return seen(traces["one"], traces["means"])


@pytest.fixture(scope="module")
def equivalent(traces: dict[str, Path]) -> Seen:
    return seen(traces["one"], traces["two"])


def test_every_compared_boundary_is_surveyed_once_parents_first(divergent: Seen) -> None:
    rows, result = divergent.rows, divergent.result
    states = Counter(row.state for row in rows)
    assert len({row.node for row in rows}) == len(rows)
    assert states["equal"] == result.coverage.bitwise_equal
    assert states["origin"] == len(result.origins)
    assert states["receiver"] == result.receivers_total
    assert sum(states.values()) - states["missing"] == result.coverage.compared
    places = {row.node: n for n, row in enumerate(rows)}
    pairs = ((node, parent) for node, parents in divergent.parents.items() for parent in parents)
    assert [(n, p) for n, p in pairs if p in places and places[p] > places[n]] == []


def test_what_was_left_out_is_not_surveyed(traces: dict[str, Path]) -> None:
    found = seen(traces["one"], traces["two"], kinds=(Kind.PARAM,))
    assert {row.node.slot.kind for row in found.rows} == {Kind.PARAM}


def test_a_token_weighs_what_its_rank_and_the_reduction_make_of_it(divergent: Seen) -> None:
    documents = Program().documents(0)
    valid = [sum(len(d) - 1 for d in documents[rank::2]) for rank in range(2)]
    a, b = divergent.shares
    assert [(s.rank, s.tokens) for s in b] == [(0, valid[0]), (1, valid[1])]
    assert [s.effective for s in b] == pytest.approx([0.5 / count for count in valid], rel=1e-5)
    assert [s.effective for s in a] == pytest.approx([1 / sum(valid)], rel=1e-5)


def test_loss_norms_and_schedule_are_read_step_by_step(equivalent: Seen) -> None:
    records = Program(ranks=2, order=1).run()
    totals: dict[int, list[float]] = {step: [0.0, 0.0] for step in range(3)}
    for rank in records:
        for fields, value in rank:
            if fields["kind"] == Kind.LOSS and fields["slot"] in ("sum", "count"):
                totals[fields["step"]][fields["slot"] == "count"] += float(value)
    params = {f["name"]: v for f, v in records[0] if f["kind"] == Kind.PARAM and f["step"] == 2}
    losses = equivalent.series["loss cross_entropy, mean per token"]
    assert losses == pytest.approx({step: total / count for step, (total, count) in totals.items()})
    norm = np.sqrt(sum(np.sum(np.square(v, dtype=np.float64)) for v in params.values()))
    assert equivalent.series["parameter norm"][2] == pytest.approx(norm)
    assert equivalent.series["schedule optimizer.0.group.0 lr"][0] == pytest.approx(0.01)


def test_equivalent_runs_show_the_tensors_nearest_to_their_limit(equivalent: Seen) -> None:
    ratios = [float(t.facts[2].value) for t in equivalent.page.tensors]
    assert ratios == sorted(ratios, reverse=True)
    assert 0 < ratios[-1] <= ratios[0] <= 1
    judged = [boundary.judgement.ratio for boundary in equivalent.result.boundaries]
    assert ratios[0] == pytest.approx(max(judged), rel=1e-3)


def test_the_first_divergence_is_the_first_tensor_and_no_kind_crowds_out_others(divergent: Seen) -> None:
    first = divergent.result.first_divergent
    assert first is not None
    assert divergent.page.tensors[0].told.where == first.where
    kinds = Counter(t.node.slot.kind for t in divergent.page.tensors if t.role == "receiver")
    assert max(kinds.values()) <= 2
    assert len(kinds) >= 3
    assert divergent.page.claim.startswith("mean of local means")


@pytest.fixture(scope="module")
def written(traces: dict[str, Path]) -> str:
    return write(traces, traces["one"].parent / "r.html", "one", "means")


def write(traces: dict[str, Path], target: Path, *arguments: object) -> str:
    names = [str(traces.get(str(word), word)) for word in arguments]
    assert main.run(["report", *names, "-o", str(target)]) == 0
    return target.read_text(encoding="utf-8")


def test_the_policy_has_the_hashes_of_what_the_file_holds(written: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', written)
    assert policy is not None
    told = policy[1].replace("&#39;", "'")
    for tag in ("style", "script"):
        inside = re.findall(f"<{tag}>(.*?)</{tag}>", written, re.S)
        assert len(inside) == 1
        digest = base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in told
    assert "default-src 'none'" in told
    assert "unsafe" not in told
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:|//)", written)


def test_what_the_script_reads_holds_no_character_of_html(written: str) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', written, re.S)
    assert found is not None
    assert not set("<>&\u2028\u2029") & set(found[1])
    assert json.loads(found[1])["ladder"]["steps"] == ["init", 0, 1, 2]


def test_a_path_that_would_reorder_or_end_text_is_shown_harmless(tmp_path: Path) -> None:
    folder = tmp_path / "<b>\u202erun</title>"
    trace = Program(steps=1).write(folder)
    assert main.run(["report", str(trace), "-o", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<b>" not in text
    assert "\u202e" not in text
    assert "&lt;b&gt;\ufffdrun&lt;/title&gt;" in text


def test_a_floor_and_the_json_beside_it(
    traces: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = Program(order=9, noise=0.0).write(tmp_path / "again")
    document = tmp_path / "d.json"
    options = ("--floor", again, "--json", document)
    text = write(traces, tmp_path / "r.html", "one", "two", *options)
    assert json.loads(document.read_text())["verdict"] == "equivalent"
    assert "floor of 1 run" in text
    assert "--floor" in text  # among the commands to make it again
    out, err = capsys.readouterr()
    assert out.splitlines()[0].endswith("bitwise equal")
    assert "next: open" in err


def test_numbers_that_are_not_finite_are_what_a_single_trace_tells_first(tmp_path: Path) -> None:
    class Broken(Program):
        def tamper(self, at: At, value: np.ndarray) -> np.ndarray:
            if (at.step, at.kind, at.name, at.slot) == (1, Kind.ACTIVATION, "act", "out"):
                return np.where(np.arange(value.size).reshape(value.shape) == 3, np.nan, value)
            return value

    trace = Broken(steps=2).write(tmp_path / "t")
    text = write({}, tmp_path / "r.html", trace)
    assert "NaN or Inf first in step 1, microbatch 0: activation act out" in text


def test_an_existing_file_is_refused_unless_forced(traces: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    target.write_text("mine")
    arguments = ["report", str(traces["one"]), "-o", str(target)]
    assert main.run(arguments) == 2
    assert target.read_text() == "mine"
    assert main.run([*arguments, "--force"]) == 0
    assert target.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "option", [("--exact",), ("--floor", "x"), ("--json", "x.json"), ("--kinds", "param")]
)
def test_options_of_a_comparison_need_two_traces(
    traces: dict[str, Path], tmp_path: Path, option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["report", str(traces["one"]), *option, "-o", str(tmp_path / "r.html")]) == 2
    assert "second trace" in capsys.readouterr().err
