"""Boundaries that one run lacks although it promised them."""

from __future__ import annotations

from collections.abc import Sequence

from tensortrace.diff.causes.case import Case, Proposal, told


def missing(case: Case) -> Sequence[Proposal]:
    """Propose that something happened in one run only; what that is a finer detector may know."""
    found = case.one_sided
    if found is None:
        return ()
    lacking = "b" if found.side == "a" else "a"
    alike = (o for o in case.siblings if getattr(o.comparison, "side", None) == found.side)
    names = sorted({found.slot.name, *(o.node.slot.name for o in alike)})
    text = f"{found.reason}; {lacking} has no {found.slot.kind} {found.slot.slot} of {_shown(names)}"
    return (told("boundary.missing", text, len(names), "boundaries that only one run has", simplicity=9),)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
