"""What the recipes show for other programs: workflows are YAML, and each ``trace`` in them is parsed."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.unit.docs import shown

BLOCKS = shown.BLOCK.findall((shown.ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"))
WORKFLOWS = [body for language, body in BLOCKS if language == "yaml"]
SCRIPTS = [body for language, body in BLOCKS if language == "bash"]


def commands(line: str) -> list[str]:
    """Return what follows ``trace`` in a line of a shell, up to a redirection or a quote that ends it."""
    return re.findall(r"\btrace ((?:record|watch|diff|show|replay|validate) .*?)(?:'|$| > )", line)


def parse(line: str) -> str:
    name, *words = shlex.split(line)
    shown.parse(name, words)
    return name


def test_the_scripts_for_clusters_record_with_options_that_exist() -> None:
    found = [parse(command) for body in SCRIPTS for line in body.splitlines() for command in commands(line)]
    assert found == ["record"] * 4


def test_the_workflows_are_yaml_with_commands_that_exist() -> None:
    yaml = pytest.importorskip("yaml")
    github, gitlab = (yaml.safe_load(body) for body in WORKFLOWS)
    runs = [step["run"] for step in github["jobs"]["same-as-base"]["steps"] if "run" in step]
    assert [parse(command) for line in runs for command in commands(line)] == ["validate"]
    script = gitlab["training"]["script"]
    assert [parse(command) for line in script for command in commands(line)] == ["record", "diff"]
    assert script[1].endswith(gitlab["training"]["artifacts"]["reports"]["junit"])
