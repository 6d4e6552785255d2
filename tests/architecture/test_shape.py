"""Files, functions and words keep to the limits that CONTRIBUTING.md states."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess

import pytest

from tests.architecture.source import ROOT, Module, modules

FILE_LINES = 500
FUNCTION_LINES = 80
LONG_FUNCTION_LINES = 50
LONG_FUNCTIONS_SHARE = 0.02
MEDIAN_FUNCTION_LINES = 10

VAGUE_NAMES = {"utils", "util", "helpers", "helper", "manager", "process", "data", "misc", "common"}

PRIVATE = re.compile(
    "|".join([r"/wo" + "rk/", r"\.\./sha" + r"red", r"claud" + "e", r"anthropi" + "c"]), re.I
)
"""Paths of one machine and names that mean nothing to a stranger; spelt so that this file passes."""


def functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(module.tree) if isinstance(node, kinds)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def public(tree: ast.Module) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return public classes and functions of a module, and the public methods of its public classes."""
    found: list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = []
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        if isinstance(owner, ast.ClassDef) and owner.name.startswith("_"):
            continue
        for node in owner.body:
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and not node.name.startswith("_"):
                found.append(node)
    return found


def test_no_file_is_longer_than_five_hundred_lines() -> None:
    long = {m.name: n for m in modules() if (n := len(m.text.splitlines())) > FILE_LINES}
    assert long == {}


def test_no_function_is_longer_than_eighty_lines() -> None:
    long = {
        f"{m.name}:{f.name}": n for m in modules() for f in functions(m) if (n := length(f)) > FUNCTION_LINES
    }
    assert long == {}


def test_functions_are_short_as_a_rule() -> None:
    lengths = [length(function) for module in modules() for function in functions(module)]
    assert statistics.median(lengths) <= MEDIAN_FUNCTION_LINES
    assert sum(n > LONG_FUNCTION_LINES for n in lengths) <= LONG_FUNCTIONS_SHARE * len(lengths)


def test_every_module_states_its_purpose() -> None:
    missing = [m.name for m in modules() if m.text.strip() and not ast.get_docstring(m.tree)]
    assert missing == []


def test_everything_public_has_a_docstring() -> None:
    missing = [f"{m.name}:{node.name}" for m in modules() for node in public(m.tree) if not _documented(node)]
    assert missing == []


def _documented(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    overload = any("overload" in ast.unparse(mark) for mark in node.decorator_list)
    return bool(ast.get_docstring(node)) or overload


def test_every_function_is_annotated() -> None:
    missing = [f"{m.name}:{f.name}" for m in modules() for f in functions(m) if not _annotated(f)]
    assert missing == []


def _annotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    named += [star for star in (arguments.vararg, arguments.kwarg) if star]
    missing = [a for a in named if a.annotation is None and a.arg not in {"self", "cls"}]
    return function.returns is not None and not missing


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [m.name for m in modules() if m.path.stem in VAGUE_NAMES] == []


def test_only_the_command_line_prints() -> None:
    prints = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        if not module.name.startswith("cli")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "sys.stdout.write"}
    ]
    assert prints == []


def test_environment_variables_are_read_only_where_a_process_starts() -> None:
    readers = {
        module.name
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv"}
    }
    within = {name for name in readers if not name.startswith("cli")}
    assert within <= {"tracer.bootstrap", "tracer.in_process", "tracer.inject.sitecustomize"}


def test_no_pickle_is_ever_loaded() -> None:
    loads = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"torch.load", "pickle.load", "pickle.loads", "eval", "exec"}
        and module.name != "tracer.inject.sitecustomize"  # runs the sitecustomize that it stands before
    ]
    assert loads == []


def test_nothing_committed_names_a_private_place() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git work tree")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    texts = {path: path.read_bytes().decode("utf-8", errors="replace") for path in paths}
    assert [str(path) for path, text in texts.items() if PRIVATE.search(text)] == []
