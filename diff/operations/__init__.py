"""The first divergent operation inside a module whose boundaries part: what ``--zoom`` is for."""

from __future__ import annotations

from tensortrace.diff.operations.explain import Looked, first_operation, where_to_look

__all__ = ["Looked", "first_operation", "where_to_look"]
