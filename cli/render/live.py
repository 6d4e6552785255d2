"""What ``trace record`` shows while the command runs, and when it has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from tensortrace.cli.render.numbers import ranks as numbers
from tensortrace.cli.render.safe import safe
from tensortrace.cli.render.say import say
from tensortrace.tracer.launch import Outcome
from tensortrace.tracer.progress import RankProgress, behind
from tensortrace.tracer.types import INIT_STEP, Entry

MB = 1_000_000
SPARSE_S = 30.0
"""Between two lines where stderr is not a terminal."""

WIDTH = 79

WARNING = "trace: warning:"
"""How a line begins that is said even where nothing else is."""


class Live:
    """The line of progress on stderr, and the table of a hang. The clock is monotonic, in seconds."""

    def __init__(self, *, hang_after_s: float, root: Path | None = None, quiet: bool = False) -> None:
        """Tell in a hang which rank the others wait for where ``root`` is the trace; if ``quiet`` no more."""
        self._hang_after_s = hang_after_s
        self._root = root
        self._on_terminal = sys.stderr.isatty() and not quiet
        self._quiet = quiet
        self._moved_at = self._shown_at = time.monotonic()
        self._index_bytes = 0
        self._hang_shown = False

    def show(self, ranks: tuple[RankProgress, ...]) -> None:
        """Show the state of all ranks: in place on a terminal, else now and then."""
        now = time.monotonic()
        if (index_bytes := sum(rank.index_bytes for rank in ranks)) != self._index_bytes:
            self._index_bytes, self._moved_at, self._hang_shown = index_bytes, now, False
        waiting = any(rank.ended is None for rank in ranks)  # else recording is over, and training goes on
        if waiting and not self._hang_shown and 0 < self._hang_after_s <= now - self._moved_at:
            self._hang_shown = True
            self._print_hang(ranks, now - self._moved_at)
        if self._on_terminal:
            click.echo("\r" + progress_line(ranks).ljust(WIDTH), err=True, nl=False)
        elif ranks and not self._quiet and now - self._shown_at >= SPARSE_S:
            self._shown_at = now
            click.echo(progress_line(ranks), err=True)

    def end(self) -> None:
        """Remove the line of progress."""
        if self._on_terminal:
            click.echo("\r" + " " * WIDTH + "\r", err=True, nl=False)

    def _print_hang(self, ranks: tuple[RankProgress, ...], seconds: float) -> None:
        self.end()
        running = [rank for rank in ranks if rank.ended is None]
        waited_for = behind(self._root, running) if self._root else frozenset()
        for line in hang_table(ranks, seconds, waited_for):
            say(line, err=True)


def progress_line(ranks: tuple[RankProgress, ...]) -> str:
    """Return step, size and number of ranks as one line."""
    if not ranks:
        return "trace: waiting for the first boundary"
    return f"trace: {how_far(ranks)}"


def how_far(ranks: Sequence[RankProgress]) -> str:
    """Return the steps that ranks are at, what they wrote, and how many they are."""
    steps = {rank.last.step for rank in ranks if rank.last is not None}
    size = sum(rank.size_bytes for rank in ranks) / MB
    return f"step {_steps(steps)} · {size:,.1f} MB · {_count(len(ranks), 'rank')}"


def hang_table(
    ranks: tuple[RankProgress, ...], seconds: float, waited_for: frozenset[str] = frozenset()
) -> list[str]:
    """Return the lines that name each rank's last boundary when none has moved for so long."""
    lines = [f"trace: no rank has reached a new boundary for {seconds:.0f} s; the last of each:"]
    lines += [f"  {rank.folder}  {last_of(rank)}{_ended(rank)}" for rank in ranks]
    return lines + ([f"trace: {waiting(ranks, waited_for)}"] if waited_for else [])


def waiting(ranks: Sequence[RankProgress], waited_for: frozenset[str]) -> str:
    """Return in words which ranks the others wait for."""
    late = [rank.rank for rank in ranks if rank.folder in waited_for]
    verb = "is" if len(late) == 1 else "are"
    return f"{numbers(late)} {verb} behind: the others may wait for {'it' if len(late) == 1 else 'them'}"


def last_of(rank: RankProgress) -> str:
    """Return a rank's last boundary in words."""
    return safe(_where(rank.last))


def ending(outcome: Outcome, output: Path) -> list[str]:
    """Return the lines that close a recording: what there is, what went wrong, what to run next."""
    if not outcome.ranks:
        return [
            f"{WARNING} no process of the command trained anything, so nothing was recorded",
            "trace: a trainer must import torch, run a module outside transforms of torch.func, and read "
            "PYTHONPATH (no python -I or -E)",
        ]
    steps = {rank.last.step for rank in outcome.ranks if rank.last is not None}
    size = sum(rank.size_bytes for rank in outcome.ranks) / MB
    lines = [
        f"trace: recorded {_count(len(outcome.ranks), 'rank')} up to step {_steps(steps)}, "
        f"{size:,.1f} MB in {output}"
    ]
    lines += [
        f"{WARNING} {rank.folder} {rank.ended or 'was killed'}; last: {last_of(rank)}"
        for rank in outcome.ranks
        if rank.ended != "finished"
    ]
    return [*lines, f"trace: next: trace show {output}"]


def _steps(steps: set[int]) -> str:
    return "-" if not steps else _step(min(steps)) if len(steps) == 1 else f"{_step(min(steps))}-{max(steps)}"


def _step(step: int) -> str:
    return "init" if step == INIT_STEP else str(step)


def _where(entry: Entry | None) -> str:
    if entry is None:
        return "no boundary"
    microbatch = "" if entry.microbatch is None else f" microbatch {entry.microbatch}"
    return f"step {_step(entry.step)}{microbatch} {entry.kind} {entry.name} {entry.slot}"


def _ended(rank: RankProgress) -> str:
    return f"  ({safe(rank.ended)})" if rank.ended else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
