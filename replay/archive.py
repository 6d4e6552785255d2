"""The archive of a packed case: an ordinary zip whose members have fixed names, written and safely unpacked.

No name in an archive is ever used as a path: a name is matched against the few that there can be, and files
are written under names made here of the numbers in it.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import xxhash

from tensortrace.replay.case import MAX_RULES
from tensortrace.tracer import layout
from tensortrace.tracer.errors import BadRequest, DamagedTrace, TraceError

CASE, README = "case.json", "README.md"
SIDES = ("a", "b")
"""The folders of the traces, the reference first."""

MAX_ARCHIVE_BYTES = 1 << 30
MAX_UNPACKED_BYTES = 4 << 30
"""Of all members together."""

MAX_MEMBERS = 100_000
MAX_RATIO = 200
"""How much larger than its archive what is in it may be, beyond ``FREE_BYTES`` a member: segments begin with
zeros."""

FREE_BYTES = 1 << 20
_TEXT_BYTES = 64 << 20
_STEP_BYTES = 1 << 20

_MEMBER = re.compile(
    r"(?P<text>README\.md|case\.json)|expect(?P<rules>[0-9])\.toml|"
    r"(?P<side>[ab])/(?:(?P<top>trace\.json|layout\.toml)|"
    r"rank(?P<rank>[0-9]{5,7})(?:\.r(?P<attempt>[1-9][0-9]{0,5}))?/"
    r"(?:(?P<file>rank\.json|index\.jsonl)|seg(?P<segment>[0-9]{6,9})\.safetensors\.zst))",
    re.ASCII,
)
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, NotImplementedError,
    OverflowError, IndexError,
)  # fmt: skip
"""What ``zipfile`` may raise of a damaged archive."""


def rules_name(number: int) -> str:
    """Return the name of a file of rules (``--expect``) in an archive."""
    assert 0 <= number < MAX_RULES
    return f"expect{number}.toml"


def write_archive(path: Path, folder: Path, first: Sequence[str] = (README, CASE)) -> int:
    """Write all files of a folder into a new zip, those of ``first`` before the others; return its size.

    Equal files make equal archives. Raises FileExistsError, and OSError where it cannot be written.
    """
    names = sorted(found.relative_to(folder).as_posix() for found in folder.rglob("*") if found.is_file())
    names = [*(name for name in first if name in names), *(name for name in names if name not in first)]
    with open(path, "xb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for name in names:
            assert _MEMBER.fullmatch(name), name
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            out.writestr(info, (folder / name).read_bytes(), compresslevel=9)
    return path.stat().st_size


def unpack(path: Path, folder: Path) -> None:
    """Write the members of a case's archive into an empty folder, once all of it has been found harmless.

    Raises DamagedTrace, naming the member, for whatever no case of ours has: other names, links, encryption,
    members that are too large or do not have the size and the checksum that the archive states. BadRequest
    where there is no such file.
    """
    try:
        size = path.stat().st_size
        if not stat.S_ISREG(path.stat().st_mode):
            raise DamagedTrace(f"{path}: not a regular file")
        if size > MAX_ARCHIVE_BYTES:
            raise DamagedTrace(f"{path}: {size} bytes", expected=f"at most {MAX_ARCHIVE_BYTES}")
        with zipfile.ZipFile(path) as archive:
            for info, target in _members(path, archive, size):
                _write(path, archive, info, folder / target)
    except FileNotFoundError as error:
        raise BadRequest(f"{path}: no such file") from error
    except TraceError:
        raise
    except _UNREADABLE as error:
        raise DamagedTrace(f"{path}: not a readable zip archive: {_plain(error)}") from error


def digests(folder: Path) -> dict[str, str]:
    """Return the XXH3-128 of each file in a case's folder, but for the page and what states them."""
    names = sorted(found.relative_to(folder).as_posix() for found in folder.rglob("*") if found.is_file())
    return {name: _digest(folder / name) for name in names if name not in (README, CASE)}


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while part := file.read(_STEP_BYTES):
            hasher.update(part)
    return hasher.hexdigest()


def check_members(path: Path, folder: Path, stated: Mapping[str, str]) -> None:
    """Raise DamagedTrace, naming the member, unless what was unpacked is what was packed."""
    found = digests(folder)
    for name in sorted(stated.keys() | found.keys()):
        if name not in found:
            raise DamagedTrace(f"{path}: member {ascii(name)[:80]} is missing")
        if name not in stated:
            raise DamagedTrace(f"{path}: member {name!a} was not packed with it")
        if found[name] != stated[name]:
            raise DamagedTrace(
                f"{path}: member {name!a} has been changed since it was packed",
                found=found[name], expected=stated[name][:40],
            )  # fmt: skip


def _members(path: Path, archive: zipfile.ZipFile, size: int) -> list[tuple[zipfile.ZipInfo, Path]]:
    """Return the members and where each goes, relative to the folder; nothing has been unpacked yet."""
    infos = archive.infolist()
    if len(infos) > MAX_MEMBERS:
        raise DamagedTrace(f"{path}: {len(infos)} members", expected=f"at most {MAX_MEMBERS}")
    found: dict[Path, zipfile.ZipInfo] = {}
    for info in infos:
        target = _target(path, info)
        if target in found:
            raise DamagedTrace(f"{path}: member {_shown(info)} occurs twice")
        _check(path, info)
        found[target] = info
    total, allowed = sum(info.file_size for info in infos), MAX_RATIO * size + FREE_BYTES * len(infos)
    if total > min(MAX_UNPACKED_BYTES, allowed) or sum(info.compress_size for info in infos) > size:
        raise DamagedTrace(
            f"{path}: its members would take {total} bytes",
            expected=f"at most {min(MAX_UNPACKED_BYTES, allowed)} of an archive of {size}",
        )
    if Path(CASE) not in found:
        raise DamagedTrace(f"{path}: not a packed case: it has no {CASE}")
    return [(info, target) for target, info in found.items()]


def _target(path: Path, info: zipfile.ZipInfo) -> Path:
    """Return where a member goes: a path that is made here of the parts of a name that is known."""
    match = _MEMBER.fullmatch(info.filename)
    if match is None or info.filename != info.orig_filename:
        raise DamagedTrace(
            f"{path}: member {_shown(info)} is none of a packed case",
            remedy="a case holds README.md, case.json and the files of traces, as docs/pack.md lists them",
        )
    if match["text"]:
        return Path(README if match["text"] == README else CASE)
    if match["rules"]:
        return Path(rules_name(int(match["rules"])))
    side = Path(SIDES[SIDES.index(match["side"])])
    if match["top"]:
        return side / (layout.MANIFEST if match["top"] == layout.MANIFEST else layout.LAYOUT)
    inside = layout.rank_folder(side, int(match["rank"]), int(match["attempt"] or 0))
    if match["segment"]:
        return inside / layout.segment_name(int(match["segment"]))
    return inside / (layout.INDEX if match["file"] == layout.INDEX else layout.RANK_MANIFEST)


def _check(path: Path, info: zipfile.ZipInfo) -> None:
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind not in (0, stat.S_IFREG) or info.is_dir():
        raise DamagedTrace(f"{path}: member {_shown(info)} is a link or no regular file")
    if info.flag_bits & 0x1:
        raise DamagedTrace(f"{path}: member {_shown(info)} is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DamagedTrace(f"{path}: member {_shown(info)} is compressed by method {info.compress_type}")
    if info.filename in (README, CASE) and info.file_size > _TEXT_BYTES:
        raise DamagedTrace(f"{path}: member {_shown(info)} has {info.file_size} bytes")
    if info.file_size > FREE_BYTES + MAX_RATIO * info.compress_size:
        raise DamagedTrace(
            f"{path}: member {_shown(info)} would grow from {info.compress_size} to {info.file_size} bytes"
        )


def _write(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(target, flags, 0o600), "wb") as out:
        for number, part in enumerate(_parts(path, archive, info)):
            if number == 0 and part.startswith(b"PK\x03\x04"):
                raise DamagedTrace(f"{path}: member {_shown(info)} is a zip archive itself")
            out.write(part)


def _parts(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield a member's bytes: as many as stated, whose checksum is the stated one."""
    left = info.file_size
    with archive.open(info) as member:
        while part := member.read(min(_STEP_BYTES, left + 1)):
            left -= len(part)
            if left < 0:
                break
            yield part
    if left:
        raise DamagedTrace(f"{path}: member {_shown(info)} has not the {info.file_size} bytes that it states")


def _shown(info: zipfile.ZipInfo) -> str:
    return ascii(info.orig_filename[:80])


def _plain(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:200]


def sizes(path: Path) -> Mapping[str, int]:
    """Return what each member of an archive of our own takes in it."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename: info.compress_size for info in archive.infolist()}
