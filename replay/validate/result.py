"""What a validation found, for people and for JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = "tensortrace.validate/1"

Verdict = Literal["equivalent", "divergent", "incomplete", "failed", "trouble"]
"""``failed``: the feature's command does. ``trouble``: the base's does, or it is unlike itself."""


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the records of a validation; ``docs/validate.md`` describes them."""


class Tags(Told, frozen=True):
    """What identifies a run in a log: each dimension that can change its numbers.

    ``model`` is the class of the first module that was called, ``meshes`` are axes and their sizes,
    ``inputs`` the shapes of the first microbatch's inputs on the first rank.
    """

    model: str | None
    world_size: int
    meshes: tuple[str, ...]
    dtypes: tuple[str, ...]
    inputs: tuple[str, ...]
    steps: int
    device: str | None
    host: str | None
    versions: dict[str, str]


class Run(Told, frozen=True):
    """One recorded run: ``role`` is base-1, base-2 … or feature; ``reused`` that it was found, not run."""

    role: str
    commit: str
    trace: str
    log: str
    exit_code: int
    seconds: float
    reused: bool


class CellResult(Told, frozen=True):
    """One command: how far the base repeats itself, and what the feature is against that.

    ``noise`` is by what share of what correct programs may differ runs of the base do where that is most,
    0.0 where they are equal bit for bit. ``cause`` is the first cause's code, ``diff`` the
    file of the whole comparison.
    """

    name: str
    command: tuple[str, ...]
    verdict: Verdict
    headline: str
    runs: tuple[Run, ...]
    tags: Tags | None = None
    noise: float | None = None
    compared: int = 0
    bitwise_equal: int = 0
    cause: str | None = None
    diff: str | None = None
    notes: tuple[str, ...] = ()


class Validation(Told, frozen=True, kw_only=True):
    """All cells; true where each is equivalent."""

    schema: str = SCHEMA
    verdict: Verdict
    headline: str
    repository: str
    base: str
    base_commit: str
    feature: str
    feature_commit: str
    folder: str
    cells: tuple[CellResult, ...]
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Tell whether the feature is equivalent to the base in every cell."""
        return self.verdict == "equivalent"

    def to_json(self) -> bytes:
        """Return the result as JSON, UTF-8; numbers that are not finite are null."""
        return msgspec.json.encode(self)
