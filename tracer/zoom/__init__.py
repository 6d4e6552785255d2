"""Every operation inside chosen modules, for a narrow window of steps: ``trace record --zoom``."""

from __future__ import annotations

from tensortrace.tracer.zoom.entering import install

__all__ = ["install"]
