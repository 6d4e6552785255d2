"""What modules did otherwise: other random masks, another mode, a bias added more than once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.assemble import Assembled, by_rows
from tensortrace.diff.catalog import Slot, StepView
from tensortrace.diff.causes.case import Case, Proposal
from tensortrace.diff.plan.comparison import Comparison, replica
from tensortrace.tracer.types import Kind

_COMMON = 0.02
"""Share of elements that both runs must have kept for masks to be told from values."""


def dropout(case: Case) -> Sequence[Proposal]:
    """Propose that a dropout drew another mask, or drew none since it is not in training mode."""
    entry, loaded = case.origin.comparison, case.origin.assembled
    if not isinstance(entry, Comparison) or loaded is None or entry.slot.kind != Kind.ACTIVATION:
        return ()
    module = entry.items_b[0].entry.meta.module or ""
    if "Dropout" not in module or not entry.slot.slot.startswith("out"):
        return ()
    before = _beside(case, "in.0")
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    if before is None or before.b.shape != b.shape:
        return ()
    given = before.b.astype(np.float64)
    if not all(np.isfinite(x).all() for x in (a, b, given)):
        return ()
    modes = [{item.entry.meta.training for item in items} for items in (entry.items_a, entry.items_b)]
    if modes[0] != modes[1]:
        return (_mode(case, module, given, a, b, training=modes[1] == {True}),)
    kept = (b != 0) & (given != 0)
    if not kept.any() or kept.sum() < _COMMON * b.size:
        return ()
    factor = float(np.vdot(given[kept], b[kept]) / np.vdot(given[kept], given[kept]))
    mistaken = np.where(b != 0, given * factor, 0.0)
    differ = int(((a == 0) != (b == 0)).sum())
    code, words = _generator(case, entry, b)
    text = f"{module} {entry.slot.name} draws another mask in b: {differ} of {b.size} elements; {words}"
    return (Proposal(code, text, [mistaken], [b], [a], float(differ), "elements masked otherwise"),)


def _mode(
    case: Case, module: str, given: np.ndarray, a: np.ndarray, b: np.ndarray, *, training: bool
) -> Proposal:
    """A dropout that is off passes on what it is given; one that is on masks and scales it."""
    name = case.origin.node.slot.name
    kept = (b != 0) & (given != 0)
    size = float(np.vdot(given[kept], given[kept]))
    factor = float(np.vdot(given[kept], b[kept])) / size if training and size else 1.0
    mistaken = np.where(b != 0, given * factor, 0.0) if training else given
    how = (
        ("in training mode", "in evaluation mode") if training else ("in evaluation mode", "in training mode")
    )
    text = f"{module} {name} is {how[0]} in b, {how[1]} in a"
    return Proposal("mode.training", text, [mistaken], [b], [a], float(training), "the module's mode")


def _generator(case: Case, entry: Comparison, b: np.ndarray) -> tuple[str, str]:
    """Return the code and the words for where the mask came from."""
    masks = {
        item.cell: _bits(item.read()) for item in entry.items_b if not item.part or item.part.number == 0
    }
    others = {i.cell: _bits(i.read()) for i in entry.items_a if not i.part or i.part.number == 0}
    if (
        len(masks) > 1
        and len(set(masks.values())) == 1
        and (len(others) < 2 or len(set(others.values())) > 1)
    ):
        return "rng.same_on_all_ranks", f"all {len(masks)} ranks of b draw the same one"
    states = _states(case.pair.a), _states(case.pair.b)
    known = states[0].keys() & states[1].keys()
    if known and any(states[0][key] != states[1][key] for key in known):
        return "rng.differs", "the generators' states differ when the step begins"
    if states[0] and states[1] and len(states[0]) != len(states[1]):
        return "rng.differs", "the runs draw from other numbers of generators, one for each rank"
    return "dropout.mask", "the generators' states agree when the step begins"


def _bits(value: np.ndarray) -> bytes:
    return np.packbits(value.reshape(-1) != 0).tobytes()


def _states(view: StepView) -> dict[tuple[int, str], str]:
    """Return the digest of the CPU's and the devices' generator states, by rank and name."""
    return {
        (item.source.rank, slot.name): item.entry.digest
        for slot, items in view.find(Kind.RNG)
        if slot.name.startswith(("cpu", "cuda"))
        for item in items
    }


def _beside(case: Case, slot: str) -> Assembled | None:
    """Return another boundary of the origin's module call, in the same order; None where there is none."""
    node = case.origin.node
    wanted = node.slot._replace(slot=slot)
    sides = []
    for view in (case.pair.a, case.pair.b):
        items = [
            item
            for item in view.items.get(wanted, ())
            if item.part and (node.microbatch is None or item.part.number == node.microbatch)
        ]
        sides.append(items)
    return by_rows(sides[0], sides[1], case.pair.pairing) if all(sides) else None


def duplicated_bias(case: Case) -> Sequence[Proposal]:
    """Propose that a module's bias was added more often than once, or not at all."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.ACTIVATION or not slot.slot.startswith("out") or loaded is None:
        return ()
    bias = _param_before(case, f"{slot.name}.bias")
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    if bias is None or a.ndim < 1 or bias.shape != a.shape[-1:] or not bias.any():
        return ()
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(bias).all()):
        return ()
    times = float(np.mean((b - a) @ bias) / float(bias @ bias))
    whole = round(times)
    if not whole or abs(times - whole) > 0.01:
        return ()
    if whole == -1:
        text, code = f"the bias of {slot.name} is not added in b", "bias.missing"
    else:
        text, code = f"the bias of {slot.name} is added {whole + 1} times in b", "bias.duplicated"
    ranks = len(case.b.ranks)
    equals = f"every one of {ranks} ranks adds it" if whole + 1 == ranks > 1 else None
    return (Proposal(code, text, [a + whole * bias], [b], [a], float(whole + 1), equals, simplicity=-1),)


def _param_before(case: Case, name: str) -> np.ndarray | None:
    slot = Slot("window", Kind.PARAM, name, "model", 0)
    items = case.pair.before_b.items.get(slot)
    return replica(items).read().astype(np.float64) if items else None
