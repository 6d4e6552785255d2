"""What the hooks of one recording share: the sink, the clock, names, producers and layouts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tensortrace.tracer.hooks.clock import Clock, Moment
from tensortrace.tracer.hooks.names import Names
from tensortrace.tracer.hooks.order import Order
from tensortrace.tracer.hooks.patches import Patches
from tensortrace.tracer.hooks.producers import Producers
from tensortrace.tracer.hooks.sink import Sink
from tensortrace.tracer.placements import WRAPPERS, Layout, Wrapper
from tensortrace.tracer.types import Kind, Meta, Shard


class Session:
    """One recording in this process; all its methods are called inside guarded hooks.

    ``on_wrapper`` runs when a wrapper's forward begins, ``on_backward`` when an outermost backward is about
    to begin, ``after_backward`` when it has ended, ``on_read`` (through ``gradients_read``) before a clip, an
    unscale or an optimizer step reads gradients. While ``muted`` isn't 0, gradients that arrive are those
    of a side computation and are not recorded.
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.clock = Clock()
        self.names = Names()
        self.producers = Producers()
        self.patches = Patches()
        self.optimizers: Order[Optimizer] = Order()
        self.muted = 0
        self.arrived: set[int] = set()
        self.on_read: list[Callable[[], None]] = []
        self.on_wrapper: list[Callable[[Wrapper, nn.Module], None]] = []
        self.on_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self._layouts: dict[int, tuple[weakref.ref[object], Layout]] = {}
        self._sample_layout: Layout | None = None
        self.clock.on_divide.append(self.producers.turn)
        self.clock.on_open.append(self.producers.turn)

    def emit(
        self,
        tensor: torch.Tensor,
        at: Moment,
        kind: Kind,
        name: str,
        slot: str,
        *,
        call: int = 0,
        recompute: bool = False,
        producers: tuple[int, ...] = (),
        meta: Meta | None = None,
        parameter: torch.Tensor | None = None,
    ) -> int | None:
        """Hand one tensor to the sink, with the shard its layout gives it; return its event number.

        ``parameter`` is the parameter or buffer that the tensor belongs to, if any.
        """
        if not self.wants(kind, name, at):
            return None
        return self.sink.emit(
            tensor,
            step=at.step,
            microbatch=at.microbatch,
            kind=kind,
            name=name,
            slot=slot,
            call=call,
            recompute=recompute,
            shard=self._shard(kind, slot, tensor, parameter),
            producers=producers,
            meta=meta,
        )

    def wants(self, kind: Kind, name: str, at: Moment) -> bool:
        """Tell whether the boundary is selected."""
        return self.sink.wants(kind, name, step=at.step)

    def note_wrapper(self, module: nn.Module) -> None:
        """Where the module is a wrapper, note the layout of what it wraps and tell who waits for it."""
        wrapper = next((wrapper for wrapper in WRAPPERS if wrapper.matches(module)), None)
        if wrapper is None:
            return
        if self._layout_of(module) is None:
            self._note_layout(wrapper, module)
        for listener in self.on_wrapper:
            listener(wrapper, module)

    def gradients_read(self) -> None:
        """Tell whoever waits for it that the program is about to use its gradients."""
        for listener in self.on_read:
            listener()

    def backward_reached(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Tell whether the backward that just ended brought a gradient to any of these parameters."""
        return any(id(parameter) in self.arrived for parameter in parameters)

    def reducing_ranks(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Return the ranks over which a wrapper reduces this parameter's gradient, () without one."""
        layout = self._layout_of(parameter)
        return layout.mesh.ranks if layout is not None else ()

    def _note_layout(self, wrapper: Wrapper, module: nn.Module) -> None:
        layout = wrapper.layout(module)
        self.sink.mesh(layout.mesh_name, layout.mesh)
        self._sample_layout = self._sample_layout or layout
        for thing in (module, *module.parameters(), *module.buffers()):
            self._layouts[id(thing)] = (weakref.ref(thing), layout)

    def _layout_of(self, thing: object) -> Layout | None:
        found = self._layouts.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def _shard(
        self, kind: Kind, slot: str, tensor: torch.Tensor, parameter: torch.Tensor | None
    ) -> Shard | None:
        if parameter is not None:
            layout = self._layout_of(parameter)
        else:
            layout = self._sample_layout if kind in OF_SAMPLES else None
        return None if layout is None else layout.shard(kind, slot, tuple(tensor.shape))


OF_SAMPLES = frozenset({Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.LOSS})


def group_ranks(group: object) -> tuple[int, ...]:
    """Return the global ranks of a process group, of the default one for None."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    if group is None or group is dist.GroupMember.WORLD:
        return tuple(range(dist.get_world_size()))
    assert isinstance(group, dist.ProcessGroup)
    return tuple(dist.get_process_group_ranks(group))
