"""Tests of the settings that the launcher hands to the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.options import parse_start
from tensortrace.tracer.selection import parse_promise
from tensortrace.tracer.settings import Settings, Start, decode, encode, parse_size


def test_settings_survive_the_environment_variable() -> None:
    settings = Settings(
        root="/a b/c", promise=parse_promise(steps="0-3", kinds="loss"), on_pressure="drop", max_bytes=7
    )
    assert decode(encode(settings)) == settings


def test_settings_of_another_version_are_refused_by_name() -> None:
    with pytest.raises(BadRequest, match="TENSORTRACE_RECORD"):
        decode('{"root": "/a", "unheard_of": 1}')


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("17", 17),
        ("1KiB", 1024),
        ("1.5G", 3 << 29),
        ("2GB", 2 * 10**9),
        ("512 MiB", 512 << 20),
        ("0", 0),
        ("8b", 8),
    ],
)
def test_sizes_are_binary_unless_they_end_in_plain_b(text: str, size: int) -> None:
    assert parse_size(text, option="--buffer") == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1 potato", "1e3", "GB"])
def test_a_malformed_size_names_its_option(text: str) -> None:
    with pytest.raises(BadRequest, match="--buffer"):
        parse_size(text, option="--buffer")


NOT_ASKED: dict[str, object] = {
    "init_from": None, "init_seed": None, "dropout_seed": None,
    "adversarial": False, "eager_attention": False, "pad_id": None,
}  # fmt: skip


def asked(**options: object) -> Start:
    return parse_start(**NOT_ASKED | options)  # type: ignore[arg-type]


def test_nothing_asked_is_an_ordinary_start() -> None:
    assert asked() == Start()
    assert asked().options() == {}


def test_adversarial_implies_a_consistent_init_and_keeps_its_seed() -> None:
    assert asked(adversarial=True).options() == {"consistent-init": "0", "adversarial": "True"}
    assert asked(adversarial=True, init_seed=3).init_seed == 3


@pytest.mark.parametrize("other", [{"init_seed": 0}, {"adversarial": True}])
def test_parameters_are_set_in_one_way(tmp_path: Path, other: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match="--init-from"):
        asked(init_from=tmp_path, **other)


def test_eager_attention_belongs_to_consistent_dropout() -> None:
    assert asked(eager_attention=True, dropout_seed=0).eager_attention
    with pytest.raises(BadRequest, match="--eager-attention"):
        asked(eager_attention=True)


def test_a_trace_to_begin_from_must_be_there(tmp_path: Path) -> None:
    assert asked(init_from=tmp_path).init_from == str(tmp_path)
    with pytest.raises(BadRequest, match="no such folder"):
        asked(init_from=tmp_path / "a")
