"""Recording of training runs, and the traces that it leaves.

Importing this package imports neither torch nor numpy, so that a training program may do so anywhere.
"""

from tensortrace.tracer.explicit import boundary
from tensortrace.tracer.in_process import record
from tensortrace.tracer.types import Box, Mesh, Placement, Shard

__all__ = ["Box", "Mesh", "Placement", "Shard", "boundary", "record"]
