"""An archive that no case of ours can be is refused in one line, and leaves nothing behind."""

from __future__ import annotations

import io
import json
import stat
import struct
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tensortrace.cli.main import run
from tensortrace.replay import archive as module
from tensortrace.replay import pack, replay_case
from tensortrace.replay.archive import unpack
from tensortrace.tracer.errors import DamagedTrace, TraceError, UnsupportedFormat
from tests.simulated import Program

Members = dict[str, bytes]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a case of a small program that agrees with what its own inputs give."""
    folder = tmp_path_factory.mktemp("archive")
    pack([Program(steps=1, rows=2).write(folder / "a")], folder / "case.zip")
    return folder / "case.zip"


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder in which temporary files may be made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def members(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def zipped(path: Path, found: Members) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in found.items():
            out.writestr(name, data)
    return path


def refused(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Replay what must be refused; return the one line that says why."""
    before = sorted(found for found in folder.parent.rglob("*"))
    assert run(["replay", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    assert line.startswith("trace: error: ")
    assert sorted(found for found in folder.parent.rglob("*")) == before
    return line


def named(name: str, data: bytes = b"x") -> Callable[[Members], Members]:
    return lambda found: found | {name: data}


@pytest.mark.parametrize(
    "name",
    [
        "../evil", "a/../../evil", "/etc/evil", "a/rank00000/../evil.json", "C:\\evil", "..\\evil",
        "a/rank00000/seg000000.safetensors.zst/x", "a/rank0/index.jsonl", "c/trace.json", "case.json/",
        "a/rank\u0660\u0660\u0660\u0660\u0660/index.jsonl", "a/rank00000/index.jsonl\n", "A/trace.json",
        "a//trace.json", "./case.json",
        "inner.zip", "a/rank00000/index.jsonl.part", "expect10.toml", "a", "a/rank00000/",
    ],
)  # fmt: skip
def test_a_member_of_another_name_is_refused(
    name: str, case: Path, tmp_path: Path, beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = zipped(tmp_path / "x.zip", named(name)(members(case)))
    assert "is none of a packed case" in refused(path, beside, capsys)


def test_two_names_of_one_file_and_one_name_twice_are_refused(case: Path, tmp_path: Path) -> None:
    found = members(case)
    zipped(tmp_path / "x.zip", found | {"a/rank000000/index.jsonl": b"x"})
    with pytest.raises(DamagedTrace, match="occurs twice"):
        replay_case(tmp_path / "x.zip")
    zipped(tmp_path / "y.zip", found)
    with zipfile.ZipFile(tmp_path / "y.zip", "a") as out, pytest.warns(UserWarning, match="Duplicate"):
        out.writestr("case.json", found["case.json"])
    with pytest.raises(DamagedTrace, match=r"'case\.json' occurs twice"):
        replay_case(tmp_path / "y.zip")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR])
def test_links_and_devices_are_refused(
    kind: int, case: Path, tmp_path: Path, beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as out:
        for name, data in members(case).items():
            info = zipfile.ZipInfo(name)
            if name == "a/trace.json":
                info.external_attr, data = (kind | 0o777) << 16, b"/etc/passwd"
            out.writestr(info, data)
    assert "'a/trace.json' is a link or no regular file" in refused(tmp_path / "x.zip", beside, capsys)


def test_an_encrypted_member_is_refused(case: Path, tmp_path: Path) -> None:
    data = bytearray(zipped(tmp_path / "x.zip", members(case)).read_bytes())
    for magic, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        data[data.index(magic) + flags] |= 1
    (tmp_path / "x.zip").write_bytes(data)
    with pytest.raises(DamagedTrace, match="is encrypted"):
        replay_case(tmp_path / "x.zip")


def test_a_bomb_is_refused_before_anything_is_written(
    case: Path, tmp_path: Path, beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = members(case) | {"a/rank00000/seg000001.safetensors.zst": bytes(8 << 20)}
    path = zipped(tmp_path / "x.zip", found)
    assert path.stat().st_size < 200_000
    assert "would grow from" in refused(path, beside, capsys)


def test_many_members_of_a_harmless_size_are_a_bomb_together(
    case: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 4 << 20)
    segments = {f"a/rank00000/seg{n:06d}.safetensors.zst": bytes(1 << 20) for n in range(1, 6)}
    zipped(tmp_path / "x.zip", members(case) | segments)
    with pytest.raises(DamagedTrace, match="its members would take"):
        unpack(tmp_path / "x.zip", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.zip"]


def test_members_that_share_their_bytes_are_refused(case: Path, tmp_path: Path) -> None:
    """A central directory with many entries of one member, as in a quoted bomb."""
    payload = zipped(tmp_path / "x.zip", members(case) | {"a/layout.toml": bytes(range(256)) * 4000})
    with zipfile.ZipFile(payload, "a") as out:
        [info] = [found for found in out.infolist() if found.filename == "a/layout.toml"]
        for number in range(40):
            twin = zipfile.ZipInfo(f"a/rank00000/seg{number + 10:06d}.safetensors.zst")
            for field in ("compress_type", "CRC", "compress_size", "file_size", "header_offset"):
                setattr(twin, field, getattr(info, field))
            out.filelist.append(twin)
            out.NameToInfo[twin.filename] = twin
        out._didModify = True  # type: ignore[attr-defined]
    with pytest.raises(DamagedTrace):
        replay_case(payload)


def test_a_zip_inside_is_refused(case: Path, tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as out:
        out.writestr("x", b"x")
    zipped(tmp_path / "x.zip", members(case) | {"a/layout.toml": inner.getvalue()})
    with pytest.raises(DamagedTrace, match="is a zip archive itself"):
        replay_case(tmp_path / "x.zip")


def test_a_flipped_bit_is_told_wherever_it_is(case: Path, tmp_path: Path) -> None:
    data = case.read_bytes()
    expected = replay_case(case).found
    for offset in range(0, len(data), 997):
        damaged = bytearray(data)
        damaged[offset] ^= 0x10
        (tmp_path / "x.zip").write_bytes(damaged)
        try:
            assert replay_case(tmp_path / "x.zip").found == expected  # a time, a comment, a version of zip
        except TraceError:
            continue


def test_a_truncated_archive_is_refused(
    case: Path, tmp_path: Path, beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = case.read_bytes()
    for length in (0, 1, 30, len(data) // 2, len(data) - 1):
        (tmp_path / "x.zip").write_bytes(data[:length])
        assert "not a readable zip archive" in refused(tmp_path / "x.zip", beside, capsys)


def test_a_member_that_is_shorter_or_longer_than_stated_is_refused(case: Path, tmp_path: Path) -> None:
    for change in (-1, 1, 1000):
        data = bytearray(zipped(tmp_path / "x.zip", members(case)).read_bytes())
        at = data.index(b"PK\x01\x02")
        size = struct.unpack_from("<I", data, at + 24)[0]
        struct.pack_into("<I", data, at + 24, size + change)
        (tmp_path / "x.zip").write_bytes(data)
        with pytest.raises(DamagedTrace):
            replay_case(tmp_path / "x.zip")


def stated(found: Members, **fields: object) -> Members:
    return found | {"case.json": json.dumps(json.loads(found["case.json"]) | fields).encode()}


def test_a_newer_format_is_refused_by_number(case: Path, tmp_path: Path) -> None:
    zipped(tmp_path / "x.zip", stated(members(case), format=7, news=True))
    with pytest.raises(UnsupportedFormat, match="found format 7, expected at most 1"):
        replay_case(tmp_path / "x.zip")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": "1"}, "format is 1"),
        ({"news": True}, "unknown field"),
        ({"of": "diff"}, "1 traces, expected two of a diff"),
        ({"asked": {"rules": 11}}, r"asked\.rules is 11"),
        ({"asked": {"rules": 1}}, "is missing"),
        ({"expected": {"verdict": 1}}, "str"),
    ],
)
def test_a_case_file_that_cannot_be_true_is_refused(
    case: Path, tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    zipped(tmp_path / "x.zip", stated(members(case), **fields))
    with pytest.raises(DamagedTrace, match=said):
        replay_case(tmp_path / "x.zip")


def test_what_is_no_case_at_all_is_refused(case: Path, tmp_path: Path) -> None:
    without = {name: data for name, data in members(case).items() if name != "case.json"}
    zipped(tmp_path / "x.zip", without)
    with pytest.raises(DamagedTrace, match=r"it has no case\.json"):
        replay_case(tmp_path / "x.zip")
    (tmp_path / "y.zip").write_bytes(b"not a zip")
    with pytest.raises(DamagedTrace, match="not a readable zip archive"):
        replay_case(tmp_path / "y.zip")
    with pytest.raises(TraceError, match="no such file"):
        replay_case(tmp_path / "z.zip")
    with pytest.raises(TraceError):
        replay_case(tmp_path)


def test_a_trace_that_is_damaged_inside_is_refused(
    case: Path, tmp_path: Path, beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = members(case)
    index = found["a/rank00000/index.jsonl"].replace(b'"step":0', b'"step":1', 1)
    found = stated(found | {"a/rank00000/index.jsonl": index}, members={})  # as before cases stated digests
    path = zipped(tmp_path / "x.zip", found)
    assert "checksum" in refused(path, beside, capsys)


def test_a_member_that_is_not_what_was_packed_is_named(
    case: Path, tmp_path: Path, beside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(sorted(members(case).keys() - {"README.md", "case.json"})):
        found = members(case)
        changed = zipped(tmp_path / f"{number}.zip", found | {name: found[name] + b"\n"})
        line = refused(changed, beside, capsys)
        assert f"{changed}: member '{name}' has been changed since it was packed" in line
        del found[name]
        assert "is missing" in refused(zipped(tmp_path / f"{number}-.zip", found), beside, capsys)
    more = members(case) | {"a/rank00000/seg000007.safetensors.zst": b""}
    assert "was not packed with it" in refused(zipped(tmp_path / "more.zip", more), beside, capsys)


def test_nothing_is_left_of_a_case_that_was_replayed(case: Path, beside: Path) -> None:
    assert replay_case(case)
    assert list(beside.iterdir()) == []


def test_equal_files_make_equal_archives(case: Path, tmp_path: Path) -> None:
    folder = tmp_path / "found"
    folder.mkdir()
    unpack(case, folder)
    module.write_archive(tmp_path / "again.zip", folder)
    assert (tmp_path / "again.zip").read_bytes() == case.read_bytes()
