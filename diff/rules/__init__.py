"""Layout files: where the local tensors of a run lie in the tensors of the unpartitioned program."""

from tensortrace.diff.rules.run import RunLayout, View

__all__ = ["RunLayout", "View"]
