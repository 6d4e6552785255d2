"""Options that pyproject.toml sets: tables ``[tool.tensortrace.COMMAND]``, keys as flags."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click

from tensortrace.cli.render.safe import safe
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.nearest import meant, nearest

FILE = "pyproject.toml"
TABLE = "tool.tensortrace"

Defaults = dict[str, object]
"""By the name of a parameter, what click takes where the command line says nothing."""


class Place(NamedTuple):
    """Where a value stands, for errors: ``pyproject.toml: [tool.tensortrace.diff] kinds``."""

    file: Path
    command: str
    key: str

    def __str__(self) -> str:
        return f"{self.file}: [{TABLE}.{self.command}] {safe(self.key)}"


def defaults(command: click.Command, ctx: click.Context, file: Path) -> Defaults:
    """Return what ``file`` sets of a command's options; nothing where there is no such file or table.

    Raises BadRequest for a file that is no TOML, a table of no command, a key of no option, and a value that
    the option does not take.
    """
    tables = _tables(file)
    assert ctx.parent is not None, "a subcommand"
    group = ctx.parent.command
    assert isinstance(group, click.Group)
    known = group.list_commands(ctx.parent)
    for name, table in tables.items():
        if name not in known or not isinstance(table, dict):
            where = f"{file}: [{TABLE}] {safe(name)}"
            likely = meant(nearest(name, known)) or f"write [{TABLE}.diff] and a key of `trace diff` below it"
            raise BadRequest(f"{where}: no such command", remedy=likely)
    assert command.name is not None
    options = _options(command)
    found: Defaults = {}
    for key, value in tables.get(command.name, {}).items():
        place = Place(file, command.name, key)
        if key not in options:
            likely = meant(nearest(key, options)) or f"`trace {command.name} --help` lists them"
            raise BadRequest(f"{place}: no such option", remedy=likely)
        found |= _value(place, options[key], ctx, value)
    return found


def used(command: click.Command, ctx: click.Context) -> str:
    """Return which options the file set and the command line did not, as they would be given; "" for none."""
    words: list[str] = []
    for option in command.params:
        assert option.name is not None
        if ctx.get_parameter_source(option.name) is not click.core.ParameterSource.DEFAULT_MAP:
            continue
        assert ctx.default_map is not None
        value = ctx.default_map[option.name]
        if not isinstance(option, click.Option) or not option.is_flag:
            for one in value if isinstance(value, list) else [value]:
                words += [_flag(option), one]
        elif value is True or value == option.flag_value:
            words.append(_flag(option))
    return safe(shlex.join(words), limit=400)


def _flag(option: click.Parameter) -> str:
    return next((flag for flag in option.opts if flag.startswith("--")), option.opts[0])


def _tables(file: Path) -> Mapping[str, dict[str, object]]:
    try:
        document: object = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise BadRequest(f"{file}: cannot be read", found=error.strerror or str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"{file}: not TOML: {safe(str(error))}") from error
    for name in TABLE.split("."):
        document = document.get(name, {}) if isinstance(document, dict) else {}
    if not isinstance(document, dict):
        raise BadRequest(f"{file}: {TABLE}", found=safe(repr(document)), expected=f"a table [{TABLE}.diff]")
    return document


def _options(command: click.Command) -> dict[str, click.Option]:
    """Return a command's options by the names that its flags have without their dashes."""
    return {
        flag.removeprefix("--"): param
        for param in command.params
        if isinstance(param, click.Option)
        for flag in param.opts
        if flag.startswith("--")
    }


def _value(place: Place, option: click.Option, ctx: click.Context, value: object) -> Defaults:
    """Return what a value sets; raises BadRequest where the option does not take it."""
    assert option.name is not None
    if option.is_flag:
        if not isinstance(value, bool):
            raise BadRequest(str(place), found=safe(repr(value)), expected="true or false")
        if option.is_bool_flag:
            return {option.name: value}
        return {option.name: option.flag_value} if value else {}
    given = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not option.multiple:
        raise BadRequest(str(place), found=safe(repr(value)), expected="one value, as on the command line")
    if unfit := [one for one in given if isinstance(one, bool) or not isinstance(one, str | int | float)]:
        raise BadRequest(str(place), found=safe(repr(unfit[0])), expected="a string or a number")
    taken: object = [str(one) for one in given] if option.multiple else str(value)
    try:
        option.type_cast_value(ctx, taken)
    except click.BadParameter as error:
        problem = safe(error.message, limit=400)
        raise BadRequest(str(place), found=safe(repr(value)), remedy=problem) from error
    return {option.name: taken}
