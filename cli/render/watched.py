"""How a recording gets on, as a table for a terminal and as a line for a log."""

from __future__ import annotations

from tensortrace.cli.render.live import MB, how_far, last_of, waiting
from tensortrace.cli.render.page import Look, Page
from tensortrace.cli.render.progress import duration
from tensortrace.cli.render.safe import safe
from tensortrace.tracer.watching import Snapshot, WatchedRank

ROWS = 32
"""Ranks in the table: those that matter most, if there are more."""

_HEADER = ("rank", "", "MB", "MB/s", "dropped", "idle", "last boundary")
"""Columns; one that has nothing to say is left out."""

_STYLES = {
    "waiting": "bold", "running": "bold green", "stale": "bold yellow", "finished": "bold green",
    "failed": "bold red", "killed": "bold red",
}  # fmt: skip


def render(snapshot: Snapshot, *, look: Look) -> str:
    """Return the state of the recording, then a row for each rank."""
    page = Page(look)
    page.line((snapshot.state.upper(), _STYLES[snapshot.state]), _rest(snapshot))
    shown = sorted(snapshot.ranks, key=_importance)[:ROWS]
    if shown:
        rows = [_row(rank) for rank in sorted(shown, key=lambda rank: rank.progress.folder)]
        kept = [column for column in zip(_HEADER, *rows, strict=True) if set(column[1:]) != {"-"}]
        page.table([column[0] for column in kept], [*zip(*(column[1:] for column in kept), strict=True)],
                   right="rank,MB,MB/s,dropped,idle")  # fmt: skip
    if left_out := len(snapshot.ranks) - len(shown):
        page.line(f"… {left_out:,} more ranks: nothing of note", indent=2)
    if told := _hang(snapshot):
        page.line(told)
    return page.text()


def line(snapshot: Snapshot) -> str:
    """Return the state of the recording as one line."""
    told = _hang(snapshot)
    return f"{snapshot.state}{_rest(snapshot)}" + (f" · {told}" if told else "")


def _rest(snapshot: Snapshot) -> str:
    if not snapshot.ranks:
        return ": no rank has begun" if not snapshot.over else ": nothing was recorded"
    parts = [how_far([rank.progress for rank in snapshot.ranks])]
    rates = [rank.rate_bytes_s for rank in snapshot.ranks if rank.rate_bytes_s is not None]
    if rates and not snapshot.over:
        parts.append(f"{sum(rates) / MB:,.1f} MB/s")
    if dropped := sum(rank.progress.dropped for rank in snapshot.ranks):
        parts.append(f"{dropped:,} dropped")
    if killed := sum(rank.state == "killed" for rank in snapshot.ranks):
        parts.append(f"{killed:,} killed")
    if snapshot.exit_code is not None:
        parts.append(f"exit code {snapshot.exit_code}")
    parts.append(f"last boundary {duration(snapshot.idle_s)} ago")
    return ": " + " · ".join(parts)


def _hang(snapshot: Snapshot) -> str:
    """Return which ranks the others wait for, empty where none does."""
    waited_for = frozenset(rank.progress.folder for rank in snapshot.ranks if rank.behind)
    return waiting([rank.progress for rank in snapshot.ranks], waited_for) if waited_for else ""


def _importance(rank: WatchedRank) -> tuple[bool, bool, float]:
    """Order ranks that are behind first, then those that ended otherwise than well, then the stillest."""
    well = rank.state == "running" or rank.progress.ended == "finished"
    return (not rank.behind, well, -rank.idle_s)


def _row(rank: WatchedRank) -> tuple[str, ...]:
    at = rank.progress
    state = safe(at.ended or rank.state, limit=40)
    return (
        f"{at.rank}.r{at.attempt}" if at.attempt else str(at.rank),
        f"{state}, behind" if rank.behind else state,
        f"{at.size_bytes / MB:,.1f}",
        "-" if rank.rate_bytes_s is None or rank.state != "running" else f"{rank.rate_bytes_s / MB:,.1f}",
        f"{at.dropped:,}" if at.dropped else "-",
        duration(rank.idle_s) if at.last else "-",
        last_of(at),
    )
