"""Losses of functions, from the recorded scores and targets that they were given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tensortrace.diff.catalog import Item, Slot, StepView
from tensortrace.diff.catalog import Part as BatchPart
from tensortrace.replay.modules.formulas import FORMULAS
from tensortrace.replay.modules.given import Form, Given, NoFormula, Settings
from tensortrace.tracer.types import SCORES, Kind, Setting

CLASSES = {"cross_entropy": "CrossEntropyLoss", "nll_loss": "NLLLoss"}
"""The module whose formula a function has."""

UNARRANGED = "the trace does not tell how its scores lie in what was recorded, or of what classes weigh"


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function in one part of the batch; ``scores`` is the result that it was given."""

    name: str
    value: tuple[Slot, Item]
    total: tuple[Slot, Item] | None
    target: Item
    scores: tuple[Slot, Item]

    def formula(self) -> tuple[Form, Given]:
        """Return the formula and what it reads; raise NoFormula where that was not recorded."""
        _, value = self.value
        meta, (_, scores) = value.entry.meta, self.scores
        shape, smoothing = said(meta.text)
        if any(not i.source.stored(i.entry) for i in (scores, self.target, value)):
            raise NoFormula("what it was computed from was not stored")
        settings: dict[str, Setting] = {
            "ignore_index": meta.ignore_index, "label_smoothing": smoothing, "reduction": meta.reduction,
        }  # fmt: skip
        found = torch.from_numpy(scores.read().astype("float64"))
        if found.numel() != torch.Size(shape).numel():
            raise NoFormula(UNARRANGED)
        target = torch.from_numpy(self.target.read().astype("int64"))
        inputs = {"0": found.reshape(shape), "1": target}
        given = Given(inputs, {}, Settings(settings), False, scores.entry.dtype, value.entry.local_shape)
        return FORMULAS[CLASSES[self.name]], given


def said(text: str | None) -> tuple[tuple[int, ...], float]:
    """Return the shape of a loss's scores and its label smoothing; raise NoFormula where neither is told."""
    words = (text or "").split()
    if len(words) != 2 or not words[0].startswith(SCORES):
        raise NoFormula(UNARRANGED)
    try:
        shape = tuple(int(size) for size in words[0].removeprefix(SCORES).split(",") if size)
        return shape, float(words[1].partition("=")[2])
    except ValueError as error:
        raise NoFormula(UNARRANGED) from error


def losses_of(view: StepView) -> list[LossCall]:
    """Return the calls of functions of classes whose scores are one recorded result."""
    held: dict[tuple[str, int, BatchPart], dict[str, tuple[Slot, Item]]] = {}
    for slot, items in view.find(Kind.LOSS):
        for item in items:
            if slot.name in CLASSES and item.part is not None:
                held.setdefault((slot.name, slot.call, item.part), {})[slot.slot] = slot, item
    found = []
    for (name, _, part), slots in held.items():
        if "value" not in slots or "target" not in slots:
            continue
        scores = _scores(view, slots["value"][1], part)
        if scores is not None:
            found.append(LossCall(name, slots["value"], slots.get("sum"), slots["target"][1], scores))
    return found


def _scores(view: StepView, value: Item, part: BatchPart) -> tuple[Slot, Item] | None:
    """Return the one recorded result that a loss was computed from."""
    made = {slot for slot, of in view.producers(value) if of == part and slot.kind == Kind.ACTIVATION}
    items = [(slot, item) for slot in made for item in view.items[slot] if item.part == part]
    return items[0] if len(items) == 1 else None
