"""All cases of the zoo: what its files of bugs and of legal pairs list."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tests.zoo.case import Bug, Legal

HERE = Path(__file__).parent


def bugs(globs: Sequence[str] = ()) -> list[Bug]:
    """Return the planted mistakes whose names match one of the globs; those of ``BUGS`` in ``bugs*.py``."""
    return [
        case for case in _listed("bugs*.py", "BUGS") if isinstance(case, Bug) and wanted(case.name, globs)
    ]


def legal_pairs(globs: Sequence[str] = ()) -> list[Legal]:
    """Return the legal pairs whose names match one of the globs; those of ``LEGAL`` in ``legal*.py``."""
    found = _listed("legal*.py", "LEGAL")
    return [case for case in found if isinstance(case, Legal) and wanted(case.name, globs)]


def wanted(name: str, globs: Sequence[str]) -> bool:
    return not globs or any(fnmatchcase(name, glob) for glob in globs)


def _listed(files: str, variable: str) -> Iterator[object]:
    seen: set[str] = set()
    for path in sorted(HERE.glob(files)):
        module = importlib.import_module(f"tests.zoo.{path.stem}")
        for case in getattr(module, variable, ()):
            assert case.name not in seen, f"two cases are called {case.name}"
            seen.add(case.name)
            yield case
