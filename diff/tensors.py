"""Global tensors of one opened trace: what ranks hold of a boundary, put together when it is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.logical import CELL_KINDS, Merged, Source, Together
from tensortrace.diff.result import StepLabel
from tensortrace.tracer.codec_dtypes import dtype_of
from tensortrace.tracer.safe import safe
from tensortrace.tracer.types import INIT_STEP, Entry, Kind, Shard, Stats

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, repr=False)
class RankTensor:
    """What one rank recorded of a global tensor: a part of it, or a copy."""

    rank: int
    entry: Entry
    _source: Source

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what the rank holds."""
        return self.entry.local_shape

    @property
    def shard(self) -> Shard | None:
        """Where it lies in the global tensor; None where nothing says so."""
        return self.entry.shard

    @property
    def stored(self) -> bool:
        """Whether its values can be read."""
        return self._source.stored(self.entry)

    def read(self) -> np.ndarray:
        """Return the rank's own values, as ``GlobalTensor.read`` does."""
        return self._source.read(self.entry)

    def __repr__(self) -> str:
        return f"<rank {self.rank}: {self.entry.dtype} {list(self.shape)}>"


@dataclass(frozen=True, repr=False)
class GlobalTensor:
    """One tensor of one boundary, whatever the number of ranks that hold it; nothing of it is read yet.

    Of inputs, activations, losses and local gradients every group of ranks that shares samples has its own.
    ``step`` counts from 0 or is ``init``; ``microbatch`` is None for what belongs to the whole step, and for
    passes without gradients, which ``eval_pass`` counts. ``items`` are what copies there are, of any rank.
    """

    step: StepLabel
    microbatch: int | None
    eval_pass: int | None
    key: Slot
    items: tuple[Item, ...]

    @property
    def kind(self) -> Kind:
        """The kind of boundary."""
        return self.key.kind

    @property
    def name(self) -> str:
        """The canonical name of module, parameter or function; comes from the trace and may hold anything."""
        return self.key.name

    @property
    def slot(self) -> str:
        """Which tensor of it."""
        return self.key.slot

    @property
    def call(self) -> int:
        """Which of several calls, from 0."""
        return self.key.call

    @property
    def dtype(self) -> str:
        """The dtype, by torch's name; of contributions that are reduced when it is read, the widest."""
        recorded = self._item.entry.dtype
        return _WIDEST[dtype_of(recorded).family] if self._summed else recorded

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._item.entry.local_shape

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that hold a part of it or a copy."""
        return tuple(sorted({rank for item in self.items for rank in item.ranks}))

    @property
    def stats(self) -> Stats | None:
        """Its statistics; None where only those of overlapping parts are known."""
        return self._item.entry.stats

    @property
    def norm(self) -> float | None:
        """The L2 norm over its finite elements, from the index; None where it is not known."""
        return self.stats.l2 if self.stats else None

    @property
    def digest(self) -> str:
        """A digest: equal ones of two tensors of a trace that lie alike mean equal bits."""
        return self._item.entry.digest

    @property
    def stored(self) -> bool:
        """Whether its values can be read."""
        return self._item.source.stored(self._item.entry)

    @property
    def copies_agree(self) -> bool:
        """Whether all ranks' copies hold the same bits."""
        odd = any(isinstance(item.source, Merged) and item.source.odd for item in self.items)
        return not odd and len({item.entry.digest for item in self.items}) == 1

    @property
    def parts(self) -> tuple[RankTensor, ...]:
        """What each rank holds, in order of rank."""
        found = (part for item in self.items for part in _parts(item))
        return tuple(sorted(found, key=lambda part: part.rank))

    def read(self) -> np.ndarray:
        """Return the whole tensor, checked against its digests; of copies the lowest rank's.

        bfloat16 and 8-bit floats come as float32, complex32 as complex64, exactly. Raises NotKept where no
        values were stored, Unplaceable where the ranks' parts make no tensor, DamagedTrace as files are.
        """
        return self._item.source.read(self._item.entry)

    def to_torch(self) -> torch.Tensor:
        """Return what ``read`` does as a tensor on the CPU, in the dtype that was recorded."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.from_numpy(np.array(self.read())).to(dtype)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Let numpy read it: ``np.asarray(tensor)``."""
        return np.asarray(self.read(), dtype=dtype)

    def __repr__(self) -> str:
        ranks = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks[:8]))}"
        more = ", …" if len(self.ranks) > 8 else ""
        return f"<{self}: {self.dtype} {list(self.shape)}, {ranks}{more}>"

    def __str__(self) -> str:
        number = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        if self.eval_pass is not None:
            number = f", pass {self.eval_pass} without gradients"
        call = f" call {self.call}" if self.call else ""
        return f"step {self.step}{number}: {self.kind} {safe(self.name)} {safe(self.slot)}{call}"

    @property
    def _item(self) -> Item:
        return self.items[0]

    @property
    def _summed(self) -> bool:
        source = self._item.source
        return isinstance(source, Merged) and any(part.partial_shape for part in source.parts)


@dataclass(frozen=True, repr=False)
class OverSteps(Mapping[StepLabel, np.ndarray]):
    """One boundary over the steps in which it was recorded: its tensors by step, each read when asked for."""

    key: str
    steps: tuple[StepLabel, ...]
    _get: Callable[[StepLabel], np.ndarray]
    _tensors: Callable[[], Iterator[GlobalTensor]]

    def __getitem__(self, step: StepLabel) -> np.ndarray:
        return self._get(step)

    def __iter__(self) -> Iterator[StepLabel]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def tensors(self) -> tuple[GlobalTensor, ...]:
        """The tensors themselves, unread: of every microbatch and data cell."""
        return tuple(self._tensors())

    def __repr__(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        return f"<{self.key}: {len(self)} step{'s' * (len(self) > 1)}, {first} to {last}>"


_WIDEST = {"float": "float64", "complex": "complex128", "int": "int64", "bool": "int64"}
"""In which dtypes contributions of several ranks are reduced."""


def global_tensors(step: int, slot: Slot, items: Iterable[Item]) -> list[GlobalTensor]:
    """Return the tensors of a boundary in a step: one for each data cell and pass, or one with its copies."""
    held: dict[tuple[int, int, int], list[Item]] = defaultdict(list)
    for item in sorted(items, key=lambda i: i.source.rank):
        microbatch = _NONE if item.entry.microbatch is None else item.entry.microbatch
        eval_pass = item.part.number if item.part and item.part.phase == "eval" else _NONE
        held[microbatch, eval_pass, item.cell if slot.kind in CELL_KINDS else _NONE].append(item)
    label: StepLabel = "init" if step == INIT_STEP else step
    return [
        GlobalTensor(label, _number(microbatch), _number(eval_pass), slot, tuple(found))
        for (microbatch, eval_pass, _), found in sorted(held.items())
    ]


_NONE = -1


def _number(found: int) -> int | None:
    return None if found == _NONE else found


def _parts(item: Item) -> list[RankTensor]:
    if isinstance(item.source, Together):
        return [RankTensor(m.rank, m.entry, m.source) for m in item.source.members]
    return [RankTensor(item.source.rank, item.entry, item.source)]
