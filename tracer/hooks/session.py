"""What the hooks of one recording share: the sink, the clock, names, producers and layouts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from tensortrace.tracer import mesh as meshes
from tensortrace.tracer.hooks import prelude
from tensortrace.tracer.hooks.clock import Clock, Moment
from tensortrace.tracer.hooks.flats import Flats, Own
from tensortrace.tracer.hooks.names import Names
from tensortrace.tracer.hooks.order import Order
from tensortrace.tracer.hooks.patches import Patches
from tensortrace.tracer.hooks.prelude import Held, Prelude
from tensortrace.tracer.hooks.producers import Producers
from tensortrace.tracer.hooks.sink import Sink
from tensortrace.tracer.hooks.sole import Soles
from tensortrace.tracer.placements import (
    OF_SAMPLES,
    Layout,
    Spec,
    Wrapper,
    split,
    wrapper_of,
)
from tensortrace.tracer.types import INIT_STEP, Kind, Mesh, Meta, Shard


@dataclass(frozen=True, slots=True)
class StageBackward:
    """A backward that a pipeline schedule runs on one stage.

    Only the last stage's starts from the loss. One for the weights only goes again through nodes whose
    gradients have been recorded.
    """

    from_loss: bool
    only_weights: bool


class Session:
    """One recording in this process; all its methods are called inside guarded hooks.

    ``on_root`` runs with what the root module is given when its forward begins, ``on_wrapper`` when a
    wrapper's forward begins, ``on_backward`` when an outermost backward is about
    to begin, ``after_backward`` when it has ended, ``on_read`` (through ``gradients_read``) before a clip, an
    unscale or an optimizer step reads gradients, ``on_reduced`` with the parameters whose gradients were
    reduced and recorded, ``on_rewritten`` with a parameter or buffer that we gave another value. ``scope``
    names the module call that this thread is in the middle of, "" for none and for a root's. While ``muted``
    isn't 0, gradients that arrive are those of a side computation and are not recorded. ``staged`` is the
    pipeline's backward that is running.

    ``quiet`` tells that nothing of the present window is wanted and that no source learns anything from it
    that a later one needs: only the clock goes on, so that a step that isn't recorded costs next to nothing.
    A window is never quiet before an optimizer has stepped (what ends it would be told by the parameters),
    while anything listens ``on_root``, or where places of tensors are learned (``learns``).
    """

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.clock = Clock()
        self.names = Names()
        self.flats = Flats(self.names)
        self.producers = Producers()
        self.soles = Soles()
        self.patches = Patches()
        self.optimizers: Order[Optimizer] = Order()
        self.muted = 0
        self.quiet = False
        self.learns: Callable[[], bool] = lambda: False
        self.pipeline: tuple[int, ...] = ()
        self.staged: StageBackward | None = None
        self.scope: Callable[[], str] = lambda: ""
        self.arrived: set[int] = set()
        self.collectives = 0
        self.on_read: list[Callable[[], None]] = []
        self.on_root: list[Callable[[Moment, list[tuple[str, torch.Tensor]]], None]] = []
        self.on_wrapper: list[Callable[[Wrapper, nn.Module], None]] = []
        self.on_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self.on_reduced: list[Callable[[list[torch.Tensor]], None]] = []
        self.on_rewritten: list[Callable[[torch.Tensor], None]] = []
        self._layouts: dict[int, tuple[weakref.ref[object], Layout]] = {}
        self._sample_layout: Layout | None = None
        self.meshes: dict[str, Mesh] = {}
        self.prelude = Prelude(self._write_held)
        self.clock.on_open.append(self._begin_window)
        self.clock.on_divide.append(self.producers.turn)
        self.clock.on_open.append(self.producers.turn)
        self.clock.on_open.append(self.soles.forget)
        self.clock.on_open.append(self.prelude.release)

    def _begin_window(self) -> None:
        rests = self.clock.has_optimizer and not self.on_root and not self.learns()
        self.quiet = rests and not self.sink.wants_step(self.clock.step)

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
        spec: Spec | None = None,
        shard: Shard | None = None,
    ) -> int | None:
        """Hand one tensor to the sink, with the shard its layout gives it; return its event number.

        Of a DTensor this rank's local part is recorded. ``parameter`` is the parameter or buffer that the
        tensor belongs to, if any; ``spec`` the place of a plain tensor that is part of a DTensor; ``shard``
        is what the program itself says.
        """
        if at.step == INIT_STEP and kind in prelude.KINDS and self.prelude.holding:
            if not self.wants(kind, name, at._replace(step=0)):
                return None
            return self.prelude.hold(
                tensor, kind, name, slot, producers=producers, meta=meta, spec=spec, shard=shard
            )
        if not self.wants(kind, name, at, parameter):
            return None
        event, producers = None, self.prelude.resolve(producers)
        for own in self._owned(tensor, kind, name, slot, parameter, spec, shard):
            event = self.sink.emit(
                own.tensor,
                step=at.step,
                microbatch=at.microbatch,
                kind=kind,
                name=own.name,
                slot=slot,
                call=call,
                recompute=recompute,
                shard=own.shard,
                producers=producers,
                meta=meta,
            )
        return event

    def _write_held(self, held: Held) -> int | None:
        """Record what was kept of a pass before the first window, as an eval pass of it."""
        at = self.clock.window()
        call = self.clock.take(at, held.kind, held.name, held.slot)
        return self.emit(
            held.tensor(), at, held.kind, held.name, held.slot,
            call=call.number, producers=held.producers, meta=held.meta, spec=held.spec, shard=held.shard,
        )  # fmt: skip

    def wants(self, kind: Kind, name: str, at: Moment, parameter: torch.Tensor | None = None) -> bool:
        """Tell whether the boundary is selected; of a flat parameter, that of any parameter in it."""
        pieces = None if parameter is None else self.names.pieces(parameter)
        if not pieces:
            return self.sink.wants(kind, name, step=at.step)
        return any(self.sink.wants(kind, piece, step=at.step) for piece in pieces)

    def _owned(
        self,
        tensor: torch.Tensor,
        kind: Kind,
        name: str,
        slot: str,
        parameter: torch.Tensor | None,
        spec: Spec | None,
        stated: Shard | None,
    ) -> list[Own]:
        if parameter is not None and self.flats.holds(parameter):
            return self.flats.divide(tensor, kind, slot, parameter)
        local, own = split(tensor)
        shape = () if local.is_nested else tuple(local.shape)  # of nested tensors it is an error to ask
        shard = stated or self._shard(kind, slot, shape, own or spec, parameter)
        return [Own(local, name, shard)]

    def note_wrapper(self, module: nn.Module) -> None:
        """Where the module is a wrapper, note the layout of what it wraps and tell who waits for it."""
        wrapper = self.note_layout(module)
        if wrapper is not None:
            for listener in self.on_wrapper:
                listener(wrapper, module)

    def note_layout(self, module: nn.Module) -> Wrapper | None:
        """Where the module is a wrapper, note the layout of what it wraps, and return the wrapper."""
        wrapper = wrapper_of(module)
        if wrapper is not None and self._layout_of(module) is None:
            self._note_layout(wrapper, module)
        return wrapper

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
        if layout is None:
            return
        self._declare(layout.mesh_name, layout.mesh)
        self._sample_layout = self._sample_layout or layout
        for thing in (module, *wrapper.members(module)):
            self._layouts[id(thing)] = (weakref.ref(thing), layout)
        self.flats.note(module)

    def _layout_of(self, thing: object) -> Layout | None:
        found = self._layouts.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else None

    def _shard(
        self,
        kind: Kind,
        slot: str,
        shape: tuple[int, ...],
        spec: Spec | None,
        parameter: torch.Tensor | None,
    ) -> Shard | None:
        """Return a tensor's place: what its wrapper says of the data axes, and its spec of the others."""
        if parameter is not None:
            layout = self._layout_of(parameter)
        else:
            layout = self._sample_layout if kind in OF_SAMPLES else None
        if spec is None:
            return None if layout is None else layout.shard(kind, slot, shape)
        self._declare(spec.mesh_name, spec.mesh)
        if layout is None or set(layout.mesh.ranks) <= set(spec.mesh.ranks):
            return spec.shard()
        over_data = layout.shard(kind, slot, spec.global_shape)
        return spec.shard() if over_data is None else self._combined(over_data, layout.mesh, spec)

    def _combined(self, over_data: Shard, mesh: Mesh, spec: Spec) -> Shard:
        """Return the place on the grid of a wrapper's axes and a spec's."""
        world = dist.get_world_size()
        grid = meshes.product(mesh, spec.mesh, dist.get_rank(), spec.roots)
        if grid is None:
            return spec.shard()
        name = meshes.name(grid, world)
        self._declare(name, grid)
        return Shard(
            mesh=name,
            coordinate=(*over_data.coordinate, *spec.coordinate),
            placements=(*over_data.placements, *spec.placements),
            global_shape=spec.global_shape,
        )

    def _declare(self, name: str, mesh: Mesh) -> None:
        if name not in self.meshes:
            self.meshes[name] = mesh
            self.sink.mesh(name, mesh)


def group_ranks(group: object) -> tuple[int, ...]:
    """Return the global ranks of a process group, of the default one for None."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    if group is None or group is dist.GroupMember.WORLD:
        return tuple(range(dist.get_world_size()))
    assert isinstance(group, dist.ProcessGroup)
    return tuple(dist.get_process_group_ranks(group))
