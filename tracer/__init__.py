"""Recording of training runs, and the traces that it leaves.

Importing this package imports neither torch nor numpy, so that a training program may do so anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensortrace.tracer.explicit import boundary
from tensortrace.tracer.in_process import record
from tensortrace.tracer.types import Box, Mesh, Placement, Shard

if TYPE_CHECKING:
    import os

    from tensortrace.diff.opened import OpenTrace

__all__ = ["Box", "Mesh", "Placement", "Shard", "boundary", "open", "record"]


def open(path: str | os.PathLike[str], *, layout: str | os.PathLike[str] | None = None) -> OpenTrace:
    """Open a recorded trace to look into its global tensors, none of which is read before it is asked for.

    ``layout`` is a layout file (docs/layouts.md), in the place of a recorded one.

    >>> from tensortrace import tracer
    >>> tracer.open("a").get("param", "head.bias", step="init").shape
    (23,)

    Raises a TraceError where there is no trace, or a damaged one.
    """
    from tensortrace.diff.opened import OpenTrace  # what puts tensors together; a training has no use for it

    return OpenTrace.open(path, layout=layout)
