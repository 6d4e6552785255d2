"""Strict JSON to records: no duplicate keys, no NaN, no unknown keys, nothing huge."""

from __future__ import annotations

import json
import math
from typing import TypeVar

import msgspec

R = TypeVar("R", bound=msgspec.Struct)


class BadJson(Exception):
    """Text that isn't the record it should be; the message names the field."""


def parse_object(text: bytes) -> dict[str, object]:
    """Return a JSON object; raise BadJson for anything that two readers could understand differently."""
    try:
        found: object = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise BadJson(f"not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise BadJson("not a JSON object")
    return found


def to_record(found: dict[str, object], record: type[R], ignorable: tuple[str, ...] = ()) -> R:
    """Return the record that a JSON object states, leaving out unknown keys listed as ignorable.

    An ignorable key is a dotted path (``meta.note``). Raises BadJson naming the field.
    """
    for path in ignorable:
        parents = path.split(".")
        if parents[0] not in record.__struct_fields__ or len(parents) > 1:
            _drop(found, parents)
    try:
        return msgspec.convert(found, record)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadJson(str(error)) from error


def _drop(found: object, path: list[str]) -> None:
    for name in path[:-1]:
        found = found.get(name) if isinstance(found, dict) else None
    if isinstance(found, dict):
        found.pop(path[-1], None)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!r} occurs twice")
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is out of range")
    return number
