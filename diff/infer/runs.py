"""The two runs that inference reads: whole tensors of one, local ones of the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import INIT_STEP, Entry, Kind

Slot = tuple[Kind, str, str]
"""Kind, name and slot."""

LOOKED_AT = (Kind.INPUT, Kind.ACTIVATION, Kind.LOSS, Kind.ACTIVATION_GRAD)


@dataclass
class Recorded:
    """What one rank recorded that layouts are found from.

    ``params`` at init by name, ``later`` after the first step, ``passes`` the first call of each boundary by
    microbatch of the first step, ``grads`` each parameter's own sum of the gradient over the first step.
    """

    source: RankTrace
    params: dict[str, Entry] = field(default_factory=dict)
    later: dict[str, Entry] = field(default_factory=dict)
    grads: dict[str, Entry] = field(default_factory=dict)
    passes: dict[int, dict[Slot, Entry]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.source.rank

    def read(self, entry: Entry) -> np.ndarray:
        """Return a tensor of this rank."""
        return self.source.read(entry)


def recorded(trace: Trace, side: str) -> list[Recorded]:
    """Return what each rank of a trace recorded at init and in its first step.

    Raises BadRequest where the trace has no parameters at init.
    """
    found = [_of_rank(rank) for rank in trace.ranks]
    if not all(own.params for own in found):
        raise BadRequest(
            f"trace {side} ({trace.path}) holds no parameters at init",
            remedy="record the first step too: layouts are found by the content of what training starts from",
        )
    return found


def whole_params(runs: Iterable[Recorded]) -> dict[str, tuple[Recorded, Entry]]:
    """Return the reference's parameters, each from the first rank that has it.

    Raises BadRequest where ranks hold different tensors of one name: the reference must be whole.
    """
    found: dict[str, tuple[Recorded, Entry]] = {}
    for own in runs:
        for name, entry in own.params.items():
            other = found.setdefault(name, (own, entry))
            if other[1].digest != entry.digest:
                raise BadRequest(
                    f"trace a: ranks {other[0].rank} and {own.rank} hold different tensors of {name} at init",
                    expected="whole tensors", remedy="record the program on one rank as a",
                )  # fmt: skip
    return found


def _of_rank(rank: RankTrace) -> Recorded:
    own = Recorded(rank)
    steps = [entry.step for entry in rank.entries if entry.step != INIT_STEP]
    first = min(steps, default=INIT_STEP)
    for entry in rank.entries:
        if entry.recompute or not rank.stored(entry):
            continue
        if entry.kind == Kind.PARAM and entry.slot == "model":
            if entry.step == INIT_STEP:
                own.params.setdefault(entry.name, entry)
            elif entry.step == first:
                own.later.setdefault(entry.name, entry)
        elif entry.step != first:
            continue
        elif entry.kind == Kind.LOCAL_GRAD and entry.microbatch is None and entry.slot == "grad":
            own.grads.setdefault(entry.name, entry)
        elif entry.kind in LOOKED_AT and entry.microbatch is not None:
            own.passes[entry.microbatch].setdefault((entry.kind, entry.name, entry.slot), entry)
    return own
