"""Finds the layout of a run from a run of the unpartitioned program, by content."""

from tensortrace.diff.infer.find import find_layout
from tensortrace.diff.infer.found import Found
from tensortrace.diff.infer.write import write_layout

__all__ = ["Found", "find_layout", "write_layout"]
