"""The page of causes and the detectors know the same codes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_code_has_its_section_and_every_section_its_code() -> None:
    page = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### (\S+)$", page, re.MULTILINE)
    source = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "diff" / "causes").glob("*.py")))
    codes = {code for code in re.findall(r'"([a-z]+\.[a-z_]+)"', source)}
    assert set(sections) == codes
    assert len(sections) == len(set(sections))


def test_every_section_shows_an_example_and_says_what_usually_causes_it_and_what_to_do_next() -> None:
    page = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")
    for found in re.finditer(r"^### (\S+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL):
        parts = ("> ", "**Looks like**: ", "**Usually**: ", "**Next**: ")
        lines = found[2].splitlines()
        lacking = [part for part in parts if not any(line.startswith(part) for line in lines)]
        assert not lacking, f"{found[1]} lacks {lacking}"
