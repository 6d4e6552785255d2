"""The names of a trace's files; the only place that knows them."""

from __future__ import annotations

import re
from pathlib import Path

from tensortrace.tracer.types import Promise

FORMAT_VERSION = 1
"""What a trace states that holds nothing newer: every reader understands it."""

WITH_OPERATIONS = 2
"""What a trace states of whose operations something is promised: readers of version 1 know none."""

WITH_LEVELS = 3
"""What a trace states of which not everything is promised in full."""

WITH_LEFT_OUT = 4
"""What a trace states that dropped steps on purpose, or left bytes of copies to another rank."""

NEWEST = WITH_LEFT_OUT
"""The newest version that this reader knows."""

MANIFEST = "trace.json"
RANK_MANIFEST = "rank.json"
INDEX = "index.jsonl"
LAYOUT = "layout.toml"
PART = ".part"

_RANK_FOLDER = re.compile(r"rank(\d{5,})(?:\.r(\d+))?")


def rank_folder(root: Path, rank: int, attempt: int = 0) -> Path:
    """Return the folder of a global rank; ``attempt`` counts elastic restarts from 0."""
    return root / (f"rank{rank:05d}" + (f".r{attempt}" if attempt else ""))


def parse_rank_folder(name: str) -> tuple[int, int] | None:
    """Return (rank, attempt) for the name of a rank folder, or None for any other name."""
    match = _RANK_FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def segment_name(number: int) -> str:
    """Return the file name of a sealed segment; while it is open, ``PART`` is appended."""
    return f"seg{number:06d}.safetensors.zst"


def version_of(promise: Promise) -> int:
    """Return the format version of a trace that keeps this promise: the least that describes it."""
    if promise.keep_last or promise.dedup_replicas:
        return WITH_LEFT_OUT
    if promise.level != "full" or promise.levels:
        return WITH_LEVELS
    return WITH_OPERATIONS if promise.zoom else FORMAT_VERSION
