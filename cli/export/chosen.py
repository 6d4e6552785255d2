"""The tensors that an export selects, each under its key: read one by one, as they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tensortrace.cli.tensors import nothing_matches
from tensortrace.diff.logical import Unlabelled
from tensortrace.diff.opened import OpenTrace
from tensortrace.diff.tensors import GlobalTensor, RankTensor
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.manifest_safetensors import tensor_name
from tensortrace.tracer.request import Request
from tensortrace.tracer.types import Entry

LOCAL = "rank"
GLOBAL = "global"


class Chosen(NamedTuple):
    """One tensor to be written: ``dtype`` is torch's name of what is recorded, or float64 of a sum."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    tensor: GlobalTensor | RankTensor

    def read(self) -> np.ndarray:
        """Return the values, checked against their digests."""
        return self.tensor.read()


class Choice(NamedTuple):
    """What is written, and of how many tensors nothing can be, by reason."""

    tensors: list[Chosen]
    left_out: Counter[str]


def choose(trace: OpenTrace, request: Request, scope: str) -> Choice:
    """Return the tensors that a request selects: global ones, or those of each rank.

    Raises BadRequest where there are none that could be written.
    """
    found = _globals(trace, request) if scope == GLOBAL else _locals(trace, request)
    taken: set[str] = set()
    tensors, left_out = [], Counter[str]()
    for key, tensor in found:
        if why := _unreadable(tensor):
            left_out[why] += 1
            continue
        key = key if key not in taken else f"{key}#{len(taken)}"
        taken.add(key)
        dtype = tensor.dtype if isinstance(tensor, GlobalTensor) else tensor.entry.dtype
        tensors.append(Chosen(key, dtype, tensor.shape, tensor))
    if not tensors:
        raise nothing(trace, request, "; ".join(left_out)) if left_out else nothing(trace, request)
    return Choice(tensors, left_out)


def nothing(trace: OpenTrace, request: Request, found: str = "no boundary that matches") -> BadRequest:
    """Return the error for a selection that leaves nothing to write."""
    likely = nothing_matches(trace.trace, request)
    return BadRequest(f"nothing of {trace.path} to export", found=found, remedy=likely)


def _globals(trace: OpenTrace, request: Request) -> Iterator[tuple[str, GlobalTensor]]:
    """Yield global tensors; those that data-parallel ranks have each of their own under the lowest rank."""
    found = list(trace.wanted(request))
    names = [tensor_name(_entry(tensor)) for tensor in found]
    several = Counter(names)
    for name, tensor in zip(names, found, strict=True):
        yield (name if several[name] == 1 else f"{LOCAL}{tensor.ranks[0]}/{name}"), tensor


def _locals(trace: OpenTrace, request: Request) -> Iterator[tuple[str, RankTensor]]:
    for rank, entry in trace.recorded():
        if request.wants(rank.rank, entry):
            yield f"{LOCAL}{rank.rank}/{tensor_name(entry)}", RankTensor(rank.rank, entry, rank)


def _entry(tensor: GlobalTensor) -> Entry:
    return tensor.items[0].entry


def _unreadable(tensor: GlobalTensor | RankTensor) -> str:
    """Say why a tensor cannot be written; empty where it can."""
    if tensor.stored:
        return ""
    source = tensor.items[0].source if isinstance(tensor, GlobalTensor) else None
    if isinstance(source, Unlabelled):
        return "ranks hold parts of no known layout: give --layout FILE, or export them with --local"
    problem = getattr(source, "problem", None)
    entry = _entry(tensor) if isinstance(tensor, GlobalTensor) else tensor.entry
    if entry.blob is not None or entry.same_as is not None:
        return problem or "its bytes cannot be read; `trace check` says why"
    return problem or "values were not stored: digest, statistics or a sketch alone"
