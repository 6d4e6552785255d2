"""Which positions of a batch neither mask nor loss wants: what may be padding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping

import numpy as np

from tensortrace.diff.catalog import Item, Part, StepView
from tensortrace.diff.documents import find_documents
from tensortrace.diff.extent import Extent, extent_of
from tensortrace.diff.masks import hidden_ends, mask_of_features, mask_of_tokens, run, to_the_end, tokens_of
from tensortrace.tracer.types import Kind

Inputs = Mapping[Part, dict[str, np.ndarray]]
"""What the root was given in each part, rows first."""


def ignored_positions(
    view: StepView, phase: str, inputs: Inputs, *, time_major: bool
) -> dict[Part, np.ndarray]:
    """Return per part a bool matrix [rows, positions]: true where neither loss nor mask wants the token.

    The last token of the last document of a row may have no target, and is left in.
    """
    found: dict[Part, np.ndarray] = {}
    for part, tensors in inputs.items():
        tokens = tokens_of(tensors)
        mask = next((v for name, v in tensors.items() if "mask" in name), mask_of_features(tensors))
        mask = mask_of_tokens(tensors) if mask is None else mask
        if tokens is not None and mask is not None and mask.shape == tokens.shape:
            found[part] = np.asarray(mask == 0)
    rest = {part: tensors for part, tensors in inputs.items() if part not in found}
    found |= _ignored_by_loss(view, phase, rest, time_major=time_major)
    return {part: _but_last_tokens(positions, inputs[part]) for part, positions in found.items()}


def hidden_positions(
    view: StepView,
    phase: str,
    inputs: Inputs,
    several: Container[Part],
    *,
    time_major: bool,
) -> dict[Part, np.ndarray]:
    """Return the ends of rows that mask and loss both ignore, of the parts that have one loss."""
    known = _ignored_by_one_loss(view, phase, inputs, several, time_major=time_major)
    found = {part: hidden_ends(inputs[part], tokens, ignored) for part, tokens, ignored in known}
    return {part: ends for part, ends in found.items() if ends is not None}


def unanswered_ends(
    view: StepView,
    phase: str,
    inputs: Inputs,
    several: Container[Part],
    *,
    time_major: bool,
) -> dict[Part, np.ndarray]:
    """Return the ends of rows that come after the last label that counts, of parts that have one loss."""
    known = _ignored_by_one_loss(view, phase, inputs, several, time_major=time_major)
    return {part: to_the_end(ignored) for part, _, ignored in known}


def _ignored_by_one_loss(
    view: StepView, phase: str, inputs: Inputs, several: Container[Part], *, time_major: bool
) -> Iterator[tuple[Part, np.ndarray, np.ndarray]]:
    """Yield the tokens, and which of them the loss ignores, of parts with one loss and undivided rows."""
    for part, ignored in _ignored_by_loss(view, phase, inputs, time_major=time_major).items():
        tokens = tokens_of(inputs[part])
        if tokens is None or part in several or tokens.shape != ignored.shape:
            continue
        if find_documents(inputs[part], tokens) is None:
            yield part, tokens, ignored


def with_several_losses(view: StepView, phase: str) -> set[Part]:
    """Return the parts with several losses: what one of them ignores, another may want."""
    names: dict[Part, set[str]] = defaultdict(set)
    for slot, items in view.find(Kind.LOSS, phase=phase):
        for item in items:
            if item.part is not None and slot.slot in ("sum", "target"):
                names[item.part].add(slot.name)
    return {part for part, found in names.items() if len(found) > 1}


def _ignored_by_loss(
    view: StepView, phase: str, inputs: Inputs, *, time_major: bool
) -> dict[Part, np.ndarray]:
    """Return the positions whose labels the loss ignores, or that weigh nothing in one without labels."""
    found: dict[Part, np.ndarray] = {}
    for part, item, extent in _losses(view, phase, "target", inputs, time_major=time_major):
        if part not in found:
            ignored = _ignored_by_target(item.read(), item.entry.meta.ignore_index, extent)
            found |= {} if ignored is None else {part: ignored}
    weightless: dict[Part, np.ndarray] = {}
    for part, item, extent in _losses(view, phase, "weight", inputs, time_major=time_major):
        size = int(np.prod(item.entry.local_shape))
        if part not in found and size == extent.rows * (extent.positions or 0):
            weightless[part] = np.asarray(extent.by_row(item.read().reshape(-1)) == 0)
    return found | weightless


def _losses(
    view: StepView, phase: str, slot_of: str, inputs: Inputs, *, time_major: bool
) -> Iterator[tuple[Part, Item, Extent]]:
    """Yield one slot of every loss that was computed of these inputs."""
    for slot, items in view.find(Kind.LOSS, phase=phase):
        for item in items:
            if slot.slot == slot_of and item.part in inputs and item.source.stored(item.entry):
                assert item.part is not None
                yield item.part, item, extent_of(inputs[item.part])._replace(time_major=time_major)


def _ignored_by_target(target: np.ndarray, ignore_index: int | None, extent: Extent) -> np.ndarray | None:
    """Return the positions whose labels are ignored; None where labels follow no positions."""
    rows, positions = extent.rows, extent.positions
    if positions is None or ignore_index is None:
        return None
    if target.size == rows * positions:
        return np.asarray(extent.by_row(target) == ignore_index)
    if target.size == rows * (positions - 1):  # a causal loss shifted inside the program
        valid = extent.by_row(target) != ignore_index
        ignored = np.ones((rows, positions), dtype=bool)
        ignored[:, :-1] &= ~valid
        ignored[:, 1:] &= ~valid
        return ignored
    return None


def _but_last_tokens(ignored: np.ndarray, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Return what is ignored less the last token of the last document of a row, which may have no target."""
    tokens = tokens_of(tensors)
    documents = None if tokens is None else find_documents(tensors, tokens)
    if tokens is None or documents is None or tokens.shape != ignored.shape:
        return ignored
    kept = ignored.copy()
    for row, begins in zip(kept, documents.begins, strict=True):
        if run(row[::-1]) == 1 and not begins[-1]:
            row[-1] = False
    return kept
