"""A live run that is given recorded values in place of its own: ``trace replay TRACE -- COMMAND``."""

from __future__ import annotations

from tensortrace.tracer.force.begin import install

__all__ = ["install"]
