"""Counts steps, microbatches and calls, and tells in which phase of a step the program is."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from tensortrace.tracer.types import INIT_STEP, Kind


class Moment(NamedTuple):
    """Where in a run a boundary lies; ``microbatch`` is None for an eval pass or the whole window."""

    step: int
    microbatch: int | None


class Call(NamedTuple):
    """The ordinal of a boundary under its key, and whether a recomputed forward made it."""

    number: int
    recompute: bool


CallKey = tuple[Moment, Kind, str, str]


class Region:
    """One activation-checkpointed region: the numbers its first pass took, for the recompute to repeat.

    ``grad_enabled`` is the grad mode around the region. A reentrant checkpoint disables it inside the first
    pass, and gradients arrive at the recomputed tensors; otherwise they arrive at those of the first pass.
    ``scope`` is the module call around the region, of which the recompute sees nothing.
    """

    def __init__(self, moment: Moment, *, grad_enabled: bool, reentrant: bool, scope: str) -> None:
        self.moment = moment
        self.scope = scope
        self.grad_enabled = grad_enabled
        self.reentrant = reentrant
        self.numbers: dict[CallKey, list[int]] = {}


class Replay:
    """A recompute of a region: gives out the first pass's numbers again, in order."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._taken: Counter[CallKey] = Counter()

    def take(self, key: CallKey) -> int:
        """Return the number that the first pass took at this point, or the next one if it took none."""
        order = self._taken[key]
        self._taken[key] += 1
        numbers = self.region.numbers.get(key, [])
        return numbers[order] if order < len(numbers) else order


class _Chunks:
    """The microbatches that a pipeline schedule's chunks are: the first, and the last one seen so far."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.last = first


class _Local(threading.local):
    """What each thread is in the middle of."""

    def __init__(self) -> None:
        self.root_grad: list[bool] = []
        self.regions: list[Region | Replay] = []


class Clock:
    """The windows of one rank, as ``docs/recording.md`` defines them. Callers hold the guard's lock.

    ``before_first`` runs once, when the first window is about to open; ``before_close`` when another is
    about to, ``on_open`` when one has opened, ``on_divide`` when a further microbatch has begun.
    ``updated`` tells whether the program has updated parameters itself since the last backward, which ends
    a window as an optimizer's step does; it is asked only while no optimizer has stepped at all.
    """

    def __init__(self) -> None:
        self.step = INIT_STEP
        self.microbatch = 0
        self.before_first: list[Callable[[], None]] = []
        self.before_close: list[Callable[[], None]] = []
        self.on_open: list[Callable[[], None]] = []
        self.on_divide: list[Callable[[], None]] = []
        self.updated: Callable[[], bool] = lambda: False
        self.has_optimizer = False
        self._stepped = False
        self._stepped_by: set[int] = set()
        self._backward_ran = False
        self._without_modules = False
        self._chunks: _Chunks | None = None
        self._calls: Counter[CallKey] = Counter()
        self._ordinals: Counter[tuple[Kind, str]] = Counter()
        self._local = _Local()

    @property
    def backward_ran(self) -> bool:
        """Tell whether a backward has run in the microbatch."""
        return self._backward_ran

    def is_recompute(self) -> bool:
        """Tell whether autograd is running on this thread, so that a forward is a recomputed one."""
        return torch._C._current_graph_task_id() >= 0

    def forward_moment(self) -> Moment:
        """Return where a boundary of the running forward belongs; the first pass's in a recompute."""
        if self._local.regions and self.is_recompute():
            region = self._local.regions[-1]
            return (region.region if isinstance(region, Replay) else region).moment
        return Moment(self.step, self.microbatch if self.grad_enabled() else None)

    def backward_moment(self) -> Moment:
        """Return the microbatch to which backward, reductions and clipping belong."""
        return Moment(self.step, self.microbatch)

    def window(self) -> Moment:
        """Return what belongs to the whole window."""
        return Moment(self.step, None)

    def grad_enabled(self) -> bool:
        """Return the grad mode of the root forward, or the current one outside of any."""
        if self.is_recompute():
            return True
        if self._local.root_grad:
            return self._local.root_grad[0]
        return self._ambient_grad()

    def in_root(self) -> bool:
        """Tell whether a root forward is running on this thread."""
        return bool(self._local.root_grad)

    def root_began(self, *, inside_optimizer: bool) -> None:
        """Note a module call with no module call around it, and open what it opens."""
        if self._local.root_grad:  # a schedule is running, which has opened it and numbers its chunks
            self._local.root_grad.append(self._local.root_grad[0])
            return
        grad = self._ambient_grad()
        self._local.root_grad.append(grad)
        if grad:
            self._without_modules = False
            self._enter(inside_optimizer=inside_optimizer)

    def root_ended(self) -> None:
        """Note that the root call returned or raised."""
        self._local.root_grad.pop()

    def schedule_began(self, *, trains: bool) -> None:
        """Note a pipeline schedule's run over all its chunks, whose forwards and backwards interleave.

        It opens what a root forward would, and each chunk is a microbatch; an eval pass opens nothing.
        """
        self._local.root_grad.append(trains)
        if trains:
            self._without_modules = False
            self._enter(inside_optimizer=False)
            self._chunks = _Chunks(self.microbatch)

    def chunk_began(self, number: int) -> None:
        """Note that what follows, on this rank, is of the schedule's chunk of this number, from 0."""
        if self._chunks is not None:
            self.microbatch = self._chunks.first + number
            self._chunks.last = max(self._chunks.last, self.microbatch)

    def schedule_ended(self) -> None:
        """Note that the schedule returned or raised; what follows belongs to its last chunk."""
        self._local.root_grad.pop()
        if self._chunks is not None:
            self.microbatch, self._chunks = self._chunks.last, None

    def backward_began(self, *, inside_optimizer: bool) -> None:
        """Note a backward; in a program that calls no modules, it opens windows as a forward would."""
        if self.step == INIT_STEP:
            self._without_modules = True
        if self._without_modules:
            self._enter(inside_optimizer=inside_optimizer)

    def backward_ended(self) -> None:
        """Note that a backward ran: the next root forward begins a microbatch."""
        self._backward_ran = True

    def optimizer_began(self, number: int, *, has_closure: bool) -> bool:
        """Note an optimizer's step and tell whether it belongs to a window.

        A step that evaluates the model itself may have no forward before it: its closure opens the window,
        or the next one where this optimizer has stepped in the present one. Any other step before the
        first forward is not training (programs make one to create the optimizer's state).
        """
        if has_closure and (self.step == INIT_STEP or number in self._stepped_by):
            self._open()
        self._stepped_by.add(number)
        self.has_optimizer = self.has_optimizer or self.step != INIT_STEP
        return self.step != INIT_STEP

    def optimizer_ended(self) -> None:
        """Note that an optimizer stepped, or skipped its step."""
        self._stepped = True

    def end(self) -> None:
        """Note that no window follows: do what is done before one closes."""
        if self._backward_ran and not self.has_optimizer:
            self.updated()
        _run(self.before_close)

    def take(self, moment: Moment, kind: Kind, name: str, slot: str) -> Call:
        """Return the next call number under a key, the first pass's in a recompute."""
        key = (moment, kind, name, slot)
        recompute = self.is_recompute()
        replay = next((r for r in reversed(self._local.regions) if isinstance(r, Replay)), None)
        if replay is not None:
            number = replay.take(key)
        else:
            number = self._calls[key]
            self._calls[key] += 1
        for region in self._local.regions:
            if isinstance(region, Region):
                region.numbers.setdefault(key, []).append(number)
        return Call(number, recompute)

    def ordinal_in(self, moment: Moment, kind: Kind, name: str, slot: str = "grad") -> int:
        """Return how often autograd has brought this gradient in the microbatch, and count on.

        Unlike ``take`` it knows no recompute: backward runs inside autograd by nature.
        """
        key = (moment, kind, name, slot)
        number = self._calls[key]
        self._calls[key] += 1
        return number

    def take_from(self, number: int, moment: Moment, kind: Kind, name: str, slot: str) -> int:
        """Return ``number``, or the next free one where something else has taken it."""
        key = (moment, kind, name, slot)
        number = max(number, self._calls[key])
        self._calls[key] = number + 1
        return number

    def ordinal(self, kind: Kind, name: str) -> int:
        """Return how many events of this kind and name the window has had, and count one more."""
        number = self._ordinals[kind, name]
        self._ordinals[kind, name] += 1
        return number

    def region(self, *, reentrant: bool, scope: str) -> Region:
        """Return a record for a checkpointed region that is about to run for the first time."""
        return Region(
            self.forward_moment(), grad_enabled=self.grad_enabled(), reentrant=reentrant, scope=scope
        )

    def replayed_scope(self) -> str:
        """Return the module call around the region that is being recomputed, "" outside of any."""
        replays = (replay for replay in reversed(self._local.regions) if isinstance(replay, Replay))
        return next((replay.region.scope for replay in replays), "")

    def in_region(self) -> bool:
        """Tell whether a pass of a checkpointed region is running on this thread."""
        return bool(self._local.regions)

    def gradients_arrive(self, tensor: torch.Tensor) -> bool:
        """Tell whether backward will bring this tensor of the running forward its whole gradient.

        A reentrant region is given detached copies in its recompute, to which only its own part of the
        gradient comes; the tensors that the first pass was given get all of it.
        """
        region = self._local.regions[-1] if self._local.regions else None
        if isinstance(region, Replay):
            copied = tensor.is_leaf and not isinstance(tensor, torch.nn.Parameter)
            return region.region.reentrant and not copied and torch.is_grad_enabled()
        given = region is not None and region.reentrant and region.grad_enabled
        return given or torch.is_grad_enabled()

    def enter_region(self, region: Region, *, first: bool) -> None:
        """Run what follows as a pass of the region, until ``leave_region``."""
        self._local.regions.append(region if first else Replay(region))

    def leave_region(self) -> None:
        """End the pass of the innermost region on this thread."""
        self._local.regions.pop()

    def _ambient_grad(self) -> bool:
        for region in self._local.regions:
            if isinstance(region, Region):
                return region.grad_enabled
        return torch.is_grad_enabled()

    def _enter(self, *, inside_optimizer: bool) -> None:
        """Open the next window or the next microbatch where what has happened so far ends the present one."""
        if self.step == INIT_STEP or (self._stepped and not inside_optimizer):
            self._open()
        elif self._backward_ran and not self.has_optimizer and self.updated():
            self._open()
        elif self._backward_ran:
            self._divide()

    def _open(self) -> None:
        _run(self.before_first if self.step == INIT_STEP else self.before_close)
        self.step += 1
        self.microbatch = 0
        self._stepped = self._backward_ran = False
        self._stepped_by.clear()
        self._calls.clear()
        self._ordinals.clear()
        _run(self.on_open)

    def _divide(self) -> None:
        self.microbatch += 1
        self._backward_ran = False
        _run(self.on_divide)


def _run(listeners: list[Callable[[], None]]) -> None:
    for listener in listeners:
        listener()
