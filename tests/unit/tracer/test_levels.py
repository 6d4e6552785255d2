"""Levels: what options mean, and what they keep of which boundary."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tensortrace.tracer import layout
from tensortrace.tracer.errors import BadRequest, DamagedTrace
from tensortrace.tracer.levels import FULL, Level, Levels, parse_levels
from tensortrace.tracer.options import resolve
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.types import INIT_STEP, Entry, Kind, LevelRule, Promise
from tests.synthetic import boundary_of, write_trace

BIG, SMALL = np.zeros((257,), "f4"), np.zeros((16, 16), "f4")
SKETCH, STATS = Level("sketch"), Level("stats")


def levels(*texts: str) -> Levels:
    plain, rules = parse_levels(texts)
    return Levels(Promise(level=plain, levels=rules))


def of(found: Levels, kind: Kind, step: int, array: np.ndarray = BIG) -> Level:
    return found.of(boundary_of(0, array, kind=kind, step=step))


def test_the_last_rule_that_fits_holds_and_a_plain_level_where_none_does() -> None:
    found = levels("param=full", "stats", "activation,param@0-3,7=sketch:8x4", "@3=full")
    assert of(found, Kind.LOCAL_GRAD, 0) == STATS
    assert of(found, Kind.PARAM, INIT_STEP) == Level("sketch", (8, 4))
    assert of(found, Kind.ACTIVATION, 7) == Level("sketch", (8, 4))
    assert of(found, Kind.ACTIVATION, 4) == STATS
    assert of(found, Kind.PARAM, 4) == FULL
    assert of(found, Kind.PARAM, 3) == FULL


def test_whole_numbers_small_tensors_inputs_and_losses_are_kept_at_every_level() -> None:
    found = levels("stats")
    assert of(found, Kind.PARAM, 0) == STATS
    assert of(found, Kind.PARAM, 0, SMALL) == FULL
    for dtype in ("i8", "?", "c8"):
        assert of(found, Kind.PARAM, 0, BIG.astype(dtype)) == FULL
    for kind in (Kind.INPUT, Kind.LOSS, Kind.SCHEDULE, Kind.RNG):
        assert of(found, kind, 0) == FULL


def test_options_become_a_promise_of_the_version_that_has_levels() -> None:
    promise = resolve("a", level=["sketch:16x16", "param@init=full"]).promise
    assert (promise.level, promise.levels) == ("sketch", (LevelRule("full", (Kind.PARAM,), ((-1, -1),)),))
    assert layout.version_of(promise) == 3
    assert layout.version_of(resolve("a", level=["full"]).promise) == 1


@pytest.mark.parametrize(
    "text",
    [
        "all",
        "sketch:33x4",
        "sketch:0x4",
        "sketch:16",
        "=full",
        "param@=full",
        "param=",
        "prm=full",
        "@x=stats",
    ],
)
def test_a_level_that_is_none_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(BadRequest, match="option --level") as caught:
        parse_levels([text])
    assert "\n" not in str(caught.value)


BASE = np.random.default_rng(0).standard_normal((40, 10)).astype("f4")
TOKENS = np.arange(800).reshape(40, 20)


def written(folder: Path, *texts: str) -> list[Entry]:
    """Write tokens, an activation of them, the same values as a parameter, and that again."""
    plain, rules = parse_levels(texts)
    tensors = [
        ({"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}, TOKENS),
        ({"kind": Kind.ACTIVATION}, BASE),
        ({"kind": Kind.PARAM, "microbatch": None}, BASE),
        ({"kind": Kind.LOCAL_GRAD, "microbatch": None}, BASE),
        ({"kind": Kind.PARAM, "microbatch": None, "name": "bias"}, BASE[:20]),
    ]
    write_trace(folder, [tensors], promise=Promise(level=plain, levels=rules))
    assert list(check(folder)) == []
    return list(Trace.open(folder).ranks[0].entries)


def test_a_sketch_trace_holds_numbers_in_place_of_bytes_and_says_so(tmp_path: Path) -> None:
    tokens, activation, param, grad, bias = written(tmp_path / "a", "sketch")
    rank = Trace.open(tmp_path / "a").ranks[0]
    assert [rank.stored(entry) for entry in rank.entries] == [True, False, False, False, True]
    assert tokens.sketch is None
    assert activation.sketch is not None
    assert (activation.sketch.rows, activation.stats) == (0, param.stats)
    assert param.sketch is not None
    assert param.sketch.rows is None
    assert grad.sketch == param.sketch
    lines = (rank.folder / "index.jsonl").read_text().splitlines()
    assert '"sketch_ref":2' in lines[3]
    assert bias.sketch is None


def test_stats_keep_digest_and_statistics_alone(tmp_path: Path) -> None:
    found = written(tmp_path / "a", "stats")
    assert [e.sketch for e in found] == [None] * 5
    assert [e.blob is None and e.same_as is None for e in found] == [False, True, True, True, False]
    assert found[1].digest == written(tmp_path / "b", "full")[1].digest


def test_what_is_stored_for_one_boundary_is_there_for_another_of_the_same_bytes(tmp_path: Path) -> None:
    found = written(tmp_path / "a", "stats", "param=full")
    assert [e.blob is not None for e in found] == [True, False, True, False, True]
    assert found[3].same_as == 2


def test_a_sketch_ref_to_other_content_is_damage(tmp_path: Path) -> None:
    written(tmp_path / "a", "sketch")
    index = tmp_path / "a" / "rank00000" / "index.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    text = lines[3].partition(b"\t")[0].replace(b'"sketch_ref":2', b'"sketch_ref":0')
    lines[3] = b"%b\t%b\n" % (text, xxhash.xxh3_64_hexdigest(text).encode())
    index.write_bytes(b"".join(lines))
    with pytest.raises(DamagedTrace, match="sketch_ref 0 is no earlier line with a sketch and that digest"):
        Trace.open(tmp_path / "a")


def test_a_promise_of_an_unknown_level_is_damage(tmp_path: Path) -> None:
    written(tmp_path / "a", "sketch")
    manifest = tmp_path / "a" / "rank00000" / "rank.json"
    manifest.write_text(manifest.read_text().replace('"sketch"', '"sketch:99x1"'))
    with pytest.raises(DamagedTrace, match=r"promise\.level is sketch:99x1"):
        Trace.open(tmp_path / "a")


def report(path: Path, step: object, **fields: object) -> Path:
    finding = None if step is None else {"step": step, "kind": "param", "name": "w"}
    text = {"schema": "tensortrace.diff/1", "verdict": "divergent", "first_divergent": finding} | fields
    path.write_text(json.dumps(text))
    return path


def test_the_step_where_a_report_says_that_runs_part_is_kept_in_full(tmp_path: Path) -> None:
    found = Levels(resolve("a", full_at=report(tmp_path / "r.json", 7)).promise)
    assert of(found, Kind.ACTIVATION, 7) == FULL
    assert of(found, Kind.PARAM, 6) == FULL
    assert of(found, Kind.ACTIVATION, 6) == SKETCH
    assert of(found, Kind.PARAM, 5) == of(found, Kind.PARAM, 8) == SKETCH
    found = Levels(
        resolve("a", full_at=report(tmp_path / "r.json", 3, step_offset=2), level=["stats"]).promise
    )
    assert [of(found, Kind.ACTIVATION, step) for step in range(4)] == [STATS, FULL, STATS, FULL]
    assert of(found, Kind.PARAM, INIT_STEP) == FULL
    found = Levels(resolve("a", full_at=report(tmp_path / "r.json", "init")).promise)
    assert [of(found, Kind.PARAM, step) for step in (INIT_STEP, 0, 1)] == [FULL, FULL, SKETCH]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"schema": "tensortrace.diff/1", "first_divergent": null}', "first_divergent null"),
        ('{"schema": "tensortrace.diff/1", "first_divergent": {"step": "x"}}', "step 'x'"),
        ('{"schema": "tensortrace.diff/1", "first_divergent": {"step": -2}}', "step -2"),
        ('{"schema": "tensortrace.show/1", "first_divergent": null}', "tensortrace.show"),
        ("[]", "Expected `object`"),
        ("\xff", "malformed"),
        (None, "No such file"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(BadRequest, match="option --full-at") as caught:
        resolve("a", full_at=path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
