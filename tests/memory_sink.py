"""A sink that keeps everything in memory, for tests of the hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from tensortrace.tracer import hooks
from tensortrace.tracer.copies import unsupported
from tensortrace.tracer.types import Boundary, Kind, Mesh, Meta, Module, Shard


@dataclass
class Kept:
    boundary: Boundary
    value: torch.Tensor


@dataclass
class MemorySink:
    kept: list[Kept] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    absences: dict[Kind, str] = field(default_factory=dict)
    failures: list[tuple[str, BaseException]] = field(default_factory=list)
    meshes: dict[str, Mesh] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    modules: dict[str, Module] = field(default_factory=dict)
    active: bool = True

    def wants(self, kind: Kind, name: str, *, step: int) -> bool:
        return True

    def wants_step(self, step: int) -> bool:
        return True

    def emit(
        self,
        tensor: torch.Tensor,
        *,
        step: int,
        microbatch: int | None,
        kind: Kind,
        name: str,
        slot: str,
        call: int = 0,
        recompute: bool = False,
        shard: Shard | None = None,
        producers: tuple[int, ...] = (),
        meta: Meta | None = None,
    ) -> int | None:
        if reason := unsupported(tensor):
            self.dropped.append(reason)
            return None
        with torch.no_grad():
            value = tensor.detach().clone()
        event = len(self.kept)
        boundary = Boundary(
            event=event, step=step, microbatch=microbatch, kind=kind, name=name, slot=slot,
            dtype=str(tensor.dtype).removeprefix("torch."), local_shape=tuple(tensor.shape), call=call,
            recompute=recompute, shard=shard, producers=producers, meta=meta or Meta(),
        )  # fmt: skip
        self.kept.append(Kept(boundary, value))
        return event

    def step_began(self, step: int) -> None:
        self.steps.append(step)

    def mesh(self, name: str, mesh: Mesh) -> None:
        self.meshes[name] = mesh

    def module(self, name: str, module: Module) -> None:
        self.modules[name] = module

    def absent(self, kind: Kind, reason: str | None) -> None:
        if reason is None:
            self.absences.pop(kind, None)
        else:
            self.absences[kind] = reason

    def fail(self, where: str, error: BaseException) -> None:
        self.failures.append((where, error))
        self.active = False

    def find(
        self, kind: str, name: str | None = None, slot: str | None = None, **wanted: object
    ) -> list[Kept]:
        """Return what was kept under this kind, name and slot, in order; ``wanted`` are other fields."""
        return [
            kept
            for kept in self.kept
            if kept.boundary.kind == kind
            and name in (None, kept.boundary.name)
            and slot in (None, kept.boundary.slot)
            and all(getattr(kept.boundary, key) == value for key, value in wanted.items())
        ]

    def one(
        self, kind: str, name: str | None = None, slot: str | None = None, **wanted: object
    ) -> torch.Tensor:
        """Return the value of the only boundary that ``find`` finds."""
        found = self.find(kind, name, slot, **wanted)
        assert len(found) == 1, [kept.boundary.key for kept in found]
        return found[0].value

    def names(self, kind: str, **wanted: object) -> list[str]:
        """Return the names kept under this kind, in order of first appearance."""
        return list(dict.fromkeys(kept.boundary.name for kept in self.find(kind, **wanted)))


Sink = TypeVar("Sink", bound=MemorySink)


def recording(*, may_fail: bool = False) -> AbstractContextManager[MemorySink]:
    """Record the body in memory; an error of a hook fails the test."""
    return recording_into(MemorySink(), may_fail=may_fail)


@contextmanager
def recording_into(
    sink: Sink,
    *,
    may_fail: bool = False,
    may_repeat: bool = False,
    begin: Callable[[hooks.Hooks], object] | None = None,
) -> Iterator[Sink]:
    """Record the body into a sink of the test's own; ``begin`` runs once the hooks are there.

    ``may_repeat`` allows two boundaries of one key: a backward through a graph of the window before.
    """
    installed = hooks.install(sink)
    try:
        if begin is not None:
            begin(installed)
        yield sink
        installed.finish()
    finally:
        installed.remove()
    if sink.failures and not may_fail:
        raise sink.failures[0][1]
    keys = [kept.boundary.key for kept in sink.kept if not kept.boundary.recompute]
    assert may_repeat or len(keys) == len(set(keys)), [key for key in set(keys) if keys.count(key) > 1]
