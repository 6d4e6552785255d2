"""Where in the working folder a line of the program is: recordings know the file's name alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

_SOURCE = re.compile(r"([^/\\\0:]{1,200}\.\w{1,5}):([1-9][0-9]{0,6})(?: in .*)?")

AT_MOST = 20_000
"""Files that are looked at for one of a name; in a larger folder only its own files are found."""

_LEFT_OUT = {"node_modules", "site-packages", "__pycache__", "venv", "build", "dist"}


def finder(folder: Path, root: Path) -> Callable[[str], tuple[Path, int] | None]:
    """Return what finds a source such as ``train.py:12`` in a folder, as a path relative to ``root``.

    A file of that name in the folder itself is it, else the only one below; where there are several, none.
    """

    def find(source: str) -> tuple[Path, int] | None:
        parts = _SOURCE.fullmatch(source)
        file = _named(parts[1], folder) if parts else None
        if parts is None or file is None or not file.resolve().is_relative_to(root):
            return None
        return file.resolve().relative_to(root), int(parts[2])

    folder, root = folder.resolve(), root.resolve()
    return find


def _named(name: str, folder: Path) -> Path | None:
    if (folder / name).is_file():
        return folder / name
    found: list[Path] = []
    seen = 0
    for path, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".") and each not in _LEFT_OUT]
        seen += len(files)
        if seen > AT_MOST or len(found) > 1:
            return None
        found += [Path(path, name)] * (name in files)
    return found[0] if len(found) == 1 else None
