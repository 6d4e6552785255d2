"""What makes strings from traces safe to print, under the name by which the command line knows it."""

from tensortrace.tracer.safe import ELLIPSIS, REPLACEMENT, safe

__all__ = ["ELLIPSIS", "REPLACEMENT", "safe"]
