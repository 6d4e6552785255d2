"""What microbatches and groups of ranks have each of their own of a boundary, as one tensor of the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tensortrace.diff.catalog import StepView
from tensortrace.diff.dimensions import label_dims
from tensortrace.diff.rows import read_batch
from tensortrace.diff.tensors import GlobalTensor
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import Kind

_ADDED = ("sum", "count")
_OF_ROWS = {"rows", "flat", "grouped"}


def join(view: StepView, found: Sequence[GlobalTensor]) -> np.ndarray:
    """Return the tensors of one boundary as one: rows of the batch in order of microbatch and rank.

    Equal tensors of no rows are one; sums and counts of a loss are added. Rows are the first dimension of
    what the model is given. Raises BadRequest where nothing says how the tensors belong together.
    """
    first = found[0]
    if len(found) == 1:
        return first.read()
    if first.kind == Kind.LOSS and first.slot in _ADDED:
        return np.asarray(sum(tensor.read() for tensor in found))
    dim = _dim_of_rows(view, found)
    if dim is None and len({tensor.digest for tensor in found}) == 1:
        return first.read()
    if dim is None:
        raise _apart(found, "they follow no rows of the batch")
    if len({(*t.shape[:dim], *t.shape[dim + 1 :]) for t in found}) > 1:
        raise _apart(found, "their rows are padded to different lengths")
    return np.concatenate([tensor.read() for tensor in found], axis=dim)


def _dim_of_rows(view: StepView, found: Sequence[GlobalTensor]) -> int | None:
    parts = [item.part for tensor in found for item in tensor.items if item.part is not None]
    if len(parts) < len(found):
        return None
    extents = read_batch(view, parts[0].phase).extents
    if any(part not in extents for part in parts):
        return None
    cases = [(tensor.shape, extents[part]) for tensor, part in zip(found, parts, strict=True)]
    labels = label_dims(cases, row_bound=found[0].kind == Kind.LOSS) or ()
    return next((dim for dim, label in enumerate(labels) if label in _OF_ROWS), None)


def _apart(found: Sequence[GlobalTensor], why: str) -> BadRequest:
    microbatches = sorted({t.microbatch for t in found if t.microbatch is not None})
    ranks = sorted({t.ranks[0] for t in found})
    asked = [f"microbatch= (of {_some(microbatches)})"] if len(microbatches) > 1 else []
    asked += [f"rank= (of {_some(ranks)})"] if len(ranks) > 1 else []
    return BadRequest(
        f"{found[0]} is not one tensor",
        found=f"{len(found)} of their own, of ranks or microbatches, and {why}",
        remedy=f"say which: {' and '.join(asked) or 'iterate over boundaries()'}",
    )


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
