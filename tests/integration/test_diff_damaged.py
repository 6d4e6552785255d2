"""What a damaged trace may still be compared for, and that it is said."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tensortrace.diff.engine import compare
from tensortrace.tracer.errors import TraceError
from tests.simulated import Program

SEGMENT = "rank00000/seg000000.safetensors.zst"


def cut(trace: Path, count: int) -> None:
    """Cut bytes off the end of the only segment."""
    segment = trace / SEGMENT
    os.truncate(segment, segment.stat().st_size - count)


def test_a_segment_that_lacks_no_tensor_is_compared_and_the_damage_said(tmp_path: Path) -> None:
    a, b = Program().write(tmp_path / "a"), Program().write(tmp_path / "b")
    cut(b, 20)  # within the record behind the last tensor
    result = compare(a, b)
    assert result.verdict == "equivalent"
    [note] = [note for note in result.notes if "damaged" in note]
    assert str(b / SEGMENT) in note
    assert "see `trace check`" in note
    assert compare(a, a).notes == ()


@pytest.mark.parametrize("side", ["a", "b"])
def test_lost_tensors_are_never_equivalent_though_their_digests_agree(tmp_path: Path, side: str) -> None:
    a, b = Program().write(tmp_path / "a"), Program().write(tmp_path / "b")
    cut(tmp_path / side, 4000)
    result = compare(a, b)
    assert result.verdict == "incomplete"
    [missing] = [missing for missing in result.coverage.missing if missing.counts_as_incomplete]
    assert missing.side == side
    assert missing.reason.endswith("tensors of rank 0 are lost: a segment is missing or cut off")


LEAST_INTACT = {"index.jsonl": "equivalent", "rank.json": "incomplete", "trace.json": "incomplete"}
"""What is said where one file is deleted: an index is rebuilt from the segments, nothing else is."""


def outcome(a: Path, b: Path) -> str:
    """Return the verdict, or ``refused`` where a trace cannot be read."""
    try:
        return compare(a, b).verdict
    except TraceError:
        return "refused"


@pytest.mark.parametrize("damage", ["deleted", "emptied", "halved", "of another run", "of another rank"])
def test_no_damaged_file_makes_a_correct_pair_equivalent_or_divergent(tmp_path: Path, damage: str) -> None:
    """Equal numbers on both sides: what is left can only be refused, incomplete, or whole after all."""
    whole = Program(ranks=2, steps=1).write(tmp_path / "whole")
    other = Program(ranks=2, steps=1, lr=2e-2).write(tmp_path / "other")
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    for number, file in enumerate(files):
        hurt = tmp_path / "hurt"
        shutil.rmtree(hurt, ignore_errors=True)
        shutil.copytree(whole, hurt)
        match damage:
            case "deleted":
                (hurt / file).unlink()
            case "emptied":
                os.truncate(hurt / file, 0)
            case "halved":
                os.truncate(hurt / file, (hurt / file).stat().st_size // 2)
            case "of another run":
                shutil.copy(other / file, hurt / file)
            case _:
                if len(file.parts) == 1:
                    continue
                shutil.copy(whole / f"rank0000{1 - int(str(file.parent)[-1])}" / file.name, hurt / file)
        found = outcome(hurt, whole) if number % 2 else outcome(whole, hurt)
        allowed = {"refused", "incomplete"}
        if damage == "deleted" and file.name in LEAST_INTACT:
            allowed = {LEAST_INTACT[file.name]}
        elif damage == "of another run" and file.suffix == ".json":
            allowed = {"equivalent"}  # the same layout and promise, word for word
        elif damage == "of another run" and file.suffix == ".zst":
            allowed |= {"equivalent"}  # equal digests in the indexes need no bytes; `--verify` reads them
        assert found in allowed, (file, found)
