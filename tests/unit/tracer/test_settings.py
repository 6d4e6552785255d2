"""Tests of the settings that the launcher hands to the ranks."""

from __future__ import annotations

import pytest

from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.selection import parse_promise
from tensortrace.tracer.settings import Settings, decode, encode, parse_size


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
