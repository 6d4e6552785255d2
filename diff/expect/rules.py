"""The rules of ``--expect``: files and single lines, read once; every complaint names rule and field."""

from __future__ import annotations

import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from tensortrace.diff.catalog import Slot
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.nearest import meant, nearest
from tensortrace.tracer.selection import parse_steps
from tensortrace.tracer.types import Kind

LARGEST_BYTES = 1 << 20
_PAGE = "docs/expect.md lists the fields"
_CALL = re.compile(r"\[(\d+)\]")


class Fields(Struct, frozen=True, forbid_unknown_fields=True):
    """One rule as written. ``kind``, ``name``, ``slot``, ``steps`` and ``call`` select, the rest declares."""

    kind: str | tuple[str, ...]
    name: str | tuple[str, ...]
    slot: str | tuple[str, ...]
    steps: str = ""
    call: int | None = None
    only: Literal["a", "b"] | None = None
    factor: int | float | str | None = None
    rel_l2: float | None = None
    cause: str | None = None
    reason: str = ""


class Document(Struct, frozen=True, forbid_unknown_fields=True, rename={"rules": "expect"}):
    """A file of rules."""

    rules: tuple[Fields, ...]


@dataclass(frozen=True)
class Rule:
    """A checked rule. ``place`` is where it stands, ``text`` what it says, both for people.

    ``factor`` is what b may be of a, None where any difference was declared.
    """

    place: str
    text: str
    kinds: frozenset[Kind]
    names: tuple[str, ...]
    slots: tuple[str, ...]
    steps: tuple[tuple[int, int], ...]
    call: int | None
    only: Literal["a", "b"] | None
    factor: float | None
    rel_l2: float | None
    cause: str | None
    reason: str

    @property
    def title(self) -> str:
        """What complaints and outputs call it."""
        return f"{self.place} ({self.text})"

    @property
    def any_difference(self) -> bool:
        """Whether the rule sets no limit to what it declares."""
        return self.only is None and self.factor is None and self.rel_l2 is None and self.cause is None

    def selects(self, step: int, slot: Slot, names: Iterable[str]) -> bool:
        """Tell whether a boundary is one that the rule speaks of; ``names`` are those it goes by."""
        return (
            slot.kind in self.kinds
            and self.call in (None, slot.call)
            and (not self.steps or any(first <= step <= last for first, last in self.steps))
            and any(fnmatchcase(slot.slot, glob) for glob in self.slots)
            and all(any(fnmatchcase(name, glob) for glob in self.names) for name in names)
        )


def read_rules(requests: Sequence[str]) -> tuple[Rule, ...]:
    """Return the rules of files and single lines, in order; raises BadRequest where one is malformed.

    What has a space in it is a rule, unless there is a file of that name; all else is a file.
    """
    found: list[Rule] = []
    for request in requests:
        found += [_rule("--expect", _words(request))] if _is_inline(request) else _file(Path(request))
    return tuple(found)


def as_file(request: str) -> bytes:
    """Return the file of rules that a request names, or one that says what a single line does.

    Raises BadRequest where it is malformed.
    """
    read_rules([request])
    if not _is_inline(request):
        return Path(request).read_bytes()
    said = {
        name: value
        for name, value in msgspec.structs.asdict(_words(request)).items()
        if value not in (None, "")
    }
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in said.items()]
    return "\n".join(["[[expect]]", *lines, ""]).encode()


def _is_inline(request: str) -> bool:
    return " " in request.strip() and not Path(request).is_file()


def _file(path: Path) -> list[Rule]:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise BadRequest(
            f"--expect {path}: cannot be read: {getattr(error, 'strerror', None) or error}",
            remedy="give a file of rules, or a rule such as 'schedule * lr' (docs/expect.md)",
        ) from error
    if len(raw) > LARGEST_BYTES:
        raise BadRequest(f"--expect {path}", found="more than 1 MiB", expected="a file of rules")
    try:
        document = msgspec.convert(tomllib.loads(raw.decode()), Document)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{path}: not TOML: {error}", remedy="docs/expect.md shows the form") from error
    except msgspec.ValidationError as error:
        raise BadRequest(f"{path}: {_numbered(str(error))}", remedy=_PAGE) from error
    return [_rule(f"{path}: rule {number}", fields) for number, fields in enumerate(document.rules, 1)]


def _numbered(text: str) -> str:
    """Return msgspec's complaint with rules counted from 1, as people count them."""
    return re.sub(r"\$\.expect\[(\d+)\]", lambda found: f"rule {int(found[1]) + 1}", text)


def _words(request: str) -> Fields:
    """Read ``KIND NAME SLOT [field=value …]``, the key as the diff prints it, with ``[N]`` for a call."""
    where = f"--expect {request!r}"
    form = "KIND NAME SLOT, then fields such as factor=0.5"
    try:
        words = shlex.split(request)
    except ValueError as error:
        raise BadRequest(where, found=str(error).lower(), expected=form, remedy=_PAGE) from error
    first = next((n for n, word in enumerate(words) if n > 2 and "=" in word), len(words))
    key, settings = words[:first], words[first:]
    values: dict[str, object] = {}
    if len(key) > 3 and (call := _CALL.fullmatch(key[-1])):
        key, values["call"] = key[:-1], int(call[1])
    if len(key) < 3:
        raise BadRequest(where, found=f"{len(key)} words", expected=form, remedy="write * for any of them")
    values |= {"kind": key[0], "name": key[1], "slot": " ".join(key[2:])}
    for word in settings:
        field, _, value = word.partition("=")
        if field in values or not value:
            raise BadRequest(f"{where}: {field}", found=repr(word), expected=f"{field}=VALUE, once")
        values[field] = value
    try:
        return msgspec.convert(values, Fields, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where}: {error}", remedy=_PAGE) from error


def _rule(place: str, fields: Fields) -> Rule:
    rule = Rule(
        place, _text(fields), _kinds(place, fields), _globs(place, "name", fields.name),
        _globs(place, "slot", fields.slot), _steps(place, fields), fields.call, fields.only,
        _factor(place, fields), fields.rel_l2, fields.cause, fields.reason,
    )  # fmt: skip
    if rule.rel_l2 is not None and not 0 < rule.rel_l2 < math.inf:
        raise BadRequest(f"{place}: rel_l2", found=str(rule.rel_l2), expected="a positive number")
    if rule.only is not None and (rule.factor, rule.rel_l2, rule.cause) != (None, None, None):
        raise BadRequest(
            f"{place}: only", found="a limit beside it", expected="no factor, rel_l2 or cause",
            remedy="what one run alone has cannot be compared: write two rules",
        )  # fmt: skip
    if rule.cause is not None and not re.fullmatch(r"[a-z]+\.[a-z_]+", rule.cause):
        raise BadRequest(
            f"{place}: cause", found=repr(rule.cause), expected="a code", remedy="docs/causes.md lists them"
        )
    return rule


def _tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _globs(place: str, field: str, value: str | tuple[str, ...]) -> tuple[str, ...]:
    globs = _tuple(value)
    if not globs or not all(globs):
        raise BadRequest(f"{place}: {field}", found="nothing", expected="a glob", remedy="write * for any")
    return globs


def _kinds(place: str, fields: Fields) -> frozenset[Kind]:
    names = _globs(place, "kind", fields.kind)
    if names == ("*",):
        return frozenset(Kind)
    known = [kind.value for kind in Kind]
    if unknown := next((name for name in names if name not in known), None):
        likely = meant(nearest(unknown, known)) or "write * for any"
        raise BadRequest(
            f"{place}: kind", found=repr(unknown), expected=f"of {', '.join(known)}", remedy=likely
        )
    return frozenset(Kind(name) for name in names)


def _steps(place: str, fields: Fields) -> tuple[tuple[int, int], ...]:
    if not fields.steps:
        return ()
    try:
        return parse_steps(fields.steps)
    except BadRequest as error:
        raise BadRequest(f"{place}: steps", found=error.found, expected=error.expected) from error


def _factor(place: str, fields: Fields) -> float | None:
    if fields.factor is None:
        return None
    try:
        factor = float(Fraction(fields.factor))
    except (ValueError, ZeroDivisionError, OverflowError):
        factor = math.nan
    if not math.isfinite(factor) or not factor:
        raise BadRequest(
            f"{place}: factor",
            found=repr(fields.factor),
            expected="a number that isn't 0, such as 0.5 or 1/3",
        )
    return factor


def _text(fields: Fields) -> str:
    """Return a rule in the form of a single line, without its reason."""
    key = " ".join(",".join(_tuple(part)) for part in (fields.kind, fields.name, fields.slot))
    call = f" [{fields.call}]" if fields.call is not None else ""
    limits = ("steps", "only", "factor", "rel_l2", "cause")
    said = [f" {field}={getattr(fields, field)}" for field in limits if getattr(fields, field)]
    return key + call + "".join(said)
