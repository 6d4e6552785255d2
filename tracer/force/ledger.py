"""What a rank was given of a recorded run, and why not, where it was not: one file of JSON lines for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tensortrace.tracer.errors import DamagedTrace
from tensortrace.tracer.types import Kind, Record

SUFFIX = ".forced.jsonl"


class Given(Record, frozen=True, kw_only=True):
    """A boundary of one step on one rank, over its microbatches; ``reason`` tells why it was not forced."""

    step: int
    kind: Kind
    name: str
    slot: str
    call: int
    reason: str = ""


class Ledger:
    """Notes what is forced; a boundary that was not forced once counts as not forced in its step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._given: dict[tuple[int, Kind, str, str, int], str] = {}

    def note(self, step: int, kind: Kind, name: str, slot: str, call: int, reason: str = "") -> None:
        """Note a boundary as forced, or why it was not."""
        key = (step, kind, name, slot, call)
        self._given[key] = self._given.get(key, "") or reason

    def write(self) -> None:
        """Append what was noted since the last time; raises OSError."""
        given, self._given = self._given, {}
        if given:
            lines = [
                msgspec.json.encode(Given(step=s, kind=k, name=n, slot=t, call=c, reason=why)) + b"\n"
                for (s, k, n, t, c), why in given.items()
            ]
            with (self._folder / f"{os.getpid()}{SUFFIX}").open("ab") as file:
                file.writelines(lines)


def read(folder: Path) -> Iterator[Given]:
    """Yield what all ranks noted, each rank's in order; raise DamagedTrace where a line is none of ours."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        for number, line in enumerate(path.read_bytes().splitlines()):
            try:
                yield msgspec.json.decode(line, type=Given)
            except msgspec.DecodeError as error:
                raise DamagedTrace(f"{path} line {number + 1}", found=str(error)) from error
