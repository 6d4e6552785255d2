"""Keeps what models compute without gradients before the first step, until it is known which step follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from tensortrace.tracer.copies import Wait, copy_bytes, host_memory, unobserved, unsupported
from tensortrace.tracer.placements import Spec, split
from tensortrace.tracer.types import Kind, Meta, Shard

MOST_PASSES = 8
"""Of a model that is called more often nothing is kept: that is an evaluation, not a part of a step."""

MOST_BYTES = 256 << 20
"""So much is kept at most, in host memory, of all passes together."""

KINDS = frozenset({Kind.INPUT, Kind.ACTIVATION})


@dataclass(frozen=True, slots=True)
class Held:
    """A boundary whose bytes are copied; ``number`` stands for its event, which it does not have yet."""

    number: int
    memory: torch.Tensor
    wait: Wait | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: Kind
    name: str
    slot: str
    producers: tuple[int, ...]
    meta: Meta | None
    spec: Spec | None
    shard: Shard | None

    def tensor(self) -> torch.Tensor:
        """Return the values, in host memory, once they have arrived."""
        if self.wait is not None:
            self.wait()
        return self.memory.view(self.dtype).reshape(self.shape)


@dataclass(slots=True)
class _Pass:
    root: int
    trained: frozenset[int] = frozenset()
    held: list[Held] = field(default_factory=list)


class Prelude:
    """The passes without gradients before the first window that are a part of its step.

    A teacher computes its targets before its student's first forward begins the step, a generator what its
    critic learns from. What the model computes whose forward begins the step is an evaluation, and so is what
    any model that is trained computes in evaluation mode; so was everything before it. ``write`` records one
    boundary as the first step's and returns its event. Callers hold the guard's lock.
    """

    def __init__(self, write: Callable[[Held], int | None]) -> None:
        self._write = write
        self._passes: list[_Pass] = []
        self._current: _Pass | None = None
        self._often: set[int] = set()
        self._events: dict[int, int | None] = {}
        self._next = -(1 << 40)  # numbers rise, as events do, and none of them is one
        self._size = 0

    @property
    def holding(self) -> bool:
        """Tell whether the pass that is running is kept."""
        return self._current is not None

    def pass_began(self, root: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        """Note a root forward without gradients before the first window."""
        self._current = None
        trained = _is_trained(root, optimizers)
        if trained and not root.training:
            self._forget(len(self._passes))
        elif id(root) not in self._often:
            parameters = frozenset(map(id, root.parameters())) if trained else frozenset()
            self._current = _Pass(id(root), parameters)
            self._passes.append(self._current)
            if sum(each.root == id(root) for each in self._passes) > MOST_PASSES:
                self._give_up(id(root))

    def window_opens(self, root: nn.Module) -> None:
        """Forget what the model computed whose forward begins the first window, and what came before that."""
        own = set(map(id, root.parameters())) if self._passes else set()
        last = max((n for n, each in enumerate(self._passes) if each.trained & own), default=-1)
        self._forget(last + 1)

    def pass_ended(self) -> None:
        """Note that the root forward has returned or raised."""
        self._current = None

    def hold(
        self, tensor: torch.Tensor, kind: Kind, name: str, slot: str, *,
        producers: tuple[int, ...], meta: Meta | None, spec: Spec | None, shard: Shard | None,
    ) -> int | None:  # fmt: skip
        """Copy a boundary of the pass that is running; return the number that stands for its event."""
        if self._current is None or unsupported(tensor):
            return None
        with unobserved():
            local, own = split(tensor)
            size = local.numel() * local.element_size()
            if self._size + size > MOST_BYTES:
                self._give_up(self._current.root)
                return None
            memory = host_memory(size, like=local)
            wait = copy_bytes(local, memory)
            shape = tuple(local.shape)
        self._size += size
        self._next += 1
        self._current.held.append(
            Held(
                self._next, memory, wait, local.dtype, shape, kind, name, slot, producers, meta,
                own or spec, shard,
            )
        )  # fmt: skip
        return self._next

    def release(self) -> None:
        """Write what is kept: the first window has opened."""
        passes, self._passes, self._current = self._passes, [], None
        for held in (each for kept in passes for each in kept.held):
            with unobserved():
                self._events[held.number] = self._write(held)
        self._size = 0

    def resolve(self, producers: tuple[int, ...]) -> tuple[int, ...]:
        """Return events in the place of the numbers that stood for them; without those never written."""
        if not producers or min(producers) >= 0:
            return producers
        found = (p if p >= 0 else self._events.get(p) for p in producers)
        return tuple(event for event in found if event is not None)

    def _give_up(self, root: int) -> None:
        self._often.add(root)
        self._current = None
        self._keep([each for each in self._passes if each.root != root])

    def _forget(self, count: int) -> None:
        self._keep(self._passes[count:])

    def _keep(self, passes: list[_Pass]) -> None:
        self._passes = passes
        self._size = sum(held.memory.numel() for each in passes for held in each.held)


def _is_trained(root: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
    """Tell whether an optimizer updates any of a module; without optimizers, whether any can be updated."""
    updated = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    if not updated:
        return any(parameter.requires_grad for parameter in root.parameters())
    return any(id(parameter) in updated for parameter in root.parameters())
