"""What the manifest says of modules: those that are alike are written once."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from tensortrace.tracer.types import Module


def together(modules: Mapping[str, Module]) -> tuple[Module, ...]:
    """Return modules, given by name, with the names of all those that are alike in one."""
    found: dict[tuple[object, ...], list[str]] = {}
    first: dict[tuple[object, ...], Module] = {}
    for name, module in modules.items():
        key = (module.kind, module.odd, *((k, type(v), v) for k, v in module.settings.items()))
        found.setdefault(key, []).append(name)
        first.setdefault(key, module)
    return tuple(replace(module, names=tuple(found[key])) for key, module in first.items())
