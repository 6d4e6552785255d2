"""A common start: parameters, optimizer state and dropout masks that do not depend on the layout."""

from __future__ import annotations

from tensortrace.tracer.start.begin import install

__all__ = ["install"]
