"""Layout files: where the local tensors of a run lie in the tensors of the unpartitioned program."""

from tensortrace.tracer.rules.document import LayoutFileError, read_text
from tensortrace.tracer.rules.portions import Portion, portions
from tensortrace.tracer.rules.run import RunLayout, View

__all__ = ["LayoutFileError", "Portion", "RunLayout", "View", "portions", "read_text"]
