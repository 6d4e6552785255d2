"""Plans what forward and backward passes recorded: inputs, activations, losses, activation gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled, by_rows
from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.compare import is_exact
from tensortrace.diff.plan.comparison import Comparison, OneSided, StepPair, StepPlan, by_rank
from tensortrace.diff.rows import Row
from tensortrace.tracer.types import ROOT, Kind

Ref = tuple[int | None, Slot]
_SUMMED = ("sum", "count")


def plan_passes(pair: StepPair, plan: StepPlan) -> None:
    """Add the comparisons of one step's forward and backward passes to the plan."""
    edges = _Edges(pair)
    for slot in dict.fromkeys((*pair.a.items, *pair.b.items)):
        if slot.phase == "window" or (slot.kind == Kind.LOSS and not _judged_loss(slot, pair)):
            continue
        if slot.kind == Kind.LOSS and slot.slot in _SUMMED and slot.call:
            continue  # chunked losses are summed under call 0
        for microbatch, a, b in _groups(slot, pair):
            _plan_one(slot, microbatch, a, b, pair, plan, edges)
    if not pair.scale.observed and pair.pairing.pairs and not pair.same_scheme:
        plan.notes.append(
            "scale not observed: no token weight was recorded, gradients compared up to a factor"
        )


def _judged_loss(slot: Slot, pair: StepPair) -> bool:
    """Tell whether a loss slot is compared by itself: values depend on the scheme, weights are apart."""
    if slot.slot == "weight":
        return False
    if slot.slot == "value":
        has_sum = any(s.name == slot.name and s.slot == "sum" for s in (*pair.a.items, *pair.b.items))
        return pair.same_scheme and not has_sum and slot.name != "backward"
    return True


def _groups(slot: Slot, pair: StepPair) -> Iterable[tuple[int | None, tuple[Item, ...], tuple[Item, ...]]]:
    """Yield a slot's entries by the microbatch under which they are compared."""
    grouped: dict[int | None, tuple[list[Item], list[Item]]] = defaultdict(lambda: ([], []))
    for side, view in enumerate((pair.a, pair.b)):
        for item in _entries(slot, view):
            if item.part is not None:
                grouped[pair.group(item.part)][side].append(item)
    for microbatch, (a, b) in grouped.items():
        yield microbatch, by_rank(a), by_rank(b)


def _entries(slot: Slot, view: StepView) -> Sequence[Item]:
    if slot.kind == Kind.LOSS and slot.slot in _SUMMED:
        calls = (s for s in view.items if s._replace(call=0) == slot._replace(call=0))
        return [item for s in calls for item in view.items[s]]
    return view.items.get(slot, ())


def _plan_one(
    slot: Slot,
    microbatch: int | None,
    a: tuple[Item, ...],
    b: tuple[Item, ...],
    pair: StepPair,
    plan: StepPlan,
    edges: _Edges,
) -> None:
    parents, earlier = edges.of(slot, microbatch)
    if not a or not b:
        side, items = ("a", a) if a else ("b", b)
        reason = f"recorded only in {side}"
        plan.one_sided.append(
            OneSided("a" if a else "b", slot, microbatch, items, reason, parents=parents, earlier=earlier)
        )
        return
    plan.comparisons.append(
        Comparison(
            slot=slot,
            microbatch=microbatch,
            load=_loader(slot, a, b, pair),
            items_a=a,
            items_b=b,
            parents=parents,
            earlier=earlier,
            exact=all(is_exact(i.entry.dtype) for i in (*a, *b)),
        )
    )


def _loader(slot: Slot, a: tuple[Item, ...], b: tuple[Item, ...], pair: StepPair) -> Callable[[], Assembled]:
    pairing = pair.pairing if slot.phase == "train" else pair.eval_pairing
    if slot.kind == Kind.LOSS and slot.slot in _SUMMED:
        return lambda: Assembled(_total(a), _total(b))
    if slot.kind == Kind.ACTIVATION_GRAD:
        return lambda: by_rows(a, b, pairing, scale_b=gradient_scale(pair), additive=True)
    return lambda: by_rows(a, b, pairing)


def _total(items: Sequence[Item]) -> np.ndarray:
    return np.asarray(sum(np.asarray(item.read(), dtype=np.float64) for item in items))


def gradient_scale(pair: StepPair) -> Callable[[Row], float]:
    """Return the factor by which each row's gradients of ``b`` are divided."""
    if pair.scale.observed or pair.same_scheme:
        return pair.scale.of
    fitted = fitted_scale(pair)
    return lambda row: fitted


def fitted_scale(pair: StepPair) -> float:
    """Return one factor between the runs' local gradients, where token weights were not observed."""
    ratios = []
    for name in pair.gradients_a.names:
        a, b = (sum(g.local(name).values()) for g in (pair.gradients_a, pair.gradients_b))
        norm = float(np.vdot(a, a)) if isinstance(a, np.ndarray) else 0.0
        if norm and isinstance(b, np.ndarray) and np.isfinite(norm):
            ratios.append(float(np.vdot(a, b)) / norm)
    return float(np.median(ratios)) if ratios and np.median(ratios) else 1.0


class _Edges:
    """Parents of pass boundaries, from both runs' recorded producers and from the ladder."""

    def __init__(self, pair: StepPair) -> None:
        self.pair = pair
        self.producers: dict[Ref, dict[Ref, None]] = defaultdict(dict)
        self.consumers: dict[Ref, dict[Ref, None]] = defaultdict(dict)
        self.calls: dict[tuple[str, str, int, int | None], list[Slot]] = defaultdict(list)
        for view in (pair.a, pair.b):
            self._read(view)

    def _read(self, view: StepView) -> None:
        for slot, items in view.items.items():
            for item in items:
                if item.part is None:
                    continue
                ref = (self.pair.group(item.part), _merged(slot))
                if slot.kind == Kind.ACTIVATION:
                    call = (slot.phase, slot.name, slot.call, ref[0])
                    if slot not in self.calls[call]:
                        self.calls[call].append(slot)
                for event in item.entry.producers:
                    found = view.by_event.get((item.source.rank, event))
                    if found and found[1].part is not None:
                        source = (self.pair.group(found[1].part), _merged(found[0]))
                        self.producers[ref][source] = None
                        self.consumers[source][ref] = None

    def of(self, slot: Slot, microbatch: int | None) -> tuple[tuple[Ref, ...], tuple[Ref, ...]]:
        """Return (parents in this step, parents in the step before)."""
        ref = (microbatch, _merged(slot))
        if slot.kind == Kind.ACTIVATION_GRAD:
            return tuple(self._gradient_parents(slot, microbatch)), ()
        parents = dict(self.producers.get(ref, {}))
        if slot.kind == Kind.ACTIVATION and slot.slot.startswith("out"):
            if not any(p[1].name != slot.name for p in parents):
                parents |= {(microbatch, s): None for s in self._inputs(slot, microbatch)}
            return tuple(parents), tuple(_state_of_module(slot.name, self.pair))
        if slot.kind == Kind.ACTIVATION and slot.name == ROOT:
            source = Slot(slot.phase, Kind.INPUT, ROOT, slot.slot, slot.call)
            parents[(microbatch, source)] = None
        if slot.kind == Kind.LOSS and slot.slot in _SUMMED:
            target = slot._replace(slot="target", call=0)
            parents[(microbatch, target)] = None
        return tuple(parents), ()

    def _inputs(self, slot: Slot, microbatch: int | None) -> list[Slot]:
        call = (slot.phase, slot.name, slot.call, microbatch)
        return [s for s in self.calls[call] if s.slot.startswith("in.")]

    def _gradient_parents(self, slot: Slot, microbatch: int | None) -> dict[Ref, None]:
        """Gradients of the consumers, this call's own outputs for an input, and the values used."""
        value = slot._replace(kind=Kind.ACTIVATION)
        parents: dict[Ref, None] = {}
        sources = [(microbatch, value)]
        if slot.slot.startswith("in."):
            parents |= self._output_gradients(value, microbatch)
            sources += list(self.producers.get((microbatch, value), {}))
        for source in sources:
            for user_microbatch, user in self.consumers.get(source, {}):
                if user.kind == Kind.LOSS:
                    parents[(None, user._replace(slot="weight", call=0))] = None
                    parents[(user_microbatch, user)] = None
                elif user.slot.startswith("in."):
                    parents |= self._output_gradients(user, user_microbatch)
                elif user.kind == Kind.ACTIVATION:
                    parents[(user_microbatch, user._replace(kind=Kind.ACTIVATION_GRAD))] = None
        parents.pop((microbatch, slot), None)
        if not parents:
            parents |= {(None, s): None for s in self._losses(slot.phase)}
        parents |= {(microbatch, s): None for s in self._inputs(value, microbatch)}
        return parents

    def _output_gradients(self, value: Slot, microbatch: int | None) -> dict[Ref, None]:
        call = (value.phase, value.name, value.call, microbatch)
        outs = (s for s in self.calls[call] if s.slot.startswith("out"))
        return {(microbatch, s._replace(kind=Kind.ACTIVATION_GRAD)): None for s in outs}

    def _losses(self, phase: str) -> list[Slot]:
        found = {s for s in self.pair.b.items if s.kind == Kind.LOSS and s.phase == phase}
        return [s._replace(slot="weight", call=0) for s in found if s.slot == "sum"]


def _merged(slot: Slot) -> Slot:
    """Fold the calls of a loss, which are compared as one sum."""
    return slot._replace(call=0) if slot.kind == Kind.LOSS and slot.slot in _SUMMED else slot


def _state_of_module(module: str, pair: StepPair) -> list[Ref]:
    """Return the parameters and buffers that a module owns directly, as the step before left them."""
    prefix = "" if module == ROOT else f"{module}."
    owned = []
    for view in (pair.before_a, pair.before_b):
        for slot in view.items:
            if slot.kind in (Kind.PARAM, Kind.BUFFER) and slot.slot == "model":
                names = {slot.name, *(n for i in view.items[slot] for n in i.entry.meta.aliases)}
                if any(n.startswith(prefix) and "." not in n[len(prefix) :] for n in names):
                    owned.append((None, slot._replace(call=0)))
    return list(dict.fromkeys(owned))
