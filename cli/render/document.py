"""Where a result in a file goes: one that is not overwritten unasked, or stdout alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import click

from tensortrace.tracer.errors import BadRequest

STDOUT = "-"


def refuse_existing(path: str | None, *, force: bool) -> None:
    """Raise BadRequest where the file exists and ``force`` was not given; call it before the work starts.

    Devices and pipes are written to as they are.
    """
    if path is None or path == STDOUT:
        return
    if Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise BadRequest(f"{path} cannot be written", expected="a file in a folder that exists")
    if not force and os.path.lexists(path) and not _is_stream(Path(path)):
        raise BadRequest(f"{path} exists", remedy="use another name, or --force to replace it")


class Document(Protocol):
    """What can be written as JSON."""

    def to_json(self) -> bytes:
        """Return JSON in UTF-8; raises UnicodeEncodeError for a text that cannot be."""


def write_document(record: Document, path: str) -> None:
    """Write a record as JSON and a newline, to stdout for ``-``; a file appears whole or not at all.

    Raises BadRequest where the file cannot be written.
    """
    try:
        document = record.to_json()
    except UnicodeEncodeError as error:
        raise BadRequest(
            "a path that is not UTF-8 cannot stand in JSON", found=ascii(error.object)
        ) from error
    _deliver(document, path)


def write_text(text: str, path: str) -> None:
    """Write a text as UTF-8, as ``write_document`` does; what cannot be encoded becomes ``?``."""
    _deliver(text.encode("utf-8", "replace"), path)


def _deliver(document: bytes, path: str) -> None:
    if path == STDOUT:
        click.echo(document)
        return
    try:
        _replace(Path(path), document + b"\n")
    except OSError as error:
        raise BadRequest(f"{path} cannot be written", found=error.strerror or str(error)) from error


def _replace(target: Path, data: bytes) -> None:
    if _is_stream(target):
        target.write_bytes(data)
        return
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as out:
            out.write(data)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()
