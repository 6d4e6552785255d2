"""Numbers objects in the order in which the program constructed them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Order(Generic[T]):
    """The objects of one class, numbered from 0; holds them weakly."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[weakref.ref[T], int]] = {}
        self._count = 0

    def number(self, thing: T) -> int:
        """Return the object's number; one not seen before comes next."""
        found = self._numbers.get(id(thing))
        if found is not None and found[0]() is thing:
            return found[1]
        number, self._count = self._count, self._count + 1
        self._numbers[id(thing)] = (weakref.ref(thing), number)
        return number

    def __iter__(self) -> Iterator[T]:
        for reference, _ in list(self._numbers.values()):
            thing = reference()
            if thing is not None:
                yield thing
