"""``trace diff --resume``: an uninterrupted run against one that was saved and one that went on.

Two launches leave all traces: the second goes on from what the first has saved after two of four steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tensortrace.cli.main import run
from tensortrace.diff.resume import ResumeResult, compare_resumed
from tests import harness

SCRIPT = harness.TRAINING / "aligned.py"
SAVED = 2

LAUNCHES = (
    ("full:steps=4", f"first:steps=2,save=one@{SAVED}", "longer:steps=3,save=two@2"),
    (
        "resumed:steps=4,resume=one",
        "moments:steps=4,resume=one,plant=moments",
        "data:steps=4,resume=one,plant=data",
        "scheduler:steps=4,resume=one,plant=scheduler",
        "other:steps=4,values=1",
    ),
    ("whole-average:steps=4,average=1", f"first-average:steps=2,average=1,save=ema@{SAVED}"),
    (
        "average:steps=4,average=1,resume=ema",
        "no-average:steps=4,average=1,resume=ema,plant=average",
    ),
)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumed")
    for cases in LAUNCHES:
        done = harness.run(harness.on_ranks(1, SCRIPT, folder, *cases))
        assert done.exit_code == 0, done.errors
    return folder


def resume(traces: Path, resumed: str, first: str = "first") -> ResumeResult:
    return compare_resumed(traces / "full", traces / first, traces / resumed)


def test_a_run_that_restores_everything_is_equivalent(traces: Path) -> None:
    result = resume(traces, "resumed")
    assert (result.verdict, result.step, result.notes) == ("equivalent", SAVED, ())
    assert result.before.coverage.complete
    assert result.after.coverage.complete


def test_steps_that_are_done_again_are_told(traces: Path) -> None:
    """The first run went on for a step after it was saved."""
    result = resume(traces, "resumed", first="longer")
    assert (result.verdict, result.step) == ("equivalent", SAVED)
    assert result.notes == ("the resumed run starts from the state before step 2: it does 1 step again",)


FORGOTTEN = (
    ("moments", "init", "optimizer_state", "optimizer.lost_moment"),
    ("data", SAVED, "input", "input.order"),
    ("scheduler", SAVED, "schedule", "schedule.position"),
)


@pytest.mark.parametrize(("plant", "step", "kind", "cause"), FORGOTTEN)
def test_what_was_not_restored_is_named(
    traces: Path, plant: str, step: object, kind: str, cause: str
) -> None:
    result = resume(traces, plant)
    assert result.verdict == "divergent"
    assert result.before, result.before.headline
    first = result.after.first_divergent
    assert first is not None
    assert (first.where.step, first.where.kind) == (step, kind)
    assert cause in [found.code for found in result.after.causes]
    assert result.headline.startswith(f"divergent after it was resumed at step {SAVED}: ")


def test_an_average_is_compared_with_the_first_step_of_the_resumed_run(traces: Path) -> None:
    """Before it nothing shows it: a run that has only begun has not updated it yet."""
    result = compare_resumed(*(traces / name for name in ("whole-average", "first-average", "average")))
    assert result.verdict == "equivalent", result.headline
    # 2 embeddings, 12 in each of 2 blocks, the head and the count of updates, in 2 steps
    assert result.after.coverage.by_kind["buffer"] == 2 * (2 + 2 * 12 + 1 + 1)
    assert result.after.coverage.complete


def test_an_average_that_was_not_restored_is_named(traces: Path) -> None:
    result = compare_resumed(*(traces / name for name in ("whole-average", "first-average", "no-average")))
    first = result.after.first_divergent
    assert result.verdict == "divergent"
    assert first is not None
    assert (first.where.step, first.where.kind) == (SAVED, "buffer")
    assert first.where.name.startswith("AveragedModel.")


def test_the_command(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three = [str(traces / name) for name in ("full", "first", "moments")]
    assert run(["diff", "--resume", *three]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith(f"DIVERGENT after it was resumed at step {SAVED}: ")
    assert "before the interruption: EQUIVALENT" in shown
    assert run(["diff", "--resume", *three, "--json", "-"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["step"]) == ("tensortrace.resume/1", SAVED)
    assert (told["before"]["verdict"], told["after"]["verdict"]) == ("equivalent", "divergent")
    assert told["after"]["schema"] == "tensortrace.diff/1"


def test_what_makes_no_sense_is_one_line(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full, first, resumed = (str(traces / name) for name in ("full", "first", "resumed"))
    refused = (
        (["--resume", full, first], "three traces"),
        ([full, first, resumed], "three are for --resume"),
        (["--resume", first, full, resumed], "FULL FIRST RESUMED"),
        (["--resume", first, first, resumed], "the full run ends where the first one does"),
    )
    for words, expected in refused:
        assert run(["diff", *words]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert expected in said


def test_the_report_shows_both_comparisons_over_all_steps(traces: Path, tmp_path: Path) -> None:
    target = tmp_path / "r.html"
    paths = [str(traces / name) for name in ("full", "first", "moments")]
    assert run(["report", "--resume", *paths, "-o", str(target)]) == 0
    text = target.read_text(encoding="utf-8")
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["ladder"]["steps"][:4] == ["init", 0, 1, "resumed"]
    assert data["ladder"]["resumed"] == SAVED + 1
    assert data["ladder"]["first"][1] == data["ladder"]["resumed"]
    assert [(r["path"], r["begins"], r["offset"]) for r in data["recordings"]] == [
        (paths[1], None, 0), (paths[2], SAVED, SAVED),
    ]  # fmt: skip
    assert "trace diff --resume" in text
    assert run(["report", *paths, "-o", str(tmp_path / "s.html")]) == 2
