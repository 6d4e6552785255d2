"""A disk slower than the training: memory stays within the buffer, and what is left out is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensortrace.tracer.codec_dtypes import size_bytes
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Entry
from tests.faults import running

BUFFER_MIB, BESIDE_MIB = 16, 64

Run = Callable[[str], tuple[RankTrace, float]]

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")


def run(pressure: str, root: Path) -> dict[str, Any]:
    program = str(running.PROGRAMS / "throttled.py")
    done = running.run(running.PYTHON, program, pressure, str(root))
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that gives what was recorded under a pressure, and the MiB beyond a plain run."""
    folder = tmp_path_factory.mktemp("throttled")
    plain = run("plain", folder / "plain")["peak_mib"]
    made = {pressure: run(pressure, folder / pressure)["peak_mib"] for pressure in ("block", "drop")}
    return lambda pressure: (Trace.open(folder / pressure).ranks[0], made[pressure] - plain)


def where(entry: Entry) -> tuple[object, ...]:
    return entry.step, entry.microbatch, entry.kind, entry.name, entry.slot, entry.call


@pytest.mark.parametrize("pressure", ["block", "drop"])
def test_memory_stays_within_the_buffer_and_a_little(ran: Run, pressure: str) -> None:
    _, extra_mib = ran(pressure)
    assert extra_mib < BUFFER_MIB + BESIDE_MIB


def test_nothing_is_missing_where_the_training_waits(ran: Run) -> None:
    rank, _ = ran("block")
    assert rank.manifest is not None
    assert (rank.manifest.drops.count, rank.manifest.ended) == (0, "finished")
    assert list(check(rank.folder.parent)) == []
    stored = sum(entry.blob.raw_length for entry in rank.entries if entry.blob is not None)
    assert stored > 3 * BUFFER_MIB * 2**20  # so that it had to wait


def test_what_is_missing_where_it_does_not_wait_is_counted_exactly(ran: Run) -> None:
    (whole, _), (rank, _) = ran("block"), ran("drop")
    assert rank.manifest is not None
    drops = rank.manifest.drops
    kept = {where(entry): entry.digest for entry in rank.entries}
    missing = [entry for entry in whole.entries if where(entry) not in kept]
    assert kept.items() <= {where(entry): entry.digest for entry in whole.entries}.items()
    assert drops.count == len(missing) > 0
    assert drops.size_bytes == sum(size_bytes(entry.dtype, entry.local_shape) for entry in missing)
    assert dict(drops.reasons) == {"buffer_full": len(missing)}
