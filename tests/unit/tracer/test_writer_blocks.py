"""A file that grows by blocks holds what was added, however it was written."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from tensortrace.tracer import writer_blocks
from tensortrace.tracer.writer_blocks import BLOCK_BYTES, BlockFile


def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_blocks, "_open_direct", lambda path: None)


def on_path(file: BlockFile, path: Path) -> bytes:
    return path.with_name(path.name + ".part").read_bytes()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("direct", [True, False])
def test_whatever_is_added_flushed_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, direct: bool
) -> None:
    monkeypatch.setattr(writer_blocks, "BLOCK_BYTES", 64 << 10)
    if not direct:
        no_direct(monkeypatch)
    draw = random.Random(seed)  # noqa: S311
    path = tmp_path / "file"
    file, model = BlockFile(path), bytearray()
    for _ in range(120):
        act = draw.random()
        if act < 0.6:
            size = draw.choice([1, 7, 100, 4096, 5000, 64 << 10, 70_000, 200_000])
            parts = [draw.randbytes(size), draw.randbytes(draw.randrange(40))]
            file.add(*parts)
            model += b"".join(parts)
        elif act < 0.8:
            file.flush()
            assert on_path(file, path) == model
        else:
            size = draw.randrange(len(model) + 1) if draw.random() < 0.5 else max(0, len(model) - 3000)
            file.rollback(size)
            del model[size:]
        assert file.size == len(model)
        assert on_path(file, path) == model[: file.written]
    file.finish()
    assert path.read_bytes() == model


def test_a_block_goes_past_the_page_cache_where_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = BlockFile(tmp_path / "file")
    if file._direct is None:
        pytest.skip("the file system of this folder is not one of those")
    written: list[tuple[bool, int]] = []
    real = os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        written.append((descriptor == file._direct, offset))
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    file.add(bytes(10))
    file.flush()
    file.add(bytes(2 * BLOCK_BYTES))
    file.finish()
    # the page that was flushed is completed plainly, then all is written directly, but for the last bytes
    assert written == [(False, 0), (False, 10), (True, 4096), (True, BLOCK_BYTES), (False, 2 * BLOCK_BYTES)]


def test_a_file_system_that_takes_no_direct_writes_gets_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    file = BlockFile(path)
    file._direct = file._direct or os.open(path.with_name("file.part"), os.O_WRONLY)
    direct, real = file._direct, os.pwrite

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if descriptor == direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = os.urandom(BLOCK_BYTES + 5)
    file.add(data)
    file.finish()
    assert path.read_bytes() == data


@pytest.mark.parametrize("direct", [True, False])
def test_a_full_disk_leaves_what_was_written_and_what_was_not_can_be_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        no_direct(monkeypatch)
    path = tmp_path / "file"
    file = BlockFile(path)
    data = os.urandom(BLOCK_BYTES + 1000)
    file.add(data)
    file.flush()
    real = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        file.add(bytes(BLOCK_BYTES))
    file.rollback(len(data) - 500)
    monkeypatch.setattr(os, "pwrite", real)
    file.add(b"end")
    file.finish()
    assert path.read_bytes() == data[:-500] + b"end"
