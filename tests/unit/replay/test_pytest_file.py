"""The test that is written of a case holds what the case states as values, whatever that is."""

from __future__ import annotations

import ast
from pathlib import Path

from tensortrace.replay.case import Case, Expected, Place
from tensortrace.replay.pytest_file import pytest_file

HOSTILE = "'''\"\"\"\\\n\r\0\u2028{x}\nimport os; os.abort()\n#"


def test_nothing_in_a_case_becomes_code() -> None:
    place = Place("init", None, HOSTILE, HOSTILE, HOSTILE, 0)
    case = Case(format=1, of="diff", expected=Expected(HOSTILE, HOSTILE, place, (HOSTILE,)))
    tree = ast.parse(pytest_file(case, Path("a' b\".zip"), Path("test.py")))
    kinds = [type(node).__name__ for node in tree.body]
    assert kinds == ["Expr", "ImportFrom", "ImportFrom", "Assign", "FunctionDef"]
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [type(node).__name__ for node in function.body] == [
        "Assign",
        "Assert",
        "Assign",
        "Assert",
        "Assert",
    ]
    constants = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
    assert constants.count(HOSTILE) == 5  # verdict, kind, name, slot and cause
    assert function.name == "test_a__b_"
