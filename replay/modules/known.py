"""What a trace tells of its modules: classes and settings, by rank and name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tensortrace.replay.modules.given import NoFormula
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Module

UNTOLD = "the trace does not tell what its modules are: it was recorded by an earlier version"
FOREIGN = "its class is not one of torch.nn's own"


@dataclass(frozen=True)
class Modules:
    """The modules of torch.nn that each rank called.

    ``told`` are the ranks that say so at all, ``version`` is torch's, empty where it is not known.
    """

    by_rank: dict[tuple[int, str], Module]
    told: frozenset[int]
    version: tuple[int, ...] = ()

    @classmethod
    def of(cls, trace: Trace) -> Modules:
        """Read the manifests of a trace."""
        found: dict[tuple[int, str], Module] = {}
        told, versions = set(), set[tuple[int, ...]]()
        for rank in trace.ranks:
            if rank.manifest is not None and "modules" in rank.manifest.ignorable:
                told.add(rank.rank)
                versions.add(_numbers(rank.manifest.environment.versions.get("torch", "")))
                found |= {(rank.rank, name): m for m in rank.manifest.modules for name in m.names}
        return cls(found, frozenset(told), versions.pop() if len(versions) == 1 else ())

    def module(self, name: str, ranks: Iterable[int]) -> Module:
        """Return what the ranks that hold a call's tensors say of its module; of settings what they agree in.

        Raises NoFormula where it is no plain module of torch.nn.
        """
        ranks = tuple(ranks)
        if not self.told.issuperset(ranks):
            raise NoFormula(UNTOLD)
        held = [self.by_rank.get((rank, name)) for rank in ranks]
        known = [module for module in held if module is not None]
        if len(known) < len(held) or len({module.kind for module in known}) != 1:
            raise NoFormula(FOREIGN)
        for module in known:
            if module.odd:
                raise NoFormula(module.odd)
        first = known[0]
        missing = object()
        settings = {
            key: value
            for key, value in first.settings.items()
            if all(module.settings.get(key, missing) == value for module in known)
        }
        return Module(first.kind, settings)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
