"""Index lines and manifests to bytes and back; what is read is checked before it is used."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from tensortrace.tracer import layout
from tensortrace.tracer.errors import DamagedTrace, TraceError, UnsupportedFormat
from tensortrace.tracer.manifest_checks import BadField, check_entry, check_manifest, check_rank_manifest
from tensortrace.tracer.manifest_files import read_capped
from tensortrace.tracer.manifest_json import BadJson, parse_object, to_record
from tensortrace.tracer.types import Entry, Manifest, RankManifest

MAX_LINE_BYTES = 16 << 20
"""The longest index line, checksum and newline included."""

MAX_MANIFEST_BYTES = 64 << 20
"""The longest ``rank.json`` or ``trace.json``."""

_M = TypeVar("_M", RankManifest, Manifest)
_encoder = msgspec.json.Encoder()
_entries = msgspec.json.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    """Return an index line: JSON, a tab, xxh3-64 of the JSON in hex, a newline.

    Raises TraceError if no reader would accept it.
    """
    try:
        check_entry(entry)
        text = _encoder.encode(entry)
    except (BadField, UnicodeEncodeError) as error:
        raise TraceError(f"event {entry.event} cannot be written: {error}") from error
    line = b"%b\t%b\n" % (text, xxhash.xxh3_64_hexdigest(text).encode())
    if len(line) > MAX_LINE_BYTES:
        raise TraceError(f"event {entry.event} cannot be written: its line has {len(line)} bytes")
    return line


def decode_entry(line: bytes, *, where: str, ignorable: tuple[str, ...] = ()) -> Entry:
    """Return the entry of an index line, which ends with its newline.

    ``where`` names file and offset for the error. ``ignorable`` are keys that the rank's manifest lists
    as such. Raises DamagedTrace if the line is torn, altered or cannot be true.
    """
    if len(line) > MAX_LINE_BYTES:
        raise DamagedTrace(f"{where}: index line of more than {MAX_LINE_BYTES} bytes")
    text, tab, checksum = line.rpartition(b"\t")
    if not tab or checksum != xxhash.xxh3_64_hexdigest(text).encode() + b"\n":
        raise DamagedTrace(f"{where}: index line with a wrong checksum", remedy=_SALVAGE)
    try:
        entry = _parse_entry(text, ignorable)
        check_entry(entry)
    except (BadJson, BadField) as error:
        raise DamagedTrace(f"{where}: index line is not valid: {error}") from error
    return entry


_SALVAGE = "`trace check` lists what is damaged"


def _parse_entry(text: bytes, ignorable: tuple[str, ...]) -> Entry:
    try:
        entry = _entries.decode(text)
        if _encoder.encode(entry) == text:  # our own writer's form: nothing twice, nothing unknown
            return entry
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, UnicodeEncodeError):
        pass  # the strict parse below says what is wrong
    return to_record(parse_object(text), Entry, ignorable)


def read_rank_manifest(path: Path) -> RankManifest:
    """Return the ``rank.json`` at a path.

    Raises FileNotFoundError, DamagedTrace naming the field, or UnsupportedFormat.
    """
    return _read(path, RankManifest, check_rank_manifest)


def read_manifest(path: Path) -> Manifest:
    """Return the ``trace.json`` at a path.

    Raises FileNotFoundError, DamagedTrace naming the field, or UnsupportedFormat.
    """
    return _read(path, Manifest, check_manifest)


def _read(path: Path, record: type[_M], check: Callable[[_M], None]) -> _M:
    text = read_capped(path, MAX_MANIFEST_BYTES)
    try:
        found = parse_object(text)
        _check_format(path, found)
        manifest = to_record(found, record, _ignorable(found))
        check(manifest)
    except (BadJson, BadField) as error:
        raise DamagedTrace(f"{path}: {error}") from error
    return manifest


def _check_format(path: Path, found: dict[str, object]) -> None:
    """Refuse a newer format before anything else is looked at, since the rest may have changed."""
    version = found.get("format")
    if type(version) is not int or version < 1:
        raise DamagedTrace(f"{path}: format is {str(version)[:40]}", expected=f"1 to {layout.NEWEST}")
    if version > layout.NEWEST:
        raise UnsupportedFormat(
            f"{path}: trace of a newer format",
            found=f"format {version}",
            expected=f"at most {layout.NEWEST}",
            remedy="read it with a newer tensortrace",
        )


def _ignorable(found: dict[str, object]) -> tuple[str, ...]:
    listed = found.get("ignorable", [])
    return tuple(str(key) for key in listed) if isinstance(listed, list) else ()


def write_manifest_new(path: Path, manifest: Manifest) -> None:
    """Write ``trace.json`` where there is none yet; raise FileExistsError if there is."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, 0o644), "wb") as file:
        file.write(_pretty(manifest))


def finish_manifest(path: Path, manifest: Manifest) -> None:
    """Replace ``trace.json`` by its final form, atomically."""
    replace_manifest(path, manifest)


def replace_manifest(path: Path, manifest: Manifest | RankManifest) -> None:
    """Write a manifest so that a reader sees either the whole old one or the whole new one."""
    part = path.with_name(path.name + layout.PART)
    part.write_bytes(_pretty(manifest))
    os.replace(part, path)


def _pretty(manifest: Manifest | RankManifest) -> bytes:
    return msgspec.json.format(_encoder.encode(manifest), indent=1) + b"\n"
