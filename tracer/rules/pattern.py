"""The language of a rule's ``dims``: which dimensions a tensor has, and which axes split them.

``b s[cp:zigzag] (heads d)[tp]`` has three dimensions. A name is a factor of a dimension, ``(x y)`` a
dimension made of two factors, ``(q|k|v)`` one made of blocks that stand behind one another, ``...`` any
number of whole dimensions. ``[tp]`` splits what stands before it over an axis. Behind the dimensions follow
``partial:tp``, ``same:tp`` and ``own:ep``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

_TOKEN = re.compile(r"\s*(?:(\.\.\.)|([A-Za-z_]\w*)|([()|\[\],:]))")
_MARK = re.compile(r"(partial|same|own):([A-Za-z_]\w*)(?::(sum|avg|max|min))?")

ELLIPSIS = "..."

How = Literal["block", "zigzag"]


class BadPattern(Exception):
    """A pattern that cannot be read; the text says what was found and what was expected."""


@dataclass(frozen=True)
class Split:
    """A factor's split over an axis of n: into n blocks, or into 2n of which a rank has i and 2n-1-i."""

    axis: str
    how: How = "block"


@dataclass(frozen=True)
class Leaf:
    """One factor; ``(heads d)[tp]`` is one factor with a name of two words, split as a whole."""

    name: str
    splits: tuple[Split, ...] = ()


@dataclass(frozen=True)
class Product:
    """Factors of one dimension, the slowest first."""

    factors: tuple[Term, ...]


@dataclass(frozen=True)
class Blocks:
    """Blocks of one dimension that stand behind one another."""

    blocks: tuple[Term, ...]


Term = Leaf | Product | Blocks


@dataclass(frozen=True)
class Pattern:
    """The dimensions of a tensor and what holds along the axes that split none of them.

    ``partial`` maps an axis to its reduction. ``same``: equal copies. ``own``: an axis of whose ranks only
    one has the tensor at all.
    """

    dims: tuple[Term, ...]
    partial: dict[str, str] = field(default_factory=dict)
    same: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    def axes(self) -> frozenset[str]:
        """Return every axis that the pattern mentions."""
        split = {s.axis for term in self.dims for leaf in leaves(term) for s in leaf.splits}
        return frozenset(split | self.partial.keys() | set(self.same) | set(self.own))

    def names(self) -> frozenset[str]:
        """Return the names of all factors."""
        return frozenset(leaf.name for term in self.dims for leaf in leaves(term))

    def shares(self) -> bool:
        """Tell whether some blocks of a dimension are split over an axis and others are not."""
        return any(_shares(term) for term in self.dims)

    def spread(self, ndim: int) -> tuple[Term, ...] | None:
        """Return the terms of a tensor of ``ndim`` dimensions, or None where the pattern has other ones."""
        at = [i for i, term in enumerate(self.dims) if term == Leaf(ELLIPSIS)]
        more = ndim - len(self.dims) + len(at)
        if more < 0 or (more and not at):
            return None
        if not at:
            return self.dims
        whole = tuple(Leaf(f"{ELLIPSIS}{n}") for n in range(more))
        return self.dims[: at[0]] + whole + self.dims[at[0] + 1 :]


def leaves(term: Term) -> Iterator[Leaf]:
    """Yield a term's factors, the slowest first."""
    if isinstance(term, Leaf):
        yield term
    else:
        for inner in term.factors if isinstance(term, Product) else term.blocks:
            yield from leaves(inner)


def _shares(term: Term) -> bool:
    if isinstance(term, Blocks):
        axes = [frozenset(s.axis for leaf in leaves(block) for s in leaf.splits) for block in term.blocks]
        return len(set(axes)) > 1 or any(map(_shares, term.blocks))
    return isinstance(term, Product) and any(map(_shares, term.factors))


def parse_pattern(text: str) -> Pattern:
    """Parse ``dims``; raise BadPattern where it cannot be read."""
    partial: dict[str, str] = {}
    marks: dict[str, list[str]] = {"same": [], "own": []}
    words = text.split()
    while words and (match := _MARK.fullmatch(words[-1])):
        words.pop()
        if match[1] == "partial":
            partial[match[2]] = match[3] or "sum"
        else:
            marks[match[1]].insert(0, match[2])
    parser = _Parser(_tokens(" ".join(words)))
    dims = parser.terms(end="")
    pattern = Pattern(tuple(dims), partial, tuple(marks["same"]), tuple(marks["own"]))
    _check(pattern)
    return pattern


def _check(pattern: Pattern) -> None:
    if sum(term == Leaf(ELLIPSIS) for term in pattern.dims) > 1:
        raise BadPattern("'...' stands twice, expected once")
    split = _each_once(Product(pattern.dims))
    inside = [leaf for term in pattern.dims if not isinstance(term, Leaf) for leaf in leaves(term)]
    if any(leaf.name == ELLIPSIS for leaf in inside) or any(
        term.name == ELLIPSIS and term.splits for term in pattern.dims if isinstance(term, Leaf)
    ):
        raise BadPattern("'...' stands inside a dimension or is split, expected it to stand for whole ones")
    for axis in {*pattern.partial, *pattern.same, *pattern.own}:
        in_blocks = axis in pattern.partial and pattern.shares()  # the blocks that it doesn't split are sums
        if (axis in split and not in_blocks) or (axis in pattern.partial) + (axis in pattern.same) + (
            axis in pattern.own
        ) > 1:
            raise BadPattern(f"axis {axis} is mentioned in two ways")


def _each_once(term: Term) -> frozenset[str]:
    """Return the axes that split a term; raise BadPattern for one that splits it twice."""
    if isinstance(term, Blocks):
        return frozenset().union(*map(_each_once, term.blocks))
    parts = [[s.axis] for s in term.splits] if isinstance(term, Leaf) else map(_each_once, term.factors)
    axes = [axis for part in parts for axis in part]
    if twice := {axis for axis in axes if axes.count(axis) > 1}:
        raise BadPattern(f"axis {min(twice)} splits twice, expected once (blocks beside each other aside)")
    return frozenset(axes)


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise BadPattern(f"found {text[at:].split()[0]!r} at character {at}")
        found.append(match[0].strip())
        at = match.end()
    return found


class _Parser:
    """Reads terms from tokens, one token ahead."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def terms(self, *, end: str) -> list[Term]:
        """Read terms up to a closing token, which is taken; '' is the end of the text."""
        found: list[Term] = []
        while self._peek() not in (end, "|"):
            found.append(self._term(end))
        if end == "":
            self._take("")
        return found

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, wanted: str | None = None) -> str:
        token = self._peek()
        if wanted is not None and token != wanted:
            raise BadPattern(f"found {token or 'the end'!r}, expected {wanted or 'the end'!r}")
        self._at += 1
        return token

    def _term(self, end: str) -> Term:
        token = self._peek()
        if token == "(":  # noqa: S105 # no password
            term = self._group()
        elif token == ELLIPSIS or token[:1].isalpha() or token[:1] == "_":
            term = Leaf(self._take())
        else:
            raise BadPattern(f"found {token or 'the end'!r}, expected a name, '(' or {end or 'the end'!r}")
        splits = []
        while self._peek() == "[":
            splits += self._splits()
        return _split(term, tuple(splits)) if splits else term

    def _group(self) -> Term:
        self._take("(")
        blocks = [self.terms(end=")")]
        while self._peek() == "|":
            self._take("|")
            blocks.append(self.terms(end=")"))
        self._take(")")
        if any(not factors for factors in blocks):
            raise BadPattern("found an empty block, expected a name")
        terms = tuple(f[0] if len(f) == 1 else Product(tuple(f)) for f in blocks)
        return Blocks(terms) if len(terms) > 1 else terms[0]

    def _splits(self) -> list[Split]:
        found = []
        self._take("[")
        while True:
            axis = self._take()
            if not axis.isidentifier():
                raise BadPattern(f"found {axis or 'the end'!r}, expected an axis")
            how: How = "block"
            if self._peek() == ":":
                self._take(":")
                if (word := self._take()) != "zigzag":
                    raise BadPattern(f"found {word!r}, expected 'zigzag'")
                how = "zigzag"
            found.append(Split(axis, how))
            if self._peek() != ",":
                break
            self._take(",")
        self._take("]")
        return found


def _split(term: Term, splits: tuple[Split, ...]) -> Term:
    """Split a term: a leaf or a product as one factor, blocks each for itself."""
    if isinstance(term, Leaf):
        return replace(term, splits=term.splits + splits)
    if isinstance(term, Blocks):
        return Blocks(tuple(_split(block, splits) for block in term.blocks))
    if any(not isinstance(factor, Leaf) or factor.splits for factor in term.factors):
        raise BadPattern("a split product holds blocks or splits, expected names only")
    return Leaf(" ".join(leaf.name for leaf in leaves(term)), splits)
