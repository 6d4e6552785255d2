"""What surrounded the runs, side by side: versions, flags, variables, machines, code."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from tensortrace.cli.contents import Contents
from tensortrace.cli.render.numbers import counted, moment, ranks, size
from tensortrace.cli.render.safe import safe

LONG = 600
NONE = "-"
"""Stands for what is not known, or not there."""


class Setting(NamedTuple):
    """One thing of both runs; ``b`` is None where there is one run."""

    group: str
    name: str
    a: str
    b: str | None

    @property
    def differs(self) -> bool:
        """Whether the runs differ in it."""
        return self.b is not None and self.a != self.b


def settings(a: Contents, b: Contents | None) -> list[Setting]:
    """Return everything that is known of the runs, what differs first within its group."""
    left = dict(_of(a))
    right = dict(_of(b)) if b else None
    names = list(dict.fromkeys([*left, *(right or {})]))
    found = [Setting(*name, left.get(name, NONE), right.get(name, NONE) if right else None) for name in names]
    groups = list(dict.fromkeys(setting.group for setting in found))
    return sorted(found, key=lambda s: (groups.index(s.group), not s.differs))


def _of(contents: Contents) -> Iterator[tuple[tuple[str, str], str]]:
    environment, run = contents.environment, contents.run
    command = run.command if run else environment.command
    yield ("run", "command"), safe(shlex.join(command), limit=LONG)
    yield ("run", "ranks"), str(len(contents.ranks))
    devices = sorted({rank.device for rank in contents.ranks if rank.device})
    hosts = sorted({rank.host for rank in contents.ranks if rank.host})
    yield ("run", "devices"), safe(", ".join(devices), limit=LONG) or NONE
    yield ("run", "hosts"), safe(", ".join(hosts), limit=LONG) or NONE
    yield ("run", "steps recorded"), str(len(contents.steps))
    yield ("run", "microbatches a step"), str(contents.microbatches)
    yield ("run", "recorded"), f"{counted(contents.total.boundaries, 'tensor')}, {_stored(contents)}"
    if run:
        yield ("run", "started"), moment(run.started_at)
        yield ("run", "took"), NONE if run.seconds is None else f"{run.seconds:.1f} s"
        yield ("run", "exit code"), NONE if run.exit_code is None else str(run.exit_code)
    dirty = " and uncommitted changes" if environment.dirty else ""
    yield ("code", "commit"), safe((environment.commit or NONE) + dirty)
    for group, found in (
        ("versions", environment.versions), ("flags", environment.flags),
        ("variables", environment.variables),
    ):  # fmt: skip
        for name in sorted(found):
            yield (group, safe(name)), safe(found[name], limit=LONG)
    for absent in contents.absent:
        yield ("not in this run", safe(absent.kind)), f"{safe(absent.reason)} ({ranks(absent.ranks)})"


def _stored(contents: Contents) -> str:
    total = contents.total
    return f"{size(total.raw_bytes)} in {size(total.stored_bytes)}"
