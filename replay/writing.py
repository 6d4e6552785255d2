"""Writes opened traces, or parts of them, as traces of their own."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from tensortrace.replay.redact import Content, OtherTokens
from tensortrace.tracer import layout
from tensortrace.tracer.codec_dtypes import Bytes
from tensortrace.tracer.manifest import write_manifest_new
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Entry
from tensortrace.tracer.writer import RankWriter


def write_trace(trace: Trace, folder: Path, *, tokens: OtherTokens | None = None) -> None:
    """Write a trace into a new folder, as small as it goes; ``tokens`` replaces what it was given.

    Raises TraceError where the trace is damaged, OSError where it cannot be written.
    """
    folder.mkdir()
    for rank in trace.ranks:
        _write_rank(rank, folder, tokens)
    if trace.manifest is not None:
        write_manifest_new(folder / layout.MANIFEST, trace.manifest)


def _write_rank(rank: RankTrace, folder: Path, tokens: OtherTokens | None) -> None:
    with RankWriter(folder, rank.rank, attempt=rank.attempt, compress="best", dedup=0) as writer:
        for entry in rank.entries:
            payload = rank.read_bytes(entry) if entry.blob is not None else None
            found = _content(entry, payload, tokens)
            writer.rewrite(replace(entry, digest=found.digest, stats=found.stats), found.payload)
        if rank.manifest is not None:
            writer.write_manifest(rank.manifest)


def _content(entry: Entry, payload: Bytes | None, tokens: OtherTokens | None) -> Content:
    if tokens is None:
        return Content(entry.digest, entry.stats, payload)
    found = tokens.content(entry, payload)
    return found if payload is not None else found._replace(payload=None)
