"""Makes a run import the commit that it runs, where the user's checkout is installed in place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_PROBE = """
import json, sys
found = [entry for entry in sys.path if entry]
for finder in sys.meta_path:
    module = sys.modules.get(getattr(finder, "__module__", None) or type(finder).__module__)
    mapping = getattr(module, "MAPPING", None)
    if isinstance(mapping, dict):
        found += [str(path).rpartition("/")[0] for path in mapping.values()]
print(json.dumps(found))
"""
"""Prints the folders that modules come from, those of editable installs with finders of their own too."""

_WAIT_S = 60.0


def environment(command: Sequence[str], environ: Mapping[str, str], root: Path, tree: Path) -> dict[str, str]:
    """Return the environment in which modules of the checkout at ``root`` come from ``tree`` instead.

    What PYTHONPATH or an editable install takes from the checkout is put first on PYTHONPATH, as the other
    tree has it.
    """
    interpreter = _interpreter(command, environ)
    listed = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    imported = _imported(interpreter, environ) if interpreter else []
    moved = [place for entry in imported if (place := _moved(entry, root, tree))]
    kept = [_moved(entry, root, tree) or entry for entry in listed]
    path = os.pathsep.join(dict.fromkeys([*moved, *kept]))
    return dict(environ) | ({"PYTHONPATH": path} if path else {}) | {"PWD": str(tree)}


def _moved(entry: str, root: Path, tree: Path) -> str | None:
    place = Path(entry).resolve()
    own = root.resolve()
    if not place.is_relative_to(own) or "site-packages" in place.parts:
        return None  # an environment inside of the checkout holds other people's packages
    inside = place.relative_to(own)
    return str(tree / inside) if (tree / inside).is_dir() else None


def _interpreter(command: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the Python that a command runs, as far as its first word tells; else the one on the path."""
    search = environ.get("PATH")
    first = shutil.which(command[0], path=search)
    if first and Path(command[0]).name.startswith("python"):
        return first
    if first:
        with open(first, "rb") as script:
            line = script.readline(4096)
        words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
        if words and Path(words[0]).name.startswith("python"):
            return words[0]
    return shutil.which("python", path=search) or shutil.which("python3", path=search)


def _imported(interpreter: str, environ: Mapping[str, str]) -> list[str]:
    try:
        done = subprocess.run(  # noqa: S603  # the user's own interpreter
            [interpreter, "-c", _PROBE], cwd=os.sep, env=dict(environ), capture_output=True, text=True,
            check=True, timeout=_WAIT_S,
        )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []
    return [entry for entry in found if isinstance(entry, str)]
