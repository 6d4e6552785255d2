"""Start the recorder in any Python process of a recorded command, right after torch was imported.

This folder stands first on PYTHONPATH, so that Python imports this file at start-up. It uses the standard
library only, leaves ``sys.path`` as it was found, and runs the sitecustomize that it hides.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    """Start recording; a guest that cannot start says so and leaves the program alone."""
    try:
        from tensortrace.tracer import bootstrap
    except Exception as error:
        sys.stderr.write(f"tensortrace: this process is not recorded: {type(error).__name__}: {error}\n")
    else:
        bootstrap.start()


class _Torch(MetaPathFinder):
    """Finds torch as the other finders do, with a loader that starts the recorder after it has run.

    It stays in place until torch has really been executed: a mere ``find_spec("torch")`` probe, as
    transformers makes, must not use it up.
    """

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _AfterTorch(spec.loader, self)
                return spec  # type: ignore[no-any-return]  # finders are duck-typed
        return None


class _AfterTorch(Loader):
    """Stands in for torch's loader until torch has been executed, then takes itself out."""

    def __init__(self, loader: Loader, finder: _Torch) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            _start()


def _run_hidden_sitecustomize() -> None:
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
if os.environ.get("TENSORTRACE_RECORD"):
    if "torch" in sys.modules:
        _start()
    else:
        sys.meta_path.insert(0, _Torch())
_run_hidden_sitecustomize()
