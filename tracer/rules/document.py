"""The TOML of a layout file: its fields, read once; every complaint names file, rule and field."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.nearest import meant, sibling
from tensortrace.tracer.rules.names import BadName, Rename, check_template, compile_glob, match_glob
from tensortrace.tracer.rules.pattern import BadPattern, Pattern, leaves, parse_pattern
from tensortrace.tracer.types import Kind

FORMAT = 1
LARGEST_BYTES = 16 << 20
MOST_RANKS = 1 << 20


class LayoutFileError(TraceError):
    """A layout file that cannot be read or does not fit the trace; names file, rule and field."""


class Fields(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of what a layout file holds."""


class RuleFields(Fields, frozen=True):
    """One ``[[rule]]`` as written. ``name``, ``kind`` and ``slot`` select, the rest describes.

    ``dims`` is a pattern, ``grad`` that of ``local_grad`` and ``activation_grad`` where it differs. ``sizes``
    are global sizes of factors, ``valid`` how many elements of a padded factor count. ``to`` maps names of
    the other run to the patterns that they have there.
    """

    name: str | tuple[str, ...]
    dims: str
    kind: tuple[Kind, ...] = ()
    slot: str = "*"
    grad: str | None = None
    sizes: dict[str, int] = {}
    valid: dict[str, int] = {}
    to: dict[str, str] = {}

    @property
    def globs(self) -> tuple[str, ...]:
        """The globs on canonical names."""
        return (self.name,) if isinstance(self.name, str) else self.name


class RenameFields(Fields, frozen=True, rename={"glob": "from"}):
    """One ``[[rename]]`` as written."""

    glob: str
    to: str
    at: dict[str, int] = {}
    add: dict[str, dict[str, tuple[int, ...]]] = {}


class Document(Fields, frozen=True, rename={"renames": "rename", "rules": "rule"}):
    """A layout file as written: axes from the slowest-varying to the fastest, their roles, and the rules."""

    format: int
    axes: dict[str, int]
    data: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    renames: tuple[RenameFields, ...] = ()
    rules: tuple[RuleFields, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A checked rule. ``number`` counts from 1; ``written`` holds its fields as they stand in the file."""

    number: int
    written: RuleFields
    names: tuple[re.Pattern[str], ...]
    slot: re.Pattern[str]
    value: Pattern
    grad: Pattern
    to: tuple[tuple[str, Pattern], ...]

    @property
    def title(self) -> str:
        """What complaints call it."""
        return f"rule {self.number} ({self.written.globs[0]})"

    def match(self, name: str) -> re.Match[str] | None:
        """Return how a canonical name fits the rule's first glob that it fits, None where it fits none."""
        return next((found for glob in self.names if (found := match_glob(glob, name))), None)


def read_text(path: Path) -> bytes:
    """Read a layout file as it stands; raises LayoutFileError where it cannot be read or is too big."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        near = None if path.exists() else sibling(path)
        raise LayoutFileError(f"{path}: cannot be read: {error.strerror}", remedy=meant(near)) from error
    if len(raw) > LARGEST_BYTES:
        raise LayoutFileError(f"{path}", found="more than 16 MiB", expected="a layout file")
    return raw


def parse_document(path: Path, raw: bytes) -> Document:
    """Parse a layout file; raises LayoutFileError where it is no layout file of this version."""
    try:
        fields = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LayoutFileError(
            f"{path}: not TOML: {error}", remedy="docs/layouts.md shows the form"
        ) from error
    if fields.get("format") != FORMAT:
        found = repr(fields.get("format", "nothing"))
        raise LayoutFileError(f"{path}: format", found=found, expected=str(FORMAT))
    try:
        return msgspec.convert(fields, Document)
    except msgspec.ValidationError as error:
        raise LayoutFileError(
            f"{path}: {_numbered(str(error))}", remedy="docs/layouts.md lists the fields"
        ) from error


def check_document(path: Path, document: Document) -> tuple[tuple[Rename, ...], tuple[Rule, ...]]:
    """Return a document's renames and rules, ready for use.

    Raises LayoutFileError for an axis that is not declared, an active axis that a rule doesn't mention, a
    pattern or a glob that cannot be read.
    """
    _check_axes(path, document)
    renames = tuple(_rename(path, n, r, document) for n, r in enumerate(document.renames, 1))
    rules = tuple(_rule(path, n, r, document) for n, r in enumerate(document.rules, 1))
    return renames, rules


def _numbered(text: str) -> str:
    """Return msgspec's complaint with rules counted from 1, as people count them."""
    for array, word in (("$.rule[", "rule "), ("$.rename[", "rename ")):
        if array in text:
            before, _, rest = text.partition(array)
            number, _, after = rest.partition("]")
            return f"{before}{word}{int(number) + 1 if number.isdecimal() else number}{after}"
    return text


def _check_axes(path: Path, document: Document) -> None:
    for axis, size in document.axes.items():
        if not axis.isidentifier():
            raise LayoutFileError(
                f"{path}: axes", found=repr(axis), expected="a name of letters, digits and _"
            )
        if size < 1:
            raise LayoutFileError(f"{path}: axes: {axis}", found=str(size), expected="at least 1")
    if (made := math.prod(document.axes.values())) > MOST_RANKS:
        raise LayoutFileError(f"{path}: axes", found=f"{made} ranks", expected=f"at most {MOST_RANKS}")
    for field, axes in (("data", document.data), ("stages", document.stages)):
        _known(path, field, axes, document.axes)
    if both := set(document.data) & set(document.stages):
        raise LayoutFileError(
            f"{path}: stages",
            found=f"{', '.join(sorted(both))} in 'data' too",
            expected="one role for an axis",
        )


def _known(path: Path, field: str, axes: Iterable[str], known: Mapping[str, int]) -> None:
    if unknown := sorted(set(axes) - known.keys()):
        raise LayoutFileError(
            f"{path}: {field}: unknown axis {', '.join(unknown)}",
            expected=f"one of {', '.join(known) or 'none'}", remedy="declare it in [axes]",
        )  # fmt: skip


def _rename(path: Path, number: int, fields: RenameFields, document: Document) -> Rename:
    title = f"rename {number} ({fields.glob})"
    try:
        glob = compile_glob(fields.glob)
        check_template(fields.to, fields.glob)
    except BadName as error:
        raise LayoutFileError(f"{path}: {title}: {error}") from error
    _known(path, f"{title}: at", fields.at, document.axes)
    for captured, tables in fields.add.items():
        if captured not in glob.groupindex:
            raise LayoutFileError(
                f"{path}: {title}: add", found=captured, expected=f"a number that {fields.glob!r} captures",
                remedy=f"write {{{captured}}} where the number stands",
            )  # fmt: skip
        _known(path, f"{title}: add: {captured}", set(tables) - glob.groupindex.keys(), document.axes)
        for axis in set(tables) & document.axes.keys():
            if len(tables[axis]) != document.axes[axis]:
                raise LayoutFileError(
                    f"{path}: {title}: add: {captured}: {axis}", found=f"{len(tables[axis])} numbers",
                    expected=f"{document.axes[axis]}, one per coordinate",
                )  # fmt: skip
    return Rename(glob, fields.to, fields.at, fields.add)


def _rule(path: Path, number: int, fields: RuleFields, document: Document) -> Rule:
    if not fields.globs:
        raise LayoutFileError(f"{path}: rule {number}: name", found="no glob", expected="at least one")
    title = f"rule {number} ({fields.globs[0]})"
    where = f"{path}: {title}"
    value = _pattern(f"{where}: dims", fields.dims)
    grad = value if fields.grad is None else _pattern(f"{where}: grad", fields.grad)
    for field, pattern in (("dims", value), ("grad", grad)):
        _check_mentions(path, f"{title}: {field}", pattern, document)
    for field, sizes in (("sizes", fields.sizes), ("valid", fields.valid)):
        _check_sizes(f"{where}: {field}", sizes, value.names() | grad.names())
    try:
        names = tuple(compile_glob(glob) for glob in fields.globs)
        for name in fields.to:
            for glob in fields.globs:
                check_template(name, glob)
    except BadName as error:
        raise LayoutFileError(f"{where}: {error}") from error
    to = tuple((name, _target(f"{where}: to: {name}", text)) for name, text in fields.to.items())
    return Rule(number, fields, names, compile_glob(fields.slot), value, grad, to)


def _pattern(where: str, text: str) -> Pattern:
    try:
        return parse_pattern(text)
    except BadPattern as error:
        raise LayoutFileError(
            f"{where}: {text!r}: {error}", remedy="docs/layouts.md lists the terms"
        ) from error


def _target(where: str, text: str) -> Pattern:
    pattern = _pattern(where, text)
    if pattern.axes() or any(leaf.splits for term in pattern.dims for leaf in leaves(term)):
        raise LayoutFileError(f"{where}: {text!r}", found="an axis", expected="names only: the whole tensor")
    return pattern


def _check_mentions(path: Path, title: str, pattern: Pattern, document: Document) -> None:
    _known(path, title, pattern.axes(), document.axes)
    roles = {*document.data, *document.stages}
    active = [axis for axis, size in document.axes.items() if size > 1 and axis not in roles]
    if missing := [axis for axis in active if axis not in pattern.axes()]:
        axis = missing[0]
        raise LayoutFileError(
            f"{path}: {title}: axis {axis} of {document.axes[axis]} ranks is not mentioned",
            remedy=f"split a dimension with [{axis}], or write same:{axis}, partial:{axis} or own:{axis}",
        )


def _check_sizes(where: str, sizes: Mapping[str, int], names: frozenset[str]) -> None:
    for name, size in sizes.items():
        if name not in names:
            raise LayoutFileError(where, found=name, expected=f"of {', '.join(sorted(names))}")
        if size < 0:
            raise LayoutFileError(f"{where}: {name}", found=str(size), expected="a number of elements")
