"""Where an export goes: a file or a folder that appears whole, and replaces nothing unasked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tensortrace.cli.render.document import STDOUT, refuse_existing
from tensortrace.tracer.errors import BadRequest

Ours = Callable[[str], bool]
"""Tells by its name whether a file in a folder is one that an export wrote."""


def refuse(path: Path, *, force: bool, ours: Ours | None) -> None:
    """Raise BadRequest where ``path`` cannot be written or exists unasked; call it before the work starts.

    ``ours`` makes it a folder: with ``force`` one is replaced that holds nothing else.
    """
    if str(path) == STDOUT:
        raise BadRequest("option -o", found="-", expected="a file or folder: this is nothing for a pipe")
    if ours is None:
        refuse_existing(str(path), force=force)
        if path.exists() and not path.is_file():
            raise BadRequest(f"{path} cannot be written", expected="a file")
        return
    if path.name in ("", "..") or not path.absolute().parent.is_dir():
        raise BadRequest(f"{path} cannot be written", expected="a folder to be made in one that exists")
    if not os.path.lexists(path):
        return
    if not force:
        raise BadRequest(f"{path} exists", remedy="use another name, or --force to replace it")
    if path.is_symlink() or not path.is_dir() or not all(ours(name) for name in os.listdir(path)):
        raise BadRequest(
            f"{path} cannot be replaced", found="other files than an export's", remedy="use another name"
        )


@contextmanager
def written(path: Path, *, folder: bool) -> Iterator[Path]:
    """Give the body a name to write to, beside ``path``, which it becomes when the body ends well.

    Raises BadRequest where the system refuses to write.
    """
    part = path.absolute().with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        if folder and path.is_dir():
            shutil.rmtree(path)
        part.replace(path)
    except OSError as error:
        raise BadRequest(f"{path} cannot be written", found=error.strerror or str(error)) from error
    finally:
        if folder:
            shutil.rmtree(part, ignore_errors=True)
        else:
            with suppress(OSError):
                part.unlink(missing_ok=True)
