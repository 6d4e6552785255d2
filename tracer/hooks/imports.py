"""Waits for the program to import a module, to replace its parts before the program uses them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.patches import Patches

Action = Callable[[ModuleType], None]


def when_imported(patches: Patches, name: str, action: Action) -> None:
    """Call ``action`` with the module as soon as it has been executed, now where it has been.

    The recorder itself must not import what the program may never need: torch's optional packages cost
    half a second each.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    patches.on_undo(finder.leave)


@guard("module imported")
def _imported(action: Action, module: ModuleType) -> None:
    action(module)


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do, with a loader that acts after the module has run.

    It stays until the module has really been executed: a program may look for a spec without loading it.
    """

    def __init__(self, name: str, action: Action) -> None:
        self._name = name
        self._action = action

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the next finder has, with our loader in it; None for any other module."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None

    def act(self, module: ModuleType) -> None:
        """Tell that the module has been executed, once."""
        if self in sys.meta_path:
            self.leave()
            _imported(self._action, module)

    def leave(self) -> None:
        """Stop looking for the module."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(Loader):
    """Stands in for a module's own loader while the module is executed."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with its own loader in place, then act."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.act(module)
