"""Imports run down the straight line, never up, sideways or in a circle."""

from __future__ import annotations

import sys
import tomllib

import pytest

from tests.architecture.source import PACKAGES, ROOT, Module, modules

LAYERS = """
    tracer.errors
  < tracer.types
  < tracer.explicit | tracer.alive | tracer.safe | tracer.layout | tracer.notices | tracer.masking
    | tracer.copies | tracer.codec_dtypes | tracer.nearest
  < tracer.codec | tracer.manifest | tracer.mesh | tracer.selection | tracer.sketch
    | tracer.settings | tracer.environment | tracer.module_settings
  < tracer.geometry | tracer.levels | tracer.identities | tracer.full_at | tracer.replicas
  < tracer.sketching
  < tracer.keeping
  < tracer.rules
  < tracer.options | tracer.request | tracer.claim | tracer.latest | tracer.room | tracer.progress
    | tracer.job_step
    | tracer.manifest_safetensors
  < tracer.placements | tracer.watching
  < tracer.reader | tracer.writer | tracer.hooks
  < tracer.staging | tracer.start | tracer.zoom
  < tracer.quota | tracer.force
  < tracer.recorder
  < tracer.faults | tracer.dry_run | tracer.flight
  < tracer.bootstrap | tracer.launch | tracer.compact
  < tracer.in_process
  < diff
  < replay
  < cli
"""
"""From the ground up. A name stands for a module, its submodules, and ``name_*`` beside it."""

RUNGS = {name.strip(): rung for rung, level in enumerate(LAYERS.split("<")) for name in level.split("|")}

UNLAYERED = ("tracer", "tracer.inject.sitecustomize")
"""The package's own page of public names, and the file that is not imported but injected."""

WITHOUT_TORCH = (
    "tracer.errors", "tracer.types", "tracer.layout", "tracer.manifest", "tracer.selection", "tracer.codec",
    "tracer.reader", "tracer.writer", "tracer.geometry", "tracer.rules", "diff.result", "diff.align",
    "cli.render", "cli.formats", "cli.main", "tracer.in_process", "tracer.explicit",
)  # fmt: skip


def layer(name: str) -> str | None:
    """Return the longest listed name that stands for a module."""
    fitting = [p for p in RUNGS if name == p or name.startswith((p + ".", p + "_"))]
    return max(fitting, key=len, default=None)


def covered(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith((p + ".", p + "_")) for p in prefixes)


def upward(module: Module) -> list[str]:
    own = layer(module.name)
    found = []
    for target in sorted(module.own_imports() - set(UNLAYERED)):
        other = layer(target)
        if own and other and other != own and RUNGS[other] >= RUNGS[own]:
            found.append(f"{module.name} (in {own}) imports {target} (in {other})")
    return found


def test_every_module_has_a_layer() -> None:
    missing = [m.name for m in modules() if m.name not in UNLAYERED and layer(m.name) is None]
    assert missing == []


def test_imports_run_down_the_layers() -> None:
    lines = [line for module in modules() for line in upward(module)]
    assert not lines, "\n".join(lines)


def test_no_modules_import_each_other_in_a_circle() -> None:
    edges = {module.name: module.own_imports() for module in modules()}
    while free := [name for name, targets in edges.items() if not targets & edges.keys()]:
        for name in free:
            del edges[name]
    assert sorted(edges) == []


@pytest.mark.parametrize("root", WITHOUT_TORCH)
def test_the_format_half_and_the_output_import_without_torch(root: str) -> None:
    known = {module.name: module for module in modules()}
    reached: set[str] = set()
    waiting = [name for name in known if covered(name, (root,))]
    while waiting:
        name = waiting.pop()
        if name in reached or name not in known:
            continue
        reached.add(name)
        names = known[name].imports_when_loaded()
        assert not any(i == "torch" or i.startswith("torch.") for i in names), f"{name} imports torch"
        ours = {target for target in known[name].own_imports() if _loads(known[name], target)}
        waiting.extend(ours)


def _loads(module: Module, target: str) -> bool:
    return any(i.startswith(f"tensortrace.{target}") for i in module.imports_when_loaded())


def test_click_and_rich_are_imported_only_by_the_command_line() -> None:
    guests = [
        f"{module.name} imports {name}"
        for module in modules()
        for name in module.imports()
        if name.split(".")[0] in {"click", "rich"} and not covered(module.name, ("cli",))
    ]
    assert guests == []


def test_the_traced_program_imports_nothing_beyond_the_few_it_needs() -> None:
    allowed = sys.stdlib_module_names | {"tensortrace", "torch", "numpy", "msgspec", "xxhash", "zstandard"}
    guests = [
        f"{module.name} imports {name}"
        for module in modules()
        for name in module.imports()
        if module.name.startswith("tracer") and name.split(".")[0] not in allowed | {"safetensors"}
    ]
    assert guests == []


def test_every_folder_with_modules_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = {name.removeprefix("tensortrace.") for name in settings["tool"]["setuptools"]["packages"]}
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    found = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert found - {"tracer.inject"} == listed


def test_the_injected_folder_holds_nothing_that_could_shadow_a_module() -> None:
    names = [path.name for path in (ROOT / "tracer" / "inject").iterdir() if path.name != "__pycache__"]
    assert names == ["sitecustomize.py"]
