"""``docs/json.md`` describes every field that is written, and nothing is written that it does not."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tensortrace.cli import contents, tensors
from tensortrace.diff import result

PAGE = (Path(__file__).parents[3] / "docs" / "json.md").read_text()
DIFF, SHOW = PAGE.split("## `tensortrace.show/1`")


def described(section: str) -> set[str]:
    """Return every name in backquotes."""
    return set(re.findall(r"`([a-z_0-9]+)`", section))


def records(module: object) -> list[type[msgspec.Struct]]:
    return [
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
    ]  # type: ignore[attr-defined]


@pytest.mark.parametrize("record", records(result), ids=lambda record: record.__name__)
def test_every_field_of_a_diff_is_described(record: type[msgspec.Struct]) -> None:
    # `where` is not written: its fields stand in the finding
    assert set(record.__struct_fields__) - {"where"} <= described(DIFF)


@pytest.mark.parametrize(
    "record", [*records(contents), tensors.Document, tensors.TensorRow, tensors.Producer],
    ids=lambda record: record.__name__,
)  # fmt: skip
def test_every_field_of_show_is_described(record: type[msgspec.Struct]) -> None:
    assert set(record.__struct_fields__) <= described(SHOW)


def test_the_page_names_the_schemas_that_are_written() -> None:
    assert f"`{result.SCHEMA}`" in DIFF
    assert f"`{contents.SCHEMA}`" in SHOW or contents.SCHEMA in PAGE


@pytest.mark.parametrize("section", re.findall(r"\n\*\*(\w+)\*\*[^\n]*\n\n(\|.*?)\n\n", DIFF + "\n\n", re.S))
def test_every_field_on_the_page_exists(section: tuple[str, str]) -> None:
    title, table = section
    owner = getattr(result, title.capitalize())
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    fields = set(re.findall(r"`(\w+)`", " ".join(rows)))
    flattened = {"rel_l2"} if title == "finding" else set()
    assert fields - flattened <= set(owner.__struct_fields__)
