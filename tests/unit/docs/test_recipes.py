"""The recipes that others run for us: workflows are YAML, and every `trace` in them and under srun is parsed."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from tests.unit.docs import shown

TEXT = (shown.ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = shown.BLOCK.findall(TEXT)
WORKFLOWS = [body for language, body in BLOCKS if language == "yaml"]
SCRIPTS = [body for language, body in BLOCKS if language == "bash"]


def parsed(text: str) -> list[str]:
    """Parse each ``trace`` command in a line of a shell as that command would; return their names."""
    names = []
    for command in re.findall(r"\btrace (?!record\b.*\btrace )(.*?)(?:'?\n|'?$| > )", text):
        name, *given = shlex.split(command)
        shown.command(name).make_context(f"trace {name}", given, parent=shown.parent())
        names.append(name)
    return names
