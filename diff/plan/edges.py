"""What boundaries of passes were computed from: the recorded producers of both runs, and the ladder."""

from __future__ import annotations

from collections import defaultdict

from tensortrace.diff.catalog import Slot, StepView, enclosing
from tensortrace.diff.masters import COPY
from tensortrace.diff.plan.evaluations import settings
from tensortrace.diff.plan.pair import StepPair
from tensortrace.diff.plan.samples import ROWS
from tensortrace.diff.plan.weights import weight_refs
from tensortrace.tracer.types import ROOT, Kind

Ref = tuple[int | None, Slot]

SUMMED = ("sum", "count")
"""Slots of a loss whose calls are compared as one sum."""


class Edges:
    """Parents of pass boundaries, from both runs' recorded producers and from the ladder."""

    def __init__(self, pair: StepPair) -> None:
        self.pair = pair
        self.states = states_by_module(pair)
        self.written = _written(pair)
        self.producers: dict[Ref, dict[Ref, None]] = defaultdict(dict)
        self.consumers: dict[Ref, dict[Ref, None]] = defaultdict(dict)
        self.calls: dict[tuple[str, str, int, int | None], list[Slot]] = defaultdict(list)
        self.inputs: dict[tuple[str, int | None], dict[Slot, None]] = defaultdict(dict)
        self.earlier: dict[Ref, dict[Ref, None]] = defaultdict(dict)
        self.surely_used: set[Slot] = set()
        self.handed_on: set[tuple[Ref, Ref]] = set()  # (what left a tensor, what was given that very tensor)
        for view, before in ((pair.a, pair.before_a), (pair.b, pair.before_b)):
            self._read(view, before)

    def _read(self, view: StepView, before: StepView) -> None:
        held: dict[Slot, set[tuple[int, str]]] = {}
        for slot, items in view.items.items():
            for item in items:
                if item.part is None:
                    continue
                ref = (self.pair.group(item.part), merged(slot))
                if slot.kind == Kind.INPUT:
                    self.inputs[(slot.phase, ref[0])][slot] = None
                if slot.kind == Kind.ACTIVATION:
                    call = (slot.phase, slot.name, slot.call, ref[0])
                    if slot not in self.calls[call]:
                        self.calls[call].append(slot)
                for earlier, part in before.producers(item):  # an eval pass before the window opened
                    if part.phase == "eval":
                        self.earlier[ref][(None, earlier)] = None
                for found in view.producers(item):
                    if not item.entry.meta.assumed:
                        self.surely_used.add(found[0])
                    source = (self.pair.group(found[1]), merged(found[0]))
                    self.producers[ref][source] = None
                    self.consumers[source][ref] = None
                    if found[0] not in held:
                        held[found[0]] = {(i.source.rank, i.entry.digest) for i in view.items[found[0]]}
                    if (item.source.rank, item.entry.digest) in held[found[0]]:
                        self.handed_on.add((source, ref))

    def of(self, slot: Slot, microbatch: int | None) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
        """Return (parents in this step, parents in the step before)."""
        ref = (microbatch, merged(slot))
        if slot.kind == Kind.ACTIVATION_GRAD:
            return self._gradient_parents(slot, microbatch)
        parents = dict(self.producers.get(ref, {}))
        if slot.kind == Kind.ACTIVATION and slot.slot.startswith("out"):
            if not any(p[1].name != slot.name for p in parents):
                parents |= {(microbatch, s): None for s in self._inputs(slot, microbatch)}
            states = self.states.get(slot.name, ())
            parents |= dict.fromkeys(self.written.get(slot.name, ()))
            if microbatch in self.pair.evaluations and slot.phase == "train":
                parents |= self._of_evaluation(microbatch)
            if slot.phase == "eval":  # an eval pass comes before or after the step's update
                return (*parents, *states), tuple(states)
            return tuple(parents), (*states, *self.earlier.get(ref, ()))
        if slot.kind == Kind.ACTIVATION and slot.name == ROOT:
            source = Slot(slot.phase, Kind.INPUT, ROOT, slot.slot, slot.call)
            parents[(microbatch, source)] = None
        if slot.kind == Kind.LOSS and slot.slot in SUMMED:
            parents |= self._all_calls(slot._replace(slot="target"), microbatch)
            parents[(None, ROWS)] = None
        if slot.kind == Kind.LOSS and slot.slot == "target":  # labels come with the rows that they label
            parents |= {(microbatch, s): None for s in self.inputs[(slot.phase, microbatch)]}
        earlier = dict(self.earlier.get(ref, {}))
        if slot.kind == Kind.ACTIVATION and slot.slot.startswith("in."):
            earlier |= dict.fromkeys(self._states_around(slot.name))
        return tuple(parents), tuple(earlier)

    def _states_around(self, module: str) -> list[Ref]:
        """Return the parameters that the code which calls a module may add to what it passes on."""
        parts = module.split(".") if module != ROOT else []
        around = [".".join(parts[:length]) or ROOT for length in range(len(parts))]
        return [ref for name in around for ref in self.states.get(name, ())]

    def _of_evaluation(self, microbatch: int) -> dict[Ref, None]:
        """Return what the parameters were made of that an optimizer evaluates within its update."""
        found: dict[Ref, None] = {}
        for view in (self.pair.a, self.pair.b):
            found |= {(None, slot): None for slot in settings(view)}
            for slot, _ in view.find(Kind.ACTIVATION_GRAD, phase="train"):
                if slot.slot.startswith("out") and slot.name in self.states:
                    found[(microbatch - 1, slot)] = None
        return found

    def unused(self, slot: Slot) -> bool:
        """Tell whether an output took no part in the objective though others of its call did.

        Such as the last state of a recurrent layer over padded rows, which depends on the padded length.
        Without gradients nothing but its form tells such a state.
        """
        if slot.kind != Kind.ACTIVATION or not slot.slot.startswith("out."):
            return False
        if slot.phase == "eval":  # without a graph every later call is assumed to be computed from it
            return slot not in self.surely_used and self._is_last_state(slot)
        if any(ref[1] == slot for ref in self.consumers):
            return False
        graded = {
            s.slot
            for view in (self.pair.a, self.pair.b)
            for s in view.items
            if (s.kind, s.name, s.call) == (Kind.ACTIVATION_GRAD, slot.name, slot.call)
        }
        return slot.slot not in graded and any(g.startswith("out.") for g in graded)

    def _is_last_state(self, slot: Slot) -> bool:
        """Tell whether an output is [layers, rows, features] beside a first one of all positions of rows."""
        for view in (self.pair.a, self.pair.b):
            states, outputs = (view.items.get(s, ()) for s in (slot, slot._replace(slot="out.0")))
            shapes = {item.part: item.entry.local_shape for item in outputs}
            forms = [(item.entry.local_shape, shapes.get(item.part, ())) for item in states]
            if not all(is_last_state(state, output) for state, output in forms):
                return False
        return True

    def _inputs(self, slot: Slot, microbatch: int | None) -> list[Slot]:
        call = (slot.phase, slot.name, slot.call, microbatch)
        return [s for s in self.calls[call] if s.slot.startswith("in.")]

    def _gradient_parents(
        self, slot: Slot, microbatch: int | None
    ) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
        """Return what every call that used the tensor needs for its part of the gradient."""
        value = slot._replace(kind=Kind.ACTIVATION)
        parents: dict[Ref, None] = {}
        earlier: dict[Ref, None] = {}
        sources = [(microbatch, value)]
        if slot.slot.startswith("in."):
            self._add_call(value, microbatch, parents, earlier)
            given = self.producers.get((microbatch, value), {})
            sources += [source for source in given if (source, (microbatch, value)) in self.handed_on]
        for source in sources:
            for user_microbatch, user in self.consumers.get(source, {}):
                if user.kind == Kind.LOSS:
                    parents |= self._of_loss(user, user_microbatch, source)
                elif user.slot.startswith("in.") and self._is_between(source, (user_microbatch, user)):
                    self._add_between((user_microbatch, user), parents)
                elif user.slot.startswith("in."):
                    self._add_call(user, user_microbatch, parents, earlier)
                    if source == (microbatch, value):  # backwards, a tensor is its user's, then its maker's
                        parents[(user_microbatch, user._replace(kind=Kind.ACTIVATION_GRAD))] = None
                elif user.kind == Kind.ACTIVATION:
                    self._add_between((user_microbatch, user), parents)
        parents.pop((microbatch, slot), None)
        parents[(None, ROWS)] = None  # the objective is over all rows
        if len(parents) == 1:
            parents |= dict.fromkeys(weight_refs(self.pair)) if slot.phase == "train" else {}
        return tuple(parents), tuple(earlier)

    def _is_between(self, source: Ref, user: Ref) -> bool:
        """Tell whether a call was given what was computed from the tensor and has a gradient of its own."""
        gradient = user[1]._replace(kind=Kind.ACTIVATION_GRAD)
        recorded = gradient in self.pair.a.items or gradient in self.pair.b.items
        return recorded and (source, user) not in self.handed_on

    def _add_between(self, user: Ref, parents: dict[Ref, None]) -> None:
        """Add what the backward of code between modules reads: the gradient of what it made, and its values.

        Such as attention, which computes one tensor from several: each one's gradient is made of all of them.
        """
        parents[(user[0], user[1]._replace(kind=Kind.ACTIVATION_GRAD))] = None
        given = [source for source in self.producers.get(user, {}) if source[1].kind == Kind.ACTIVATION]
        parents |= dict.fromkeys([*given, user])

    def _add_call(
        self, value: Slot, microbatch: int | None, parents: dict[Ref, None], earlier: dict[Ref, None]
    ) -> None:
        """Add what the backward of one module call reads: its outputs' gradients, its values, its state."""
        for used in self.calls[(value.phase, value.name, value.call, microbatch)]:
            parents[(microbatch, used)] = None
            if used.slot.startswith("out"):
                parents[(microbatch, used._replace(kind=Kind.ACTIVATION_GRAD))] = None
        earlier |= dict.fromkeys(self.states.get(value.name, ()))

    def _of_loss(self, loss: Slot, microbatch: int | None, source: Ref) -> dict[Ref, None]:
        """Return what the gradient of a loss depends on: the token weight, targets, and what it was given."""
        weight: Ref = (microbatch, loss._replace(slot="weight", call=0))
        return {weight: None, source: None, **self._all_calls(loss._replace(slot="target"), microbatch)}

    def _all_calls(self, slot: Slot, microbatch: int | None) -> dict[Ref, None]:
        found = (s for s in (*self.pair.a.items, *self.pair.b.items) if s._replace(call=slot.call) == slot)
        return {(microbatch, s): None for s in found}


def is_last_state(state: tuple[int, ...], output: tuple[int, ...]) -> bool:
    """Tell by its shape whether an output may be the last states of a recurrent layer beside the other one.

    Those are [layers, rows, features]; the outputs have rows and positions first, in either order.
    """
    return len(state) == len(output) == 3 and state[1] in output[:2] and state[0] not in output[:2]


def merged(slot: Slot) -> Slot:
    """Fold the calls of a loss, which are compared as one sum."""
    return slot._replace(call=0) if slot.kind == Kind.LOSS and slot.slot in SUMMED else slot


def states_by_module(pair: StepPair) -> dict[str, list[Ref]]:
    """Return per module the parameters and buffers that it computes with, as the step before left them."""
    return _by_module(pair, (pair.before_a, pair.before_b), "model")


def _written(pair: StepPair) -> dict[str, list[Ref]]:
    """Return per module the parameters that the program wrote since the step before, as copies of masters."""
    found: dict[str, list[Ref]] = defaultdict(list)
    for slot in (COPY, "start"):
        for module, refs in _by_module(pair, (pair.a, pair.b), slot).items():
            found[module] += refs
    return found


def _by_module(pair: StepPair, views: tuple[StepView, StepView], slot_of: str) -> dict[str, list[Ref]]:
    """Return the parameters of each module and of those inside it that are never called themselves."""
    called = {slot.name for view in (pair.a, pair.b) for slot, _ in view.find(Kind.ACTIVATION)}
    owned: dict[str, dict[Ref, None]] = defaultdict(dict)
    for view in views:
        for slot, items in view.items.items():
            if slot.kind in (Kind.PARAM, Kind.BUFFER) and slot.slot == slot_of:
                for name in {slot.name, *(n for i in items for n in i.entry.meta.aliases)}:
                    owner = name.rpartition(".")[0] or ROOT
                    around = (o for o in enclosing(owner) if o in called) if owner != ROOT else iter(())
                    user = owner if owner in called else next(around, owner)
                    owned[user][(None, slot._replace(call=0))] = None
    return {module: list(refs) for module, refs in owned.items()}


def read_by_gradient(module: str, states: dict[str, list[Ref]]) -> list[Ref]:
    """Return the parameters of a module that the gradient of one of them depends on.

    None where its result is linear in them, as that of a layer of a ``weight`` and a ``bias``: it is what an
    attention or a recurrent layer, which has several, does within.
    """
    refs = states.get(module, [])
    prefix = "" if module == ROOT else f"{module}."
    layer = {f"{prefix}weight", f"{prefix}bias"}
    return [] if all(slot.name in layer for _, slot in refs if slot.kind == Kind.PARAM) else refs
