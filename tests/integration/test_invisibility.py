"""Recording changes no bit of a training: losses, parameters, optimizer state, generators, exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import harness

ZOO = harness.TRAINING / "invisibility_zoo.py"
PROGRAMS = re.findall(r"^def (\w+)\(\) -> Iterator\[float\]:", ZOO.read_text(), re.MULTILINE)

DTYPES = [("--dtype", "fp32"), ("--dtype", "bf16")]
WORK = [
    ("--dropout", 0.1),
    ("--dropout", 0.1, "--accumulate", 3),
    ("--dropout", 0.1, "--accumulate", 3, "--sync-every"),
]


def hashes(folder: Path, ranks: int) -> list[dict[str, str]]:
    return [json.loads((folder / f"hashes.rank{rank}").read_text()) for rank in range(ranks)]


def assert_invisible(folder: Path, ranks: int, *arguments: object, options: tuple[str, ...] = ()) -> None:
    """Train with and without recording; everything that the example hashes must be equal on every rank."""
    plain, traced = folder / "plain", folder / "traced"
    plain.mkdir()
    traced.mkdir()
    command = harness.on_ranks(ranks, harness.EXAMPLE, *arguments, "--hash-out", "hashes")
    alone = harness.run(command, folder=plain)
    watched = harness.run(harness.recording(folder / "trace", command, *options), folder=traced)
    assert (alone.exit_code, watched.exit_code) == (0, 0), alone.errors + watched.errors
    assert alone.output == watched.output
    assert hashes(traced, ranks) == hashes(plain, ranks)
    assert_recorded(folder / "trace", ranks)


def assert_recorded(trace: Path, ranks: int) -> None:
    """A recorder that records nothing is invisible, too: every rank must have finished its trace."""
    for rank in range(ranks):
        state = json.loads((trace / f"rank{rank:05d}" / "rank.json").read_text())
        assert state["ended"] == "finished", state["ended"]
        assert state["boundaries"] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_recording_changes_no_bit_in_fp32(tmp_path: Path, ranks: int) -> None:
    assert_invisible(tmp_path, ranks, "--steps", 4, "--dropout", 0.1, "--accumulate", 3, "--eval-every", 2)


@pytest.mark.parametrize(
    ("ranks", "level"),
    [
        (1, "sketch"),
        pytest.param(1, "stats", marks=pytest.mark.slow),
        pytest.param(2, "sketch", marks=pytest.mark.slow),
    ],
)
def test_no_level_of_recording_changes_a_bit(tmp_path: Path, ranks: int, level: str) -> None:
    arguments = ("--steps", 3, "--dropout", 0.1, "--accumulate", 2, "--eval-every", 2)
    assert_invisible(tmp_path, ranks, *arguments, options=("--level", level, "--level", "param@0=full"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_recording_changes_no_bit_under_bf16_autocast(tmp_path: Path, ranks: int) -> None:
    arguments = ("--steps", 4, "--dropout", 0.1, "--accumulate", 3, "--sync-every", "--dtype", "bf16")
    assert_invisible(tmp_path, ranks, *arguments)


def test_recording_changes_no_bit_where_the_loss_scale_skips_steps(tmp_path: Path) -> None:
    assert_invisible(tmp_path, 1, "--steps", 6, "--dtype", "fp16", "--loss-scale", 1e9)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with what every program of the zoo gives without a recorder, all in one process."""
    folder = tmp_path_factory.mktemp("alone")
    done = harness.run(harness.python(ZOO, folder, *PROGRAMS))
    assert done.exit_code == 0, done.errors
    return folder


@pytest.mark.parametrize("program", PROGRAMS)
def test_recording_changes_no_bit_of_the_zoo(tmp_path: Path, alone: Path, program: str) -> None:
    watched = harness.run(harness.recording(tmp_path / "trace", harness.python(ZOO, tmp_path, program)))
    assert watched.exit_code == 0, watched.errors
    plain, traced = (json.loads((folder / f"{program}.json").read_text()) for folder in (alone, tmp_path))
    assert traced == plain
    assert_recorded(tmp_path / "trace", ranks=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype[-1])
@pytest.mark.parametrize("work", WORK, ids=["dropout", "accumulate-no-sync", "accumulate-sync"])
def test_twenty_steps_are_equal_bit_for_bit(
    tmp_path: Path, ranks: int, dtype: tuple[str, str], work: tuple[object, ...]
) -> None:
    assert_invisible(tmp_path, ranks, "--steps", 20, *dtype, *work)
