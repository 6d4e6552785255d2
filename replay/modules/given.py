"""What one call of a module was given, as its formula reads it, and how a formula is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tensortrace.tracer.types import Setting

Tensors = Mapping[str, torch.Tensor]


class NoFormula(Exception):
    """A call that no formula tells the result of; the text says why."""


@dataclass(frozen=True)
class Settings:
    """The plain settings of a module; asking for one that was not recorded raises NoFormula."""

    values: Mapping[str, Setting]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def get(self, name: str) -> Setting:
        """Return a setting."""
        if name not in self.values:
            raise NoFormula(f"its setting {name} was not recorded")
        return self.values[name]

    def number(self, name: str) -> float:
        """Return a setting that is a number."""
        value = self.get(name)
        if isinstance(value, (bool, str, tuple)) or value is None:
            raise NoFormula(f"its setting {name} is {value!r}")
        return float(value)

    def whole(self, name: str) -> int:
        """Return a setting that is a whole number."""
        value = self.get(name)
        if type(value) is not int:
            raise NoFormula(f"its setting {name} is {value!r}")
        return value

    def flag(self, name: str) -> bool:
        """Return a setting that is true or false."""
        return bool(self.get(name))

    def each(self, name: str, dims: int) -> tuple[int, ...]:
        """Return a number for each of so many dimensions."""
        value = self.get(name)
        found = (value,) * dims if type(value) is int else value
        if not isinstance(found, tuple) or len(found) != dims:
            raise NoFormula(f"its setting {name} is {value!r}")
        return found


@dataclass(frozen=True)
class Given:
    """One call: inputs by slot (``0``, ``kw.mask``), own parameters and buffers by name, all in float64.

    Ids stay integers and masks boolean. ``dtype`` is the format of its first input, ``shape`` the shape of
    what it returned; ``out`` is that, where the formula of a module that draws numbers needs it. ``version``
    is that of torch, empty where it is not known.
    """

    inputs: Tensors
    own: Tensors
    settings: Settings
    training: bool
    dtype: str
    shape: tuple[int, ...]
    out: torch.Tensor | None = None
    version: tuple[int, ...] = ()

    @property
    def x(self) -> torch.Tensor:
        """The first input."""
        if "0" not in self.inputs:
            found = [v for k, v in self.inputs.items() if k in ("kw.input", "kw.x")]
            if len(found) != 1:
                raise NoFormula("it was not given one tensor")
            return found[0]
        return self.inputs["0"]

    def of(self, place: int, name: str) -> torch.Tensor | None:
        """Return a further input by its place or its name, None where it was not given."""
        return self.inputs.get(str(place), self.inputs.get(f"kw.{name}"))

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer of its own."""
        if name not in self.own:
            raise NoFormula(f"its {name} was not recorded")
        return self.own[name]

    def maybe(self, name: str) -> torch.Tensor | None:
        """Return a parameter or buffer that it need not have."""
        return self.own.get(name)


Run = Callable[[Given], torch.Tensor]
Length = Callable[[Given], int]


@dataclass(frozen=True)
class Form:
    """The formula of a class, and how its results are judged.

    ``forward`` and ``backward`` say how many terms an element of the result and of the input's gradient sums.
    ``stores`` is how often the kernel rounds to a narrow format what it computes in float32, 0 where that is
    not known. ``kinked``: a gradient jumps where an input lies on an edge. ``random`` formulas read what came
    out.
    """

    run: Run
    forward: Length = lambda _: 1
    backward: Length = lambda _: 1
    stores: int = 0
    kinked: bool = False
    random: bool = False
    needs: tuple[str, ...] = ()
    only: frozenset[str] = field(default_factory=frozenset)
