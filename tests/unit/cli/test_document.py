"""JSON results go where they were asked to go and replace nothing unasked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tensortrace.cli.render.document import refuse_existing, write_document
from tensortrace.tracer.errors import BadRequest


class Empty:
    def to_json(self) -> bytes:
        return b"{}"


EMPTY = Empty()


def test_a_file_that_exists_is_refused_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("mine")
    with pytest.raises(BadRequest, match="--force"):
        refuse_existing(str(path), force=False)
    refuse_existing(str(path), force=True)


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadRequest, match="exists"):
        refuse_existing(str(path), force=False)


def test_a_folder_that_does_not_exist_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="folder that exists"):
        refuse_existing(str(tmp_path / "no" / "r.json"), force=True)


def test_stdout_and_devices_are_never_refused() -> None:
    refuse_existing("-", force=False)
    refuse_existing(os.devnull, force=False)
    refuse_existing(None, force=False)


def test_a_document_is_written_whole_with_a_newline_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("an older and longer document")
    write_document(EMPTY, str(path))
    assert path.read_bytes() == b"{}\n"
    assert os.listdir(tmp_path) == ["r.json"]


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_document(EMPTY, str(tmp_path / "r.json"))
    assert (tmp_path / "r.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_document(EMPTY, os.devnull)
    assert Path(os.devnull).is_char_device()


def test_a_failed_write_is_one_error_and_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with pytest.raises(BadRequest, match="cannot be written"):
        write_document(EMPTY, str(tmp_path / "d"))
    assert os.listdir(tmp_path) == ["d"]
