"""Gives module calls what was recorded of them, and backward the recorded gradients of what they exchange."""

from __future__ import annotations

from typing import Any, cast

import torch

from tensortrace.tracer.copies import unobserved
from tensortrace.tracer.force.ledger import Ledger
from tensortrace.tracer.force.put import instead, like, replaced, same, storage_of, write
from tensortrace.tracer.force.recorded import Local, Recorded, Unforced
from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.modules import Frame, Taken
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.hooks.walk import tensors_of_call, tensors_of_result
from tensortrace.tracer.notices import describe
from tensortrace.tracer.placements import Spec, split
from tensortrace.tracer.rules import RunLayout
from tensortrace.tracer.start.refusal import rank
from tensortrace.tracer.types import ROOT, Key, Kind

HOOKED = "tensortrace.forced"
"""Under which key a node of the graph holds what arrives at each of its outputs."""

OTHER_ROWS = "the run was given other rows than the recorded one in this microbatch"


class Arriving:
    """The recorded boundaries of one tensor's gradient; it is replaced in the first backward only."""

    def __init__(self) -> None:
        self.keys: list[tuple[Key, str, Spec | None]] = []
        self.done = False


class Calls:
    """Replaces what was recorded already, so that the live run's trace holds what its own modules compute.

    A value is overwritten where it lies: whoever else uses it, a residual for one, gets the recorded one
    too. Only where that can't be is another tensor handed on. A gradient is replaced once all consumers'
    parts have arrived and were recorded. Nothing here fails or waits for another rank: what can't be forced
    is noted.
    """

    def __init__(
        self, session: Session, recorded: Recorded, ledger: Ledger, layout: RunLayout | None,
        *, values: bool, gradients: bool,
    ) -> None:  # fmt: skip
        self._session = session
        self._recorded = recorded
        self._ledger = ledger
        self._layout = layout
        self._values = values
        self._gradients = gradients
        self._other_rows: set[Moment] = set()
        self._kept: frozenset[int] = frozenset()
        session.clock.on_open.append(self._open)
        session.on_root.append(self._given_rows)

    def given(
        self, frame: Frame, parent: Frame | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Force what a call is given, once it was recorded; return what to call it with."""
        around = [] if parent is None else parent.anchors
        found = {}
        for slot, tensor in tensors_of_call(args, kwargs):
            handed = self._force(frame, frame.entered, slot, tensor, around)
            if handed is not tensor:
                found[slot] = self._stands_for(frame, slot, handed, is_output=False)
            if handed.requires_grad:
                frame.anchors.append(handed)
        if not found:
            return args, kwargs
        args = tuple(replaced(value, f"in.{number}", found) for number, value in enumerate(args))
        return args, {name: replaced(value, f"in.kw.{name}", found) for name, value in kwargs.items()}

    def returned(self, frame: Frame, parent: Frame | None, result: Any) -> Any:
        """Force what a call returns, once it was recorded; return what to hand on."""
        found, handed_on = {}, []
        for slot, tensor in tensors_of_result(result):
            handed = self._force(frame, frame.left, slot, tensor, frame.anchors)
            if handed is not tensor:
                found[slot] = self._stands_for(frame, slot, handed, is_output=True)
            if handed.requires_grad:
                handed_on.append(handed)
        if parent is not None:
            parent.anchors += handed_on
        frame.anchors.clear()
        return replaced(result, "out", found) if found else result

    def _stands_for(self, frame: Frame, slot: str, handed: torch.Tensor, *, is_output: bool) -> torch.Tensor:
        """Let a tensor that was handed on instead be known by the recorded one; return it."""
        event = frame.taken[slot].event
        if event is not None:
            self._session.producers.add(handed, event, is_output=is_output)
        return handed

    def _open(self) -> None:
        """Note the memory of parameters and buffers, which no activation's value may be written to."""
        self._other_rows.clear()
        names = self._session.names
        held = [*(p for p, _ in names.parameters()), *(b for b, _ in names.buffers())]
        self._kept = frozenset(map(storage_of, held)) - {0}

    def _given_rows(self, at: Moment, given: list[tuple[str, torch.Tensor]]) -> None:
        """Note a pass whose rows are not those of the recorded pass: nothing of it can be forced."""
        if at.microbatch is None:
            return
        for slot, tensor in given:
            keys = self._recorded.keys(Kind.INPUT, ROOT, slot)
            key = next((k for k in keys if k[:2] == (at.step, at.microbatch)), None)
            if key is None:
                continue
            try:
                with unobserved(), torch.no_grad():
                    local, spec = split(tensor)
                    wanted = self._recorded.part(key, ROOT, Local(tuple(local.shape), local.dtype, spec))
                    differs = not same(local, wanted)
            except (Unforced, RuntimeError):
                differs = True
            if differs:
                self._other_rows.add(at)

    def _force(
        self, frame: Frame, name: str, slot: str, tensor: torch.Tensor, anchors: list[torch.Tensor]
    ) -> torch.Tensor:
        """Force one tensor of a call and, in backward, its gradient; return the tensor to hand on."""
        taken, at = frame.taken.get(slot), frame.at
        if taken is None or at.microbatch is None or self._session.muted:
            return tensor
        own = self._key(Kind.ACTIVATION, at, name, slot, taken)
        handed = tensor
        if self._values:
            handed = self._force_value(own, name, tensor, taken)
        gradient = own._replace(kind=Kind.ACTIVATION_GRAD)
        if not self._gradients or gradient not in self._recorded:
            return handed
        if not self._session.clock.gradients_arrive(tensor):
            return handed
        if at in self._other_rows:
            self._note(gradient, OTHER_ROWS)
        elif tensor.requires_grad:
            self._watch(tensor, gradient, name, taken.place.gradient if taken.place else None)
        else:
            handed = self._bridged(handed, gradient, name, anchors)
        return handed

    def _key(self, kind: Kind, at: Moment, name: str, slot: str, taken: Taken) -> Key:
        canonical = self._layout.canonical(name, rank()) if self._layout else name
        return Key(at.step, at.microbatch, kind, canonical or name, slot, taken.call)

    def _note(self, key: Key, reason: str = "") -> None:
        self._ledger.note(key.step, key.kind, key.name, key.slot, key.call, reason)

    def _force_value(self, key: Key, name: str, tensor: torch.Tensor, taken: Taken) -> torch.Tensor:
        if Moment(key.step, key.microbatch) in self._other_rows:
            self._note(key, OTHER_ROWS)
            return tensor
        try:
            with unobserved(), torch.no_grad():
                local, own = split(tensor)
                spec = own or (taken.place.own if taken.place else None)
                value = self._recorded.part(key, name, Local(tuple(local.shape), local.dtype, spec))
                settled = key.name == ROOT and key.slot.startswith("in.")  # the rows were compared
                done = settled or same(local, value) or write(tensor, value, self._kept)
                other = None if done else like(tensor, value)
        except Unforced as reason:
            self._note(key, str(reason))
            return tensor
        except Exception as error:  # the program goes on with what it has
            self._note(key, describe(error))
            return tensor
        self._note(key)
        return tensor if other is None else instead(tensor, other)

    def _watch(self, tensor: torch.Tensor, key: Key, name: str, spec: Spec | None) -> None:
        """Replace the gradient of the tensor when it has arrived; hooks on tensors, ours too, come before."""
        node = tensor.grad_fn
        if node is None:
            self._note(key, "it is a leaf of the graph")
            return
        of_node = cast("dict[Any, Any]", node.metadata)
        hooked: dict[int, Arriving] = of_node.setdefault(HOOKED, {})
        number = tensor.output_nr
        if number not in hooked:
            arriving = hooked[number] = Arriving()

            def replace(gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
                return self._replace(arriving, number, gradients)

            node.register_prehook(replace)
        hooked[number].keys.append((key, name, spec))

    def _replace(self, arriving: Arriving, number: int, gradients: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return all gradients of a node with the one of this output as it was recorded."""
        if arriving.done or self._session.muted:
            return None
        arriving.done, made = True, None
        for key, name, spec in arriving.keys:
            gradient = gradients[number]
            if not isinstance(gradient, torch.Tensor):
                self._note(key, "no gradient arrived")
                continue
            try:
                with unobserved(), torch.no_grad():
                    local, own = split(gradient)
                    at = Local(tuple(local.shape), local.dtype, own or spec)
                    value = self._recorded.part(key, name, at)
                    made = like(gradient, value) if made is None else made
            except Unforced as reason:
                self._note(key, str(reason))
            except Exception as error:
                self._note(key, describe(error))
            else:
                self._note(key)
        if made is None:
            return None
        return tuple(made if index == number else g for index, g in enumerate(gradients))

    def _bridged(
        self, tensor: torch.Tensor, key: Key, name: str, anchors: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return a tensor through which backward goes on where the program has cut the graph before it.

        The recorded run had a gradient there. What lies before is given its own recorded ones.
        """
        clock = self._session.clock
        if clock.in_region() or clock.is_recompute() or not tensor.is_floating_point():
            return tensor  # a region of checkpointing may have no graph of its own until it is recomputed
        ends = [anchor for anchor in anchors if anchor.requires_grad and type(anchor) is torch.Tensor]
        if not ends or type(tensor) is not torch.Tensor:
            self._note(key, "the program has cut the graph here")
            return tensor
        handed = instead(tensor, tensor.detach(), *ends)
        self._note(key)
        return handed
