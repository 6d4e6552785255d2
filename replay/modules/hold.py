"""Holds the module calls of a step against their formulas, a bounded number of tensors at a time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.catalog import Part as BatchPart
from tensortrace.diff.compare import EPS, is_exact
from tensortrace.diff.plan.comparison import StepPlan
from tensortrace.diff.plan.pair import StepPair
from tensortrace.replay.contract import EVALUATED, Gap, Ref, Step, microbatch_of
from tensortrace.replay.found import Replaying
from tensortrace.replay.modules.calls import Call, calls_of
from tensortrace.replay.modules.execute import Made, execute
from tensortrace.replay.modules.expected import Held, Part, comparison, judged
from tensortrace.replay.modules.formulas import FORMULAS
from tensortrace.replay.modules.given import NoFormula
from tensortrace.replay.modules.known import Modules
from tensortrace.replay.modules.losses import LossCall, losses_of
from tensortrace.replay.modules.reading import (
    UNREADABLE,
    CallReader,
    call_ranks,
    eps_of,
    is_stored,
    result_of,
)
from tensortrace.replay.modules.versions import Versions
from tensortrace.tracer.types import SOLE, Kind, Module

BATCH = 1 << 23
"""Elements of what formulas gave that are held before they are compared."""

GIVEN = "it was given to a module; where a module made it, it is replayed as what that returned"
BROUGHT = "what its uses brought back: replayed as the gradient of a module's input, where one module used it"
SHARED = "its tensor has other uses, or may have: what they bring is not known"
NO_GRADIENT = "no gradient of what its module returned was recorded"
OTHER_SLOT = "its formula does not tell this part of what it returns"
TEXT = "by the formula of {kind}"


@dataclass
class ModuleWork:
    """What is said of the boundaries of modules in one step."""

    told: set[Ref] = field(default_factory=set)
    gaps: list[Gap] = field(default_factory=list)


@dataclass
class _Sum:
    """What several calls bring to one gradient: added up until all have."""

    waiting: int
    items: tuple[tuple[Slot, Item], ...]
    value: np.ndarray | None = None
    squares: float = 0.0
    length: int = 1
    eps: float = 0.0
    broken: bool = False
    makes: list[Held] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)

    def add(self, made: Made, held: Held, eps: float, kind: str) -> None:
        """Add what one call brings."""
        self.value = made.value if self.value is None else self.value + made.value
        self.squares += made.terms**2
        self.length, self.eps = max(self.length, made.length), max(self.eps, eps)
        self.makes.append(Held(held.make))
        self.kinds.append(kind)


def hold_modules(step: Step, modules: Modules, versions: Versions, found: Replaying) -> ModuleWork:
    """Execute each call of a plain module of torch.nn again; compare what it returned and passed back."""
    return _Holding(step, modules, versions, found).run()


class _Holding:
    """One step: calls are executed part by part, compared in batches, then let go."""

    def __init__(self, step: Step, modules: Modules, versions: Versions, found: Replaying) -> None:
        self._step, self._modules, self._found = step, modules, found
        self._reads = CallReader(step, modules, versions)
        self._work = ModuleWork()
        self._parts: dict[Ref, list[Part]] = defaultdict(list)
        self._parents: dict[Ref, tuple[Ref, ...]] = {}
        self._texts: dict[Ref, str] = {}
        self._pending = 0
        self._sums: dict[tuple[BatchPart, str], _Sum] = {}
        self._view = step.view

    def run(self) -> ModuleWork:
        """Go through all calls of the step."""
        calls = calls_of(self._step.view)
        before: tuple[str, int] | None = None
        self._consumers = _consumers(calls)
        for number, part_calls in _by_microbatch(calls):
            if before is not None and number != before:
                self._end_microbatch()
            before = number
            self._begin(part_calls)
            for call in part_calls:
                self._call(call)
        self._end_microbatch()
        for loss in losses_of(self._step.view):
            self._loss(loss)
        self._flush()
        return self._work

    # --- losses of functions ----------------------------------------------------------------------------

    def _loss(self, loss: LossCall) -> None:
        """Compare the value of a loss, or the sum of its terms, with what its scores and targets give."""
        slot, item = loss.value
        eps, parents = EPS.get(item.entry.dtype, 0.0), ((microbatch_of(item), loss.scores[0]),)
        text = "by its scores and targets"

        def value() -> Made:
            return execute(*loss.formula(), None, {}, ())["out"]

        try:
            made = value()
        except NoFormula:
            return
        if item.entry.meta.reduction == "none":
            self._expect(slot, item, made, Held(lambda: value().value, made.value), eps, text, parents)
        elif loss.total is not None and loss.total[1].source.stored(loss.total[1].entry):
            over = 1.0 if item.entry.meta.reduction == "sum" else item.entry.meta.denominator
            if over:  # the value follows from the sum
                whole = Made(made.value * over, made.terms * over, made.length)
                again = Held(lambda: np.asarray(value().value * over), whole.value)
                self._expect(*loss.total, whole, again, eps, text, parents)

    # --- one call --------------------------------------------------------------------------------

    def _call(self, call: Call) -> None:
        if call.part.phase == "train" and call.part.number in self._step.evaluations:
            self._without(call, EVALUATED)
            return
        try:
            form, module, own, given = self._reads.given(call)
        except NoFormula as reason:
            self._without(call, str(reason))
            return
        wanted = self._reads.wanted(call, form, given)
        gradient = self._reads.gradient(call) if wanted.inputs or wanted.own else None
        inputs = wanted.inputs if gradient is not None else {}
        trained = wanted.own if gradient is not None else []
        try:
            made = self._reads.execute_call(call, form, given, gradient, inputs, trained)
            if made["out"].value.shape != given.shape:
                raise NoFormula(f"its formula gives {list(made['out'].value.shape)}")
        except NoFormula as reason:
            self._without(call, str(reason))
            return
        again = _Again(self._reads, call, inputs, trained)
        text = TEXT.format(kind=module.kind)
        out = result_of(call, form)
        slot, item = call.values[out]
        stores = form.stores if is_stored(item, given, own) else 0
        eps = eps_of([item], module)
        self._expect(slot, item, made["out"], again.held("out", made), eps, text, self._made_of(call), stores)
        for name in call.returned:
            if name != out:
                self._gap(*call.values[name], OTHER_SLOT)
        for name, (slot, item) in call.values.items():
            if name.startswith("in."):
                self._gap(slot, item, GIVEN)
        self._gradients(call, made, again, module, text, inputs, trained, out)
        if self._pending > BATCH:
            self._flush()

    def _gradients(
        self, call: Call, made: dict[str, Made], again: _Again, module: Module, text: str,
        inputs: Mapping[str, str], trained: Sequence[str], out: str,
    ) -> None:  # fmt: skip
        alone = {
            inputs[n.removeprefix("in.")]
            for n, (_, i) in call.gradients.items()
            if i.entry.meta.op == SOLE and n.removeprefix("in.") in inputs
        }
        back = [call.values[out][1], *(call.gradients[out][1:] if out in call.gradients else ())]
        parents = ((call.part.number, call.values[out][0]), *self._behind(call))
        for name, (slot, item) in call.gradients.items():
            if not name.startswith("in."):
                self._gap(slot, item, BROUGHT)
                continue
            key = name.removeprefix("in.")
            if key not in inputs:
                self._gap(slot, item, NO_GRADIENT)
                continue
            eps, name = eps_of([*back, item], module), f"in.{inputs[key]}"
            if inputs[key] in alone:
                self._expect(slot, item, made[name], again.held(name, made), eps, text, parents)
            elif inputs[key] == key:
                self._share(
                    (call.part, item.entry.digest), made[name], again.held(name, made), eps, module.kind
                )
            self._parents.setdefault((microbatch_of(item), slot), parents)
        form = FORMULAS[module.kind]
        for own, canonical in self._reads.names(call, form).items():
            arrived = self._reads.arrived(canonical, call)
            for slot, item in self._reads.used(canonical, call):
                used = self._reads.used(canonical, call)
                once = len(used) == 1 and self._calls_of[call.part, call.name] == 1
                if once and own in trained:
                    eps = eps_of([*back, item], module)
                    self._expect(slot, item, made[own], again.held(own, made), eps, text, parents)
                else:
                    self._gap(slot, item, SHARED if own in trained else NO_GRADIENT)
            if not arrived:
                continue
            slot, item = arrived[0]
            if own not in trained or len(arrived) > 1:
                for one in arrived:
                    self._gap(*one, SHARED if own in trained else NO_GRADIENT)
                self._break((call.part, canonical))
                continue
            eps = eps_of([*back, item], module)
            if item.entry.meta.op == SOLE:
                self._expect(slot, item, made[own], again.held(own, made), eps, text, parents)
            else:
                self._share((call.part, canonical), made[own], again.held(own, made), eps, module.kind)
            self._parents.setdefault((microbatch_of(item), slot), parents)

    def _made_of(self, call: Call) -> tuple[Ref, ...]:
        """Return what the inputs of a call were returned by."""
        view = self._step.view
        found = [(part.number, slot) for _, item in call.given() for slot, part in view.producers(item)]
        return tuple(dict.fromkeys(found))

    def _behind(self, call: Call) -> tuple[Ref, ...]:
        """Return the gradients that came back into what a call returned."""
        found: dict[Ref, None] = {}
        for name in call.returned:
            for event in ((rank, entry.event) for rank, entry in call.values[name][1].members):
                for slot in self._consumers.get((call.part, event), ()):
                    found[call.part.number, slot] = None
        return tuple(found)

    # --- gradients that several calls bring ---------------------------------------------------------

    def _begin(self, calls: Sequence[Call]) -> None:
        """Note which gradients of inputs are those of one tensor, and how many calls bring some of it."""
        held: dict[tuple[BatchPart, str], list[tuple[Slot, Item]]] = defaultdict(list)
        users: dict[tuple[BatchPart, str], set[tuple[str, int]]] = defaultdict(set)
        self._calls_of: dict[tuple[BatchPart, str], int] = defaultdict(int)
        for call in calls:
            self._calls_of[call.part, call.name] += 1
            for name, (slot, item) in call.gradients.items():
                if name.startswith("in.") and item.entry.meta.op != SOLE and not is_exact(item.entry.dtype):
                    key = call.part, item.entry.digest
                    held[key].append((slot, item))
                    users[key] |= {(call.name, call.number)} if self._reads.has_formula(call) else set()
            if self._reads.has_formula(call):
                form = FORMULAS[self._modules.module(call.name, call_ranks(call)).kind]
                for canonical in self._reads.names(call, form).values():
                    arrived = self._reads.arrived(canonical, call)
                    if arrived and arrived[0][1].entry.meta.op != SOLE:
                        key = call.part, canonical
                        held[key] = arrived
                        users[key].add((call.name, call.number))
        self._sums = {key: _Sum(len(users[key]), tuple(items)) for key, items in held.items() if users[key]}

    def _share(self, key: tuple[BatchPart, str], made: Made, held: Held, eps: float, kind: str) -> None:
        total = self._sums.get(key)
        if total is None or total.broken:
            return
        total.add(made, held, eps, kind)
        total.waiting -= 1
        if not total.waiting:
            self._settle(key, total)

    def _break(self, key: tuple[BatchPart, str]) -> None:
        if key in self._sums:
            self._sums[key].broken = True
            self._sums[key].value = None

    def _settle(self, key: tuple[BatchPart, str], total: _Sum) -> None:
        """Compare what calls bring together with what arrived, if nothing else did."""
        (slot, item), value = total.items[0], total.value
        assert value is not None
        makes = tuple(total.makes)
        text = TEXT.format(kind=" and ".join(dict.fromkeys(total.kinds)))

        def part_with(others: tuple[Item, ...]) -> Part:
            def make() -> np.ndarray:
                made = [held.get() for held in makes] + [np.asarray(o.read(), np.float64) for o in others]
                return np.asarray(sum(made[1:], made[0]))

            added = [np.asarray(o.read(), np.float64) for o in others]
            whole = np.asarray(sum(added, value))
            squares = total.squares + sum(float(np.vdot(x, x)) for x in added)
            held = Held(make, whole)
            eps = max([total.eps, *(EPS[o.entry.dtype] for o in others)])
            return Part(slot, microbatch_of(item), item, held, math.sqrt(squares), total.length, eps)

        for others in ((), *((other,) for other in self._rest(key[0], item, value, total))):
            part = part_with(others)
            if judged(part).ratio <= 1:
                for slot, item in total.items:
                    mine = replace(part, slot=slot, microbatch=microbatch_of(item), actual=item)
                    self._add(mine, f"{text}, and what else used it" if others else text)
                break
        else:
            for slot, item in total.items:
                self._gap(slot, item, SHARED)
        del self._sums[key]

    def _rest(self, part: BatchPart, item: Item, value: np.ndarray, total: _Sum) -> Iterator[Item]:
        """Yield recorded gradients that are of the size of what calls do not bring: of a residual path."""
        if item.entry.kind != Kind.ACTIVATION_GRAD or not item.source.stored(item.entry):
            return
        there = np.asarray(item.read(), np.float64)
        missing = float(np.linalg.norm(there - value))
        size = 8 * (float(np.linalg.norm(there)) + float(np.linalg.norm(value)))
        seen = {item.entry.digest}
        for slot, items in self._step.view.find(Kind.ACTIVATION_GRAD, phase=part.phase):
            for other in items if slot.slot.startswith("out") else ():
                entry = other.entry
                known = entry.stats.l2 if entry.stats is not None else None
                if other.part != part or entry.local_shape != item.entry.local_shape or known is None:
                    continue
                slack = size * max(total.eps, EPS.get(entry.dtype, 0.0))
                if entry.digest not in seen and abs(known - missing) <= slack and other.source.stored(entry):
                    seen.add(entry.digest)
                    yield other

    def _end_microbatch(self) -> None:
        for total in self._sums.values():
            for slot, item in total.items:
                self._gap(slot, item, SHARED)
        self._sums = {}

    # --- what is said ------------------------------------------------------------------------------

    def _expect(
        self, slot: Slot, item: Item, made: Made, held: Held, eps: float, text: str, parents: tuple[Ref, ...],
        stores: int = 0,
    ) -> None:  # fmt: skip
        if not item.source.stored(item.entry):
            self._gap(slot, item, UNREADABLE)
            return
        self._parents[microbatch_of(item), slot] = parents
        length = made.length
        self._add(Part(slot, microbatch_of(item), item, held, made.terms, length, eps, stores), text)

    def _add(self, part: Part, text: str) -> None:
        ref = part.microbatch, part.slot
        self._parts[ref].append(part)
        self._texts[ref] = text
        self._pending += math.prod(part.actual.entry.local_shape)

    def _without(self, call: Call, reason: str) -> None:
        for name, (slot, item) in call.values.items():
            self._gap(slot, item, GIVEN if name.startswith("in.") else reason)
        for name, (slot, item) in call.gradients.items():
            self._gap(slot, item, reason if name.startswith("in.") else BROUGHT)
        for name, (_, item) in call.gradients.items():
            if name.startswith("in.") and self._reads.has_formula(call):
                self._break((call.part, item.entry.digest))
        for canonical in self._reads.owned.names(call.name).values():
            for slot, item in self._reads.arrived(canonical, call):
                self._gap(slot, item, reason)
            self._break((call.part, canonical))

    def _gap(self, slot: Slot, item: Item, reason: str) -> None:
        self._work.gaps.append(Gap(slot, microbatch_of(item), reason))

    def _flush(self) -> None:
        """Compare all that is held, and let go of it."""
        plan = StepPlan(self._step.view.step)
        items = dict(self._view.items)
        for ref, parts in self._parts.items():
            plan.comparisons.append(comparison(parts, self._parents.get(ref, ()), self._texts[ref]))
            instead = {id(part.actual): part.expected for part in parts}
            items[ref[1]] = tuple(instead.get(id(item), item) for item in items[ref[1]])
        self._view = replace(self._view, items=items)
        self._found.oracle.expected[self._step.view.step] = self._view
        pair = StepPair(self._view, self._step.view, self._step.before, self._step.before)
        self._found.execution.run(plan, None, pair)
        self._work.told |= set(self._parts)
        for parts in self._parts.values():
            for part in parts:
                part.held.value = None
        self._parts.clear()
        self._pending = 0


@dataclass(frozen=True)
class _Again:
    """How to execute a call once more, for who asks for a value after it was let go."""

    reads: CallReader
    call: Call
    inputs: Mapping[str, str]
    trained: Sequence[str]

    def held(self, name: str, made: dict[str, Made]) -> Held:
        """Return one of the values."""
        return Held(partial(self._value, name), made[name].value)

    def _value(self, name: str) -> np.ndarray:
        form, _, _, given = self.reads.given(self.call)
        gradient = self.reads.gradient(self.call) if name != "out" else None
        inputs, trained = (self.inputs, self.trained) if gradient is not None else ({}, ())
        return self.reads.execute_call(self.call, form, given, gradient, inputs, trained)[name].value


def _by_microbatch(calls: Sequence[Call]) -> Iterator[tuple[tuple[str, int], list[Call]]]:
    """Yield the calls of one microbatch on all ranks: those of one name one after the other."""
    found: dict[tuple[str, int], dict[tuple[str, int], list[Call]]] = {}
    for call in calls:
        of_part = found.setdefault((call.part.phase, call.part.number), {})
        of_part.setdefault((call.name, call.number), []).append(call)
    for number, named in found.items():
        yield number, [call for same in named.values() for call in same]


def _consumers(calls: Sequence[Call]) -> dict[tuple[BatchPart, tuple[int, int]], list[Slot]]:
    """Return the gradients of inputs by the events whose results they were."""
    found: dict[tuple[BatchPart, tuple[int, int]], list[Slot]] = defaultdict(list)
    for call in calls:
        for name, item in call.given():
            gradient = call.gradients.get(f"in.{name}")
            if gradient is None:
                continue
            for rank, entry in item.members:
                for event in entry.producers:
                    found[call.part, (rank, event)].append(gradient[0])
    return found
