"""What ranks left to others that have a copy (``--dedup-replicas``), and no rank stored."""

from __future__ import annotations

from tensortrace.tracer.reader import Trace


def spare_notes(trace: Trace) -> tuple[str, ...]:
    """Return which ranks left bytes that cannot be read: their copies differ, or those ranks are missing."""
    notes = []
    for rank in trace.ranks:
        if rank.copies is None:
            continue
        lost = [e for e in rank.entries if rank.copies.left(e) and not rank.stored(e)]
        if lost:
            first = lost[0]
            where = f"{first.kind.value} {first.name} {first.slot} in step {first.step}"
            notes.append(
                f"{trace.path.name}: rank {rank.rank} left the bytes of {len(lost)} tensors to the first "
                "rank with a copy (--dedup-replicas), and no rank that is there stored the same: only "
                f"digests and statistics are known, first of {where}"
            )
    return tuple(notes)
