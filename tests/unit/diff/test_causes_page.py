"""The page of causes and the detectors know the same codes."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_code_has_its_section_and_every_section_its_code() -> None:
    page = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### (\S+)$", page, re.MULTILINE)
    source = "\n".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "diff" / "causes").glob("*.py")))
    families = "|".join(sorted({s.partition(".")[0] for s in sections}))
    codes = set(re.findall(rf'"((?:{families})\.[a-z_]+)"', source))
    assert set(sections) == codes
    assert len(sections) == len(set(sections))
