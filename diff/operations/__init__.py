"""The first divergent operation inside a module whose boundaries part: what ``--zoom`` is for."""

from __future__ import annotations

from tensortrace.diff.operations.explain import first_operation, where_to_look

__all__ = ["first_operation", "where_to_look"]
