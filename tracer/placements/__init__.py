"""Knows how wrappers lay tensors out over ranks; one file per wrapper, one list of them."""

from __future__ import annotations

from tensortrace.tracer.placements.base import Layout, Wrapper
from tensortrace.tracer.placements.ddp import DDP
from tensortrace.tracer.placements.dtensor import Spec, is_dtensor, local_part, spec_of, split

WRAPPERS: tuple[Wrapper, ...] = (DDP(),)
"""Every wrapper whose layout is known. A new one is a new file and an entry here."""

__all__ = ["WRAPPERS", "Layout", "Spec", "Wrapper", "is_dtensor", "local_part", "spec_of", "split"]
