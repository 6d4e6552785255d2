"""Compare two traces: reassemble global tensors, judge each boundary, name the first divergence."""

from tensortrace.diff.engine import CompareOptions, compare
from tensortrace.diff.result import Result

__all__ = ["CompareOptions", "Result", "compare"]
