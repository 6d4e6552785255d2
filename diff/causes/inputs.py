"""Different inputs: other rows, other order, or rows that several ranks repeat."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from tensortrace.diff.catalog import Slot, StepView
from tensortrace.diff.causes.case import Case, Proposal, told
from tensortrace.diff.pairing import duplicated_across_ranks
from tensortrace.diff.rows import Row, read_batch
from tensortrace.diff.scale import CLOSE
from tensortrace.tracer.types import ROOT, Kind


def different_rows(case: Case) -> Sequence[Proposal]:
    """Propose that the runs saw different rows: duplicates, another step's rows, or new ones."""
    slot, batch_a, batch_b = case.origin.node.slot, case.pair.batch_a, case.pair.batch_b
    known = Counter(row.digest for row in batch_a.rows)
    working = [row for row in batch_b.rows if not row.idle]
    strange = [row for row in working if row.digest not in known]
    if slot.kind != Kind.INPUT and not (strange and _is_input_of_one(slot, case)):
        return ()
    again = (Counter(row.digest for row in working) - known).total() - len(strange)
    duplicates = duplicated_across_ranks(batch_a, batch_b)
    if duplicates:
        names = ", ".join(map(str, sorted({row.part.rank for row in duplicates})))
        text = f"ranks {names} of b were given the same rows ({len(duplicates)} of {len(batch_b.rows)})"
        return (told("input.duplicated_across_ranks", text, len(duplicates), "rows"),)
    total = len(batch_b.rows)
    elsewhere = _steps_that_hold(case, strange)
    if elsewhere:
        text = f"{len(strange)} of {total} rows of b are a's of step {elsewhere}: the data's order differs"
        return (told("input.order", text, len(strange), "rows"),)
    text = f"{len(strange)} of {total} rows of b are not among a's {len(batch_a.rows)} rows of this step"
    if again and total == len(batch_a.rows):
        text = f"{text}, and " if strange else ""
        text += f"{again} of {total} rows of b are others of its rows again"
        return (told("input.different", text, len(strange) + again, "rows"),)
    if not strange:
        text = f"b was given {total} rows in this step, a {len(batch_a.rows)}"
        return (told("input.different", text, abs(total - len(batch_a.rows)), "rows"),)
    return (told("input.different", text, len(strange), "rows"),)


def _is_input_of_one(slot: Slot, case: Case) -> bool:
    """Tell whether a tensor is given to a module from outside in one run, by a wrapper in the other."""
    given = [bool(view.named(Kind.INPUT, slot.name)) for view in (case.pair.a, case.pair.b)]
    return slot.kind == Kind.ACTIVATION and slot.slot.startswith("in") and given[0] != given[1]


def given_otherwise(case: Case) -> Iterator[Proposal]:
    """Propose what was done to an input beside the one that rows are known by: state, noise, masks."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    root = slot.kind == Kind.ACTIVATION and slot.name == ROOT and slot.slot.startswith("in.")
    if (slot.kind == Kind.INPUT or root) and loaded is not None and loaded.a.ndim == loaded.b.ndim == 0:
        text = f"{slot.name} is given {loaded.b.item():.9g} as {slot.slot} in b, {loaded.a.item():.9g} in a"
        yield told("input.different", text, 1, "inputs", simplicity=9)
    if slot.kind != Kind.INPUT or loaded is None or not loaded.a.ndim or loaded.a.shape != loaded.b.shape:
        return
    starts = (
        np.cumsum(loaded.lengths)[:-1] if sum(loaded.lengths) == len(loaded.a) else range(1, len(loaded.a))
    )
    left, right = (np.split(x, starts) for x in (loaded.a, loaded.b))
    of_rows = len(loaded.owners) == len(left)
    wrong = [n for n, (x, y) in enumerate(zip(left, right, strict=True)) if not np.array_equal(x, y)]
    cleared = [n for n in wrong if not right[n].any()]
    if cleared:
        ranks = sorted({loaded.owners[n].part.rank for n in cleared}) if of_rows else []
        where = (
            f" for rows of rank {', '.join(map(str, ranks))}" if len(cleared) < len(right) and ranks else ""
        )
        text = f"every element of {slot.name} {slot.slot} is zero in b{where}"
        mistaken = np.concatenate([np.zeros_like(x) if n in cleared else x for n, x in enumerate(left)])
        yield Proposal("value.zero", text, [mistaken], [loaded.b], [loaded.a], 0.0, "zero")
    if not of_rows or not wrong:
        return
    if Counter(x.tobytes() for x in left) == Counter(y.tobytes() for y in right):
        text = f"{len(wrong)} rows of {slot.name} {slot.slot} are a's in another order: those of others"
        yield told("input.order", text, len(wrong), "rows", simplicity=-1)
        return
    rows = [Counter(row.digest for row in batch.rows) for batch in (case.pair.batch_a, case.pair.batch_b)]
    if rows[0] != rows[1]:
        return  # the rows themselves are others
    text = f"{len(wrong)} of {len(right)} rows of {slot.name} {slot.slot} are others, beside the same rows"
    yield told("input.different", text, len(wrong), "rows", simplicity=9)


def _steps_that_hold(case: Case, strange: Sequence[Row]) -> str:
    wanted = {row.digest for row in strange}
    for step in case.a.steps:
        if wanted and wanted <= {row.digest for row in read_batch(case.a.view(step), "train").rows}:
            return str(step)
    return ""


def different_targets(case: Case) -> Sequence[Proposal]:
    """Propose that the labels differ although the rows that they label are the same."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.LOSS or slot.slot != "target" or loaded is None:
        return ()
    wrong = np.argwhere(loaded.a != loaded.b)
    if not len(wrong):
        return ()
    first = tuple(int(n) for n in wrong[0])
    row = loaded.owner(first)
    where = f" (rank {row.part.rank}, row {row.number})" if row else ""
    text = (
        f"{len(wrong)} of {loaded.a.size} targets of {slot.name} differ, the first {int(loaded.b[first])} "
        f"instead of {int(loaded.a[first])}{where}"
    )
    return (told("input.different", text, len(wrong), "targets"),)


def padding_counted(case: Case) -> Sequence[Proposal]:
    """Propose that every target counts as valid, those that the reference leaves out included."""
    slot = case.origin.node.slot
    if slot.kind != Kind.LOSS or slot.slot not in ("sum", "count"):
        return ()
    (valid_a, all_a), (valid_b, all_b) = (_counts(view, slot) for view in (case.pair.a, case.pair.b))
    if valid_b != all_b or not valid_a < min(valid_b, all_a):
        return ()
    left_out = valid_b - valid_a
    text = f"all {all_b} targets of {slot.name} count in b; the reference leaves {left_out} out"
    return (told("mask.padding_leak", text, left_out, "targets that are padding", simplicity=-1),)


def padding_weighed(case: Case) -> Sequence[Proposal]:
    """Propose that tokens that weigh nothing in the reference weigh as much as the others in b."""
    slot, loaded = case.origin.node.slot, case.origin.assembled
    if slot.kind != Kind.LOSS or slot.slot != "weight" or loaded is None or loaded.a.shape != loaded.b.shape:
        return ()
    a, b = loaded.a.astype(np.float64), loaded.b.astype(np.float64)
    masked = a == 0
    if not masked.any() or masked.all() or not b[masked].all():
        return ()
    factor, weight = float(np.median(b[~masked] / a[~masked])), float(np.median(b[~masked]))
    mistaken = np.where(masked, weight, a * factor)  # a mean is then over more tokens
    text = f"{masked.sum()} tokens of {slot.name} that weigh nothing in the reference weigh {weight:.6g} in b"
    return (
        Proposal(
            "mask.padding_leak", text, [mistaken], [b], [a], float(masked.sum()), "tokens masked in a",
            simplicity=-1, floor=CLOSE, fitted=2,
        ),
    )  # fmt: skip


def _counts(view: StepView, slot: Slot) -> tuple[int, int]:
    """Return how many targets of a loss are valid, and how many there are."""
    valid = view.items.get(slot._replace(slot="count"), ())
    targets = view.items.get(slot._replace(slot="target"), ())
    return sum(int(i.read()) for i in valid), sum(math.prod(i.entry.local_shape) for i in targets)
