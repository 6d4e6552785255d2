"""Recording of training runs, and the traces that it leaves.

Importing this package imports neither torch nor numpy, so that a training program may do so anywhere.
"""

from tensortrace.tracer.in_process import record

__all__ = ["record"]
