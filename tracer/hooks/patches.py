"""Replaces functions wherever they are bound already, and puts them back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator
from types import ModuleType


class Patches:
    """The replacements of one recording, undone in reverse order by ``undo``."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._functions: dict[int, tuple[object, object]] = {}

    def on_undo(self, action: Callable[[], object]) -> None:
        """Run ``action`` when the recording is removed."""
        self._undo.append(lambda: (action(), None)[1])

    def attribute(self, owner: object, name: str, value: object) -> None:
        """Replace one attribute of a class or module."""
        original = getattr(owner, name)
        setattr(owner, name, value)
        self.on_undo(lambda: setattr(owner, name, original))

    def function(self, original: object, replacement: object) -> None:
        """Replace a module-level function in every module that binds it, once ``bind`` is called."""
        self._functions[id(original)] = (original, replacement)

    def bind(self) -> None:
        """Put the functions in place; names that the program imports later resolve to them too.

        A module may hold a function under several names (``clip_grads_with_norm_`` and its private twin).
        """
        for module, name, value in _bindings(self._functions):
            original, replacement = self._functions.get(id(value), (None, None))
            if original is value and original is not None:
                self.attribute(module, name, replacement)

    def undo(self) -> None:
        """Put everything back, also in modules that the program imported while the patches were there."""
        while self._undo:
            self._undo.pop()()
        originals = {id(replacement): original for original, replacement in self._functions.values()}
        for module, name, value in _bindings(originals):
            setattr(module, name, originals[id(value)])
        self._functions.clear()


def _bindings(wanted: Container[int]) -> Iterator[tuple[ModuleType, str, object]]:
    """Yield what every module binds of the objects with these ``id``: torch's modules bind 100,000 others."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            found = [(name, value) for name, value in list(vars(module).items()) if id(value) in wanted]
            yield from ((module, name, value) for name, value in found)
