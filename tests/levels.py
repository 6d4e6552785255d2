"""Make of a fully recorded trace what a lower level would have kept of it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

SMALL = 256
"""Elements up to which every level stores a tensor in full."""

ALWAYS = frozenset({"input", "loss", "schedule"})
"""Kinds that every level stores in full."""

Line = dict[str, Any]


def is_large(line: Line) -> bool:
    """Tell whether a lower level keeps no values of a boundary."""
    floating = "float" in line["dtype"] or "complex" in line["dtype"]
    return floating and line["kind"] not in ALWAYS and math.prod(line["local_shape"]) > SMALL


def with_statistics_only(
    trace: Path, to: Path, left_out: Callable[[Line], bool] = is_large, level: str = "stats"
) -> Path:
    """Copy a trace without the values of what ``left_out`` selects, as it was recorded at ``level``."""
    shutil.copytree(trace, to)
    for index in to.glob("rank*/index.jsonl"):
        lines = [json.loads(line.rpartition("\t")[0]) for line in index.read_text().splitlines()]
        index.write_bytes(b"".join(_written(line) for line in _kept(lines, left_out)))
    for manifest in [to / "trace.json", *to.glob("rank*/rank.json")]:
        fields = json.loads(manifest.read_text())
        fields["promise"] = fields.get("promise", {}) | {"level": level}
        manifest.write_text(json.dumps(fields))
    return to


def _kept(lines: list[Line], left_out: Callable[[Line], bool]) -> Iterator[Line]:
    """Yield the lines without the values left out; shared blobs go to the first that is kept."""
    blobs = {line["event"]: line["blob"] for line in lines if "blob" in line}
    holders: dict[int, int] = {}
    for line in lines:
        blob = line["event"] if "blob" in line else line.get("same_as")
        bare = {key: value for key, value in line.items() if key not in ("blob", "same_as")}
        if blob is None or left_out(line):
            yield bare
        elif blob in holders:
            yield bare | {"same_as": holders[blob]}
        else:
            holders[blob] = line["event"]
            yield bare | {"blob": blobs[blob]}


def _written(line: Line) -> bytes:
    text = json.dumps(line, separators=(",", ":")).encode()
    return text + b"\t" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n"
