"""What inference has found: axes, names, rules with their evidence, and what it could not decide."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Term:
    """How one dimension lies: its text in ``dims``, in the global tensor, and what its factors measure.

    ``vectors`` hold, for each part, the global position of every local element, -1 for padding.
    """

    text: str
    whole: str
    sizes: tuple[tuple[str, int], ...] = ()
    valid: tuple[tuple[str, int], ...] = ()

    @property
    def permutes(self) -> bool:
        """Tell whether the local order is not the global one."""
        return bool(self.whole)


@dataclass(frozen=True)
class Body:
    """What a rule says, without its names: two tensors with equal bodies may share a rule."""

    dims: str
    grad: str | None = None
    sizes: tuple[tuple[str, int], ...] = ()
    valid: tuple[tuple[str, int], ...] = ()
    whole: str | None = None


@dataclass(frozen=True)
class FoundRule:
    """One tensor's rule and why it is believed."""

    name: str
    slot: str
    kinds: tuple[str, ...]
    body: Body
    evidence: str


@dataclass(frozen=True)
class FoundRename:
    """Names that ranks at one stage have other numbers in, or names that are not of the whole program."""

    glob: str
    to: str
    at: tuple[tuple[str, int], ...] = ()
    add: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    evidence: str = ""


@dataclass
class Found:
    """A layout as it was found.

    ``axes`` in order with sizes. ``swaps`` are permutations under which the activations don't agree,
    ``doubts`` gradients that look like contributions to a sum that nobody adds up, ``undecided`` tensors
    without a rule or with more than one that fits.
    """

    axes: dict[str, int] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    renames: list[FoundRename] = field(default_factory=list)
    rules: list[FoundRule] = field(default_factory=list)
    swaps: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def with_axis(found: Found, axis: str, name: str) -> Found:
    """Return a layout whose ``axis`` is called ``name``."""

    def text(dims: str | None) -> str | None:
        renamed = re.sub(rf"([\[,:]){axis}\b", rf"\1{name}", dims or "")
        return renamed if dims is not None else None

    rules = [
        replace(rule, body=replace(rule.body, dims=text(rule.body.dims) or "", grad=text(rule.body.grad)))
        for rule in found.rules
    ]
    axes = {name if own == axis else own: size for own, size in found.axes.items()}
    data = tuple(name if own == axis else own for own in found.data)
    return replace(found, axes=axes, data=data, rules=rules)
