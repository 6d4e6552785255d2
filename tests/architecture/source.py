"""The project's own source as syntax trees, with the imports of each module."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("tracer", "diff", "replay", "cli")
PREFIX = "tensortrace."


@dataclass(frozen=True)
class Module:
    """One file of the project; ``name`` leaves out ``tensortrace.`` and is dotted."""

    path: Path
    name: str

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=str(self.path))

    def imports(self) -> set[str]:
        """Return every module or name that is imported anywhere in the file, dotted."""
        return {name for node in ast.walk(self.tree) for name in _imported(node)}

    def imports_when_loaded(self) -> set[str]:
        """Return what is imported when the module is: not in functions, not for type checkers only."""
        return {name for node in _loaded(self.tree) for name in _imported(node)}

    def own_imports(self) -> set[str]:
        """Return the project's modules that this one imports, without ``tensortrace.``, itself excepted."""
        names = {name.removeprefix(PREFIX) for name in self.imports() if name.startswith(PREFIX)}
        return {target for name in names if (target := _existing(name)) and target != self.name}


def modules() -> list[Module]:
    """Return every module of the four packages; the injected folder is not a package."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [Module(path, _dotted(path)) for path in files if "__pycache__" not in path.parts]


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _existing(name: str) -> str | None:
    """Return the longest part of a dotted name that is a module of ours."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[:end])
    return None


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _loaded(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _loaded(child)
