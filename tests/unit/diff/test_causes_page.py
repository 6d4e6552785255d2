"""The page of causes and the detectors know the same codes, and each has an output of a real run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
CODE = re.compile(r'"([a-z]+\.[a-z_]+)"')
EXAMPLE = re.compile(r"\A<!-- output of: zoo \S+ -->\n```text\n(DIVERGENT at .*?)```\n", re.DOTALL)


def test_every_code_has_its_section_and_every_section_its_code() -> None:
    source = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "diff" / "causes").glob("*.py")))
    assert set(SECTIONS) == set(CODE.findall(source))
    assert len(SECTIONS) == len(re.findall(r"^### ", PAGE, re.MULTILINE))


def test_every_section_is_linked_at_the_top() -> None:
    families = {code.partition(".")[0] for code in SECTIONS}
    assert families == set(re.findall(r"^## (\S+)$", PAGE, re.MULTILINE))
    assert families == set(re.findall(r"\[\w+\]\(#(\w+)\)", PAGE))


@pytest.mark.parametrize("code", SECTIONS)
def test_every_section_shows_a_generated_output_that_names_its_code(code: str) -> None:
    example = EXAMPLE.match(SECTIONS[code])
    assert example, "mark it, and run python -m docs.generate --missing"
    assert f"\ncause {code}:" in example[1]


@pytest.mark.parametrize("code", SECTIONS)
def test_every_section_says_what_it_looks_like_what_causes_it_and_what_to_do_next(code: str) -> None:
    lines = SECTIONS[code].splitlines()
    parts = ("**Looks like**: ", "**Usually**: ", "**Next**: ")
    assert [part for part in parts if not any(line.startswith(part) for line in lines)] == []
