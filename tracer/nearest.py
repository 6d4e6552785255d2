"""What was meant by a word that names nothing: the nearest of those that do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

MOST = 20_000
"""Names that are looked at: of more the first ones."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that a mistyped word is nearest to, case aside; None where none is near."""
    import difflib  # trainers load this module, and seldom need it

    folded: dict[str, str] = {}
    for name in islice(names, MOST):
        folded.setdefault(name.lower(), name)
    found = difflib.get_close_matches(word.lower(), folded, 1)
    return folded[found[0]] if found else None


def nearest_to_glob(glob: str, names: Iterable[str]) -> str | None:
    """Return the name, or the module above some, that a glob which matches no name is nearest to."""
    above = {".".join(parts[:depth]) for parts in _split(names) for depth in range(1, len(parts) + 1)}
    return nearest(re.sub(r"[*?\[\]]", "", glob).strip("."), sorted(above))


def sibling(path: Path) -> Path | None:
    """Return the path beside one that doesn't exist which is nearest to it; None where none is near."""
    try:
        beside = sorted(each.name for each in path.parent.iterdir())
    except (OSError, ValueError):
        return None
    found = nearest(path.name, beside)
    return None if found is None or found == path.name else path.with_name(found)


def meant(found: str | Path | None) -> str:
    """Return the question that ends an error: ``did you mean param?``, or nothing where none is near.

    A name comes from a trace: what a terminal would obey is escaped.
    """
    return "" if found is None else f"did you mean {repr(str(found))[1:-1]}?"


def _split(names: Iterable[str]) -> Iterable[list[str]]:
    return (name.split(".") for name in islice(names, MOST))
