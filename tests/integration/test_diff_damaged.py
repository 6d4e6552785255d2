"""What a damaged trace may still be compared for, and that it is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensortrace.diff.engine import compare
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
