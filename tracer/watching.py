"""What becomes of a recording, as its files tell: whether it runs, how fast, which rank others wait for."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Literal

import msgspec

from tensortrace.tracer import layout
from tensortrace.tracer.alive import is_alive
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.manifest import read_manifest
from tensortrace.tracer.progress import RankProgress, behind, look
from tensortrace.tracer.types import INIT_STEP, Manifest

SCHEMA = "tensortrace.watch/1"

GRACE_S = 10.0
"""A recording of which no rank runs any more has ended when its launcher has said nothing for so long."""

State = Literal["waiting", "running", "stale", "finished", "failed", "killed"]
"""``waiting``: no rank has begun. ``stale``: no rank that runs, or may run elsewhere, has moved for long."""

RankState = Literal["running", "ended", "killed"]


class WatchedRank(msgspec.Struct, frozen=True):
    """One rank: ``rate_bytes_s`` is what it writes a second, None until it was looked at twice.

    ``idle_s`` is how long ago it wrote its last boundary. ``behind`` tells that the others wait for it.
    """

    progress: RankProgress
    state: RankState
    idle_s: float
    rate_bytes_s: float | None
    behind: bool

    def document(self) -> dict[str, object]:
        """Return the fields that JSON holds of a rank."""
        at, last = self.progress, self.progress.last
        where = None if last is None else {
            "step": "init" if last.step == INIT_STEP else last.step, "microbatch": last.microbatch,
            "kind": last.kind, "name": last.name, "slot": last.slot, "call": last.call,
        }  # fmt: skip
        return {
            "rank": at.rank, "attempt": at.attempt, "folder": at.folder, "state": self.state,
            "ended": at.ended, "behind": self.behind, "last": where, "idle_s": self.idle_s,
            "size_bytes": at.size_bytes, "rate_bytes_s": self.rate_bytes_s, "dropped": at.dropped,
            "pid": at.pid, "host": at.host,
        }  # fmt: skip


class Snapshot(msgspec.Struct, frozen=True):
    """A recording at one moment. ``idle_s`` is how long no rank has moved; ``exit_code`` the command's.

    ``over`` tells that nothing more will come.
    """

    state: State
    over: bool
    idle_s: float
    exit_code: int | None
    ranks: tuple[WatchedRank, ...]

    def to_json(self) -> bytes:
        """Return the moment as one JSON object, UTF-8, as ``docs/watch.md`` describes it."""
        document = {
            "schema": SCHEMA, "state": self.state, "over": self.over, "idle_s": self.idle_s,
            "exit_code": self.exit_code, "ranks": [rank.document() for rank in self.ranks],
        }  # fmt: skip
        return msgspec.json.encode(document)


class Watcher:
    """Looks at a trace again and again; nothing it reads grows with the trace, nobody waits for it."""

    def __init__(self, root: Path, *, stale_after_s: float) -> None:
        """Take a recording as stale when no rank has moved for so long; 0: never."""
        self._root = root
        self._stale_after_s = stale_after_s
        self._host = socket.gethostname()
        self._sizes: dict[str, tuple[float, int]] = {}
        self._still_since: float | None = None

    def look(self) -> Snapshot:
        """Return how the recording is now."""
        now, clock = time.time(), time.monotonic()
        ranks = look(self._root)
        manifest = _launcher(self._root)
        states = {rank.folder: self._state_of(rank) for rank in ranks}
        running = [rank for rank in ranks if states[rank.folder] == "running"]
        idle_s = min((max(0.0, now - rank.moved_at) for rank in running or ranks), default=0.0)
        over = self._over(ranks, running, manifest, clock)
        stale = bool(running) and 0 < self._stale_after_s <= idle_s
        waited_for = behind(self._root, running) if stale and not over else frozenset()
        return Snapshot(
            state=_state(ranks, states, manifest, over=over, stale=stale),
            over=over,
            idle_s=idle_s,
            exit_code=manifest.exit_code if manifest else None,
            ranks=tuple(
                WatchedRank(
                    rank, states[rank.folder], max(0.0, now - rank.moved_at) if rank.moved_at else 0.0,
                    self._rate(rank, clock), rank.folder in waited_for,
                )
                for rank in ranks
            ),
        )  # fmt: skip

    def _state_of(self, rank: RankProgress) -> RankState:
        """Return a rank's state; of a process on another machine nothing is known but what it wrote."""
        if rank.ended is not None:
            return "ended"
        gone = rank.host == self._host and rank.pid > 0 and not is_alive(rank.pid)
        return "killed" if gone else "running"

    def _over(
        self, ranks: tuple[RankProgress, ...], running: list[RankProgress], manifest: Manifest | None,
        clock: float,
    ) -> bool:  # fmt: skip
        ended = manifest is not None and manifest.ended_at is not None
        if ended and not running:
            return True
        if ended:  # other tasks of a step may be at work still, or ranks that outlived their launcher
            return time.time() - max(rank.moved_at for rank in running) >= GRACE_S
        if running or not ranks:
            self._still_since = None
            return False
        if self._still_since is None:
            self._still_since = clock
        quiet = time.time() - max(rank.moved_at for rank in ranks) >= GRACE_S
        return quiet or clock - self._still_since >= GRACE_S

    def _rate(self, rank: RankProgress, clock: float) -> float | None:
        before = self._sizes.get(rank.folder)
        self._sizes[rank.folder] = (clock, rank.size_bytes)
        if before is None or clock <= before[0]:
            return None
        return max(0, rank.size_bytes - before[1]) / (clock - before[0])


def _launcher(root: Path) -> Manifest | None:
    try:
        return read_manifest(root / layout.MANIFEST)
    except (OSError, TraceError):
        return None


def _state(
    ranks: tuple[RankProgress, ...], states: dict[str, RankState], manifest: Manifest | None, *, over: bool,
    stale: bool,
) -> State:  # fmt: skip
    if not ranks:
        return "waiting" if not over else "finished" if manifest and manifest.exit_code == 0 else "failed"
    if not over and any(state == "running" for state in states.values()):
        return "stale" if stale else "running"
    last = {rank.rank: rank for rank in ranks}.values()  # each at its last attempt
    if any(rank.ended is None for rank in last):
        return "killed"
    if not over:
        return "running"  # the launcher has still to say how it ended
    failed = any(rank.ended != "finished" for rank in last) or (manifest is not None and manifest.exit_code)
    return "failed" if failed else "finished"
