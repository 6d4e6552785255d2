"""Which samples each part of a run saw.

A row is identified by its content: the root module's inputs, cut to the row's valid positions. So rows
meet whatever the sampler, the microbatch split or the world size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import xxhash

from tensortrace.diff.answers import Answers, OfParts, find_answers, hidden_sources, whole_answers
from tensortrace.diff.catalog import Item, Part, Slot, StepView
from tensortrace.diff.documents import Documents, find_documents, find_numbers
from tensortrace.diff.extent import Extent, extent_of
from tensortrace.diff.ignored import hidden_positions, ignored_positions, unanswered_ends, with_several_losses
from tensortrace.diff.lengths import MASK, with_mask_of_lengths
from tensortrace.diff.masks import run, tokens_of
from tensortrace.tracer.types import ROOT, Kind


class Row(NamedTuple):
    """One sample: the part that saw it, its number there, and its valid positions [start, stop).

    Of a packed row each document is a sample: ``packed``. An ``idle`` row is of nothing but what mask or
    loss ignore: it fills up a batch and takes no part in the objective. ``answer`` are the valid positions of
    its second sequence, where it has one.
    """

    part: Part
    number: int
    start: int
    stop: int
    digest: bytes
    idle: bool = False
    packed: bool = False
    answer: tuple[int, int] = (0, 0)

    def of_answer(self) -> Row:
        """Return the row with the valid positions of its second sequence; the first are then the others."""
        return self._replace(start=self.answer[0], stop=self.answer[1], answer=(self.start, self.stop))


@dataclass(frozen=True)
class Batch:
    """The rows of one step of one run, and the extent of each part.

    ``lengths`` are digests of tensors that say nothing but how long the documents in a row are, or which of
    the row's each is, ``pad`` the token that fills rows. ``numbers`` are the inputs that number documents.
    """

    rows: tuple[Row, ...]
    extents: dict[Part, Extent]
    notes: tuple[str, ...] = ()
    lengths: frozenset[str] = frozenset()
    pad: int | None = None
    numbers: frozenset[str] = frozenset()

    def with_answers(self, answers: OfParts) -> Batch:
        """Return the batch with second sequences of its rows."""
        extents = {part: e._replace(answers=answers[part].length) for part, e in self.extents.items()}
        rows = (row._replace(answer=answers[row.part].span(row.number)) for row in self.rows)
        return replace(self, rows=tuple(rows), extents=extents)


def read_batches(a: StepView, b: StepView, phase: str) -> tuple[Batch, Batch]:
    """Return the rows of one step of both runs, read so that as many rows as can be are in both.

    Rows are whole first; then what may be padding at their ends is cut off, where only the values tell it,
    or where one run's loss wants what is padding in the other; then, the batch may be time-major, as
    recurrent networks take it; last, rows may have a second sequence, padded otherwise.
    """
    best: tuple[Batch, Batch] | None = None
    for found in _readings(a, b, phase):
        best = best if best is not None and _common(*best) >= _common(*found) else found
        if not found[0].rows or not found[1].rows or _common(*best) == min(map(_working, best)):
            break
    assert best is not None
    return best


def with_answers(batches: tuple[Batch, Batch], a: StepView, b: StepView, phase: str) -> tuple[Batch, Batch]:
    """Return the batches with their rows' second sequences, uncut, where they were read without any.

    Rows that are padded alike in both runs meet without them, but not all that was computed of them follows
    the first sequence.
    """
    if any(e.answers is not None or e.time_major for batch in batches for e in batch.extents.values()):
        return batches
    for cut in (False, True):
        of_a, of_b = (_tensors(view, phase, by_lengths=cut, time_major=False) for view in (a, b))
        found = whole_answers((of_a, of_b))
        if found is not None:
            left, right = (batch.with_answers(answers) for batch, answers in zip(batches, found, strict=True))
            return left, right
    return batches


def _readings(a: StepView, b: StepView, phase: str) -> Iterator[tuple[Batch, Batch]]:
    """Yield the rows of both runs as they may be meant, the most literal reading first."""
    yield from _of_one_sequence(a, b, phase)
    for cut in (False, True):
        of_a, of_b = (_tensors(view, phase, by_lengths=cut, time_major=False) for view in (a, b))
        if cut and not any(MASK in tensors for tensors in (*of_a.values(), *of_b.values())):
            return
        read = partial(read_batch, phase=phase, by_lengths=cut)
        for left, right in find_answers((a, b), phase, (of_a, of_b)):
            yield read(a, answers=left), read(b, answers=right)
            found = read(a, answers=left, guess_padding=True), read(b, answers=right, guess_padding=True)
            yield found
            pads = [batch.pad for batch in found if batch.pad is not None]
            if len(pads) == 1:
                yield read(a, answers=left, pad=pads[0]), read(b, answers=right, pad=pads[0])


def _of_one_sequence(a: StepView, b: StepView, phase: str) -> Iterator[tuple[Batch, Batch]]:
    """Yield the rows as they may be meant where all positions of a row are one sequence's."""
    whole = read_batch(a, phase), read_batch(b, phase)
    yield whole
    yield read_batch(a, phase, as_given=True), read_batch(b, phase, as_given=True)
    yield read_batch(a, phase, guess_padding=True), read_batch(b, phase, guess_padding=True)
    match whole[0].pad, whole[1].pad:
        case int(pad), None:
            yield whole[0], read_batch(b, phase, pad=pad)
        case None, int(pad):
            yield read_batch(a, phase, pad=pad), whole[1]
    yield read_batch(a, phase, unanswered=True), read_batch(b, phase, unanswered=True)
    if numbers := whole[0].numbers & whole[1].numbers:
        yield read_batch(a, phase, numbers=numbers), read_batch(b, phase, numbers=numbers)
    yield read_batch(a, phase, by_lengths=True), read_batch(b, phase, by_lengths=True)
    if 0 < min(map(_working, whole)) <= 2 * _common(*whole):  # one other row does not turn the batch
        return
    for name_a, name_b in _alike(a, b, phase):
        yield read_batch(a, phase, only=name_a), read_batch(b, phase, only=name_b)
    for (guess, cut), first in product(
        ((False, False), (True, False), (False, True)), ((True, True), (False, True), (True, False))
    ):
        left, right = (
            read_batch(view, phase, guess_padding=guess, by_lengths=cut, time_major=order)
            for view, order in zip((a, b), first, strict=True)
        )
        turned = left, right
        if _working(turned[0]) == _working(turned[1]):  # else what is cut short looks like fewer rows
            yield turned


def _alike(a: StepView, b: StepView, phase: str) -> Iterator[tuple[str, str]]:
    """Yield the names of an input in both runs that may be the same tensor, where their inputs are others.

    A wrapper may call a model with its labels, or call what computes its loss in the model's place.
    """
    forms: list[dict[str, set[tuple[int, str]]]] = []
    for view in (a, b):
        found: dict[str, set[tuple[int, str]]] = defaultdict(set)
        for _, slot, item in _known(view, phase):
            kind = "float" if "float" in item.entry.dtype else "whole"
            found[slot.slot].add((len(item.entry.local_shape), kind))
        forms.append(found)
    if forms[0].keys() != forms[1].keys():
        yield from ((x, y) for x, y in product(*forms) if forms[0][x] == forms[1][y])


def _working(batch: Batch) -> int:
    return sum(not row.idle for row in batch.rows)


def _common(a: Batch, b: Batch) -> int:
    """Return how many rows that are not idle both batches have."""
    left, right = (Counter(row.digest for row in batch.rows if not row.idle) for batch in (a, b))
    return (left & right).total()


def read_batch(
    view: StepView,
    phase: str,
    *,
    guess_padding: bool = False,
    time_major: bool = False,
    pad: int | None = None,
    as_given: bool = False,
    by_lengths: bool = False,
    unanswered: bool = False,
    only: str | None = None,
    numbers: frozenset[str] = frozenset(),
    answers: OfParts | None = None,
) -> Batch:
    """Return the rows of one step, in order of (microbatch, rank, index).

    Padding is what mask or loss ignore; with ``guess_padding`` also a token that rows end in repeatedly, with
    ``pad`` that token, even where it is not ignored. Rows ``as_given`` are neither cut nor divided.
    ``by_lengths`` cuts features where lengths that were given with them say so; ``unanswered`` what comes
    after the last label that counts, a row's last token too, which only rows shorter than others hold. What
    ``numbers`` documents is no part of what they are. ``answers`` are second sequences: then the loss is
    theirs where they say so. ``only`` one input tells the rows, where it is named.
    """
    inputs = _tensors(view, phase, by_lengths=by_lengths, time_major=time_major)
    if only is not None:
        inputs = {part: {only: tensors[only]} for part, tensors in inputs.items() if only in tensors}
    digests = {(part, slot.slot): item.entry.digest for part, slot, item in _known(view, phase)}
    ignored = {} if answers is None else hidden_sources(inputs)
    if answers is None or not any(own.has_loss for own in answers.values()):
        ignored |= ignored_positions(view, phase, inputs, time_major=time_major)
    several = with_several_losses(view, phase)
    forced = pad is not None
    hidden: dict[Part, np.ndarray] = {}
    if not as_given and not forced and answers is None:
        find = unanswered_ends if unanswered else hidden_positions
        hidden = find(view, phase, inputs, several, time_major=time_major)
    notes: tuple[str, ...] = ()
    if pad is None and not as_given:
        pad, notes = _pad_value(inputs, ignored, guess=guess_padding)
    rows: list[Row] = []
    extents: dict[Part, Extent] = {}
    lengths: set[str] = set()
    numbering: list[frozenset[str]] = []
    for part in sorted(inputs, key=lambda p: (p.number, p.rank)):
        extents[part] = extent_of(inputs[part])._replace(time_major=time_major)
        skipped = None if forced else ignored.get(part)
        documents = None if as_given else _documents(inputs[part], numbers)
        numbering.append(find_numbers(inputs[part], documents) if documents else frozenset())
        ends = hidden.get(part)
        own = answers[part] if answers else None
        found = _rows_of_part(part, inputs[part], extents[part], skipped, pad, documents, ends, own)
        packed = any(row.packed for row in found)
        extents[part] = extents[part]._replace(packed=packed, answers=own.length if own else None)
        lengths |= {digests[part, name] for name in (*_lengths(inputs[part], documents), *numbers)}
        rows += found if part not in several else [row._replace(idle=False) for row in found]
    if left_out := _tokens_in(hidden, inputs, pad):
        ignore = "the loss ignores" if unanswered else "mask and loss both ignore"
        notes += (f"{left_out} positions at the ends of rows hold tokens, but {ignore} them",)
    notes += tuple(sorted({own.note for own in (answers or {}).values() if own.note}))
    shared = frozenset.intersection(*numbering) if numbering else frozenset()
    return Batch(tuple(rows), extents, notes, frozenset(lengths), pad, shared)


def _known(view: StepView, phase: str) -> Iterator[tuple[Part, Slot, Item]]:
    """Yield what tells the rows of each part, of which the values were recorded."""
    for part, slot, item in _given(view, phase):
        if slot.call == 0 and item.source.stored(item.entry) and item.entry.local_shape:
            yield part, slot, item


def _tensors(
    view: StepView, phase: str, *, by_lengths: bool, time_major: bool
) -> dict[Part, dict[str, np.ndarray]]:
    """Return what tells the rows of each part, rows first: see ``read_batch``."""
    inputs: dict[Part, dict[str, np.ndarray]] = defaultdict(dict)
    for part, slot, item in _known(view, phase):
        inputs[part][slot.slot] = item.read()
    found = {part: _as_row(tensors) for part, tensors in inputs.items()}
    if by_lengths:
        found = {part: with_mask_of_lengths(t, time_major=time_major) for part, t in found.items()}
    return {part: _turned(tensors) for part, tensors in found.items()} if time_major else found


def _as_row(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return as one row tokens that have no dimension of rows: documents one after the other."""
    tokens = next((v for v in tensors.values() if v.dtype.kind in "iu" and v.ndim), None)
    if tokens is None or tokens.ndim != 1 or tokens_of(tensors) is not None:
        return tensors
    length = len(tokens)
    rows = {n: v[None] if v.ndim and len(v) == length else v for n, v in tensors.items()}
    first = next(v for v in rows.values() if v.shape == (1, length))
    return rows if find_documents(rows, first) else tensors


def _documents(tensors: dict[str, np.ndarray], numbers: frozenset[str]) -> Documents | None:
    tokens = tokens_of(tensors)
    found = None if tokens is None else find_documents(tensors, tokens)
    return found._replace(told_by=found.told_by | numbers) if found else None


def _lengths(tensors: dict[str, np.ndarray], documents: Documents | None) -> list[str]:
    """Return the names of inputs that are cumulative lengths of documents."""
    return [name for name in documents.told_by if tensors[name].ndim == 1] if documents else []


def _tokens_in(
    hidden: dict[Part, np.ndarray], inputs: dict[Part, dict[str, np.ndarray]], pad: int | None
) -> int:
    """Return how many hidden positions hold anything but padding."""
    total = 0
    for part, ends in hidden.items():
        tokens = tokens_of(inputs[part])
        total += 0 if tokens is None else int((ends & (tokens != pad)).sum())
    return total


def _turned(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors that have the positions first with the rows first."""
    tokens = tokens_of(tensors)
    first = tokens if tokens is not None else next(iter(tensors.values()))
    return {
        name: np.swapaxes(value, 0, 1) if value.ndim > 1 and value.shape[:2] == first.shape[:2] else value
        for name, value in tensors.items()
    }


def _given(view: StepView, phase: str) -> Iterator[tuple[Part, Slot, Item]]:
    """Yield what tells the rows of each part: what one root was given from outside the recorded modules.

    That is the main root's input; another root's, the first, where the main one was not called (a
    discriminator's own step); and where the main root was given what a pass without gradients had computed
    (a frozen encoder), what that pass was given.
    """
    found = [(slot, item) for slot, items in _inputs(view, phase) for item in items]
    by_part: dict[Part, list[tuple[Slot, Item]]] = defaultdict(list)
    for slot, item in sorted(found, key=lambda f: f[1].entry.event):
        if item.part is not None:
            by_part[item.part].append((slot, item))
    for part, given in by_part.items():
        outside = [(slot, item) for slot, item in given if not _computed(view, item)]
        before = [] if outside else _given_before(view, part, given)
        chosen = outside or before or given
        names = [slot.name for slot, _ in chosen]
        name = ROOT if ROOT in names else names[0]
        yield from ((part, slot, item) for slot, item in chosen if slot.name == name)


def _computed(view: StepView, item: Item) -> bool:
    """Tell whether an input came from anything but what a pass was given, as targets from tokens."""
    for event in item.entry.producers:
        slot, _ = view.by_event.get((item.source.rank, event), (None, None))
        if slot is None or not (slot.kind == Kind.INPUT or slot.slot.startswith("in.")):
            return True
    return False


def _given_before(view: StepView, part: Part, given: list[tuple[Slot, Item]]) -> list[tuple[Slot, Item]]:
    """Return the inputs of the pass that computed what this part was given; none where no other did."""
    events = ((item.source.rank, event) for _, item in given for event in item.entry.producers)
    sources = {view.by_event[event][1] for event in events if event in view.by_event} - {part, None}
    return [
        (slot, item)
        for slot, items in view.find(Kind.INPUT)
        for item in items
        if item.part in sources and not item.entry.producers
    ]


def _inputs(view: StepView, phase: str) -> list[tuple[Slot, tuple[Item, ...]]]:
    """Return what root modules were given: inputs, or where those were deselected the main activations."""
    found = list(view.find(Kind.INPUT, phase=phase))
    if found:
        return found
    activations = view.find(Kind.ACTIVATION, phase=phase)
    return [(s, i) for s, i in activations if s.name == ROOT and s.slot.startswith("in.")]


def _pad_value(
    inputs: dict[Part, dict[str, np.ndarray]], ignored: dict[Part, np.ndarray], *, guess: bool
) -> tuple[int | None, tuple[str, ...]]:
    """Return the token id that fills ignored positions at the ends of rows; None where there is none."""
    counts: Counter[int] = Counter()
    for part, tensors in inputs.items():
        tokens = tokens_of(tensors)
        if tokens is None:
            continue
        if part in ignored:
            for row, skip in zip(tokens, ignored[part], strict=True):
                for end, flags in ((row[::-1], skip[::-1]), (row, skip)):
                    alike = run(end[: run(flags)] == end[0])  # a prompt is ignored too, and isn't padding
                    counts.update({int(end[0]): alike} if alike else {})
        elif guess and tokens.shape[1] > 1:
            ends = tokens[tokens[:, -1] == tokens[:, -2]]
            counts.update(int(row[-1]) for row in ends)
    if not counts:
        return None, ()
    pad = counts.most_common(1)[0][0]
    guessed = any(tokens_of(t) is not None and p not in ignored for p, t in inputs.items())
    note = f"padding is assumed to be token {pad} at the ends of rows (no mask or ignore_index was seen)"
    return pad, (note,) if guessed else ()


def _rows_of_part(
    part: Part,
    tensors: dict[str, np.ndarray],
    extent: Extent,
    ignored: np.ndarray | None,
    pad: int | None,
    documents: Documents | None,
    hidden: np.ndarray | None,
    answers: Answers | None,
) -> list[Row]:
    tokens = tokens_of(tensors)
    if documents is not None:
        tensors = {name: value for name, value in tensors.items() if name not in documents.told_by}
    rows = []
    for index in range(extent.rows):
        start, stop = 0, extent.positions or 0
        if tokens is not None and (pad is not None or hidden is not None):
            skip = np.zeros(stop, dtype=bool) if pad is None else tokens[index] == pad
            if ignored is not None:
                skip &= ignored[index]
            if hidden is not None:
                skip |= hidden[index]
            start, stop = run(skip), len(skip) - run(skip[::-1])
            if start >= stop:  # a row of nothing but padding keeps its full length
                start, stop = 0, len(skip)
        idle = ignored is not None and bool(ignored[index].all())
        idle |= answers is not None and not answers.stops[index]
        pieces = documents.divide(index, start, stop) if documents else [(start, stop)]
        for first, last in pieces:
            identity = _identity(tensors, index, extent, first, last, answers)
            answer = answers.span(index) if answers else (0, 0)
            rows.append(Row(part, index, first, last, identity, idle, len(pieces) > 1, answer))
    return rows


def _identity(
    tensors: dict[str, np.ndarray],
    index: int,
    extent: Extent,
    start: int,
    stop: int,
    answers: Answers | None,
) -> bytes:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        value = tensors[name]
        if value.ndim == 0 or value.shape[0] != extent.rows:
            continue
        row = value[index]
        if answers and name in answers.names:
            row = row[slice(*answers.span(index))]
        elif extent.positions is not None and row.ndim and row.shape[0] == extent.positions:
            row = row[start:stop]
        if row.dtype.kind in "iu":  # int32 and int64 token ids are the same tokens
            row = row.astype(np.int64)
        digest.update(np.ascontiguousarray(row).tobytes())
    return digest.digest()
