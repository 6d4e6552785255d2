"""Names in layout files: globs on canonical names, and patterns that rename."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_INSIDE = re.escape(".") + "(.*)"
"""How the pattern of a glob ends that is of all that a module holds."""

MOST_CAPTURES = 4
LONGEST_NAME = 256
"""A longer name fits no glob: matching four captures in it could take minutes."""

_PART = re.compile(r"\*|\?|\{([A-Za-z_]\w*)\}")


class BadName(Exception):
    """A glob or rename that cannot be honoured; the text says what was found and what was expected."""


def compile_glob(glob: str) -> re.Pattern[str]:
    """Compile a glob; ``*`` matches dots too and is a group, ``{n}`` is one part of a dotted name.

    A ``*`` takes no more than it must, the last takes the rest: so a name is looked at once, however many
    there are. Raises BadName for a glob that nobody means, since traces bring their own.
    """
    parts = list(_PART.finditer(glob))
    if sum(part[1] is not None for part in parts) > MOST_CAPTURES:
        raise BadName(f"found {glob!r}, expected at most {MOST_CAPTURES} numbers in braces")
    last = max((n for n, part in enumerate(parts) if part[0] == "*"), default=-1)
    found, at, is_open = [], 0, False
    for number, part in enumerate(parts):
        found.append(re.escape(glob[at : part.start()]))
        at = part.end()
        if part[0] != "*":
            found.append("." if part[0] == "?" else rf"(?P<{part[1]}>[^.]+)")
            continue
        found.append(")" if is_open else "")
        is_open = number < last
        found.append("(?>(.*?)" if is_open else "(.*)")
    try:
        return re.compile("".join(found) + re.escape(glob[at:]), re.DOTALL)
    except re.error as error:
        raise BadName(f"found {glob!r}: {error}") from error


def match_glob(glob: re.Pattern[str], name: str) -> re.Match[str] | None:
    """Return how a whole name fits a compiled glob."""
    return glob.fullmatch(name) if len(name) <= LONGEST_NAME else None


def fill(template: str, match: re.Match[str], values: Mapping[str, str]) -> str:
    """Return a template with its ``*`` and ``{n}`` replaced by what a glob's match holds, in order."""
    named = match.re.groupindex.values()
    stars = iter([text for i, text in enumerate(match.groups(), 1) if i not in named])

    def replacement(part: re.Match[str]) -> str:
        return next(stars) if part[0] == "*" else values[part[1]]

    return _PART.sub(replacement, template)


def check_template(template: str, glob: str) -> None:
    """Raise BadName where a template uses what its glob doesn't capture."""
    known = compile_glob(glob)
    for part in _PART.finditer(template):
        if part[1] and part[1] not in known.groupindex:
            raise BadName(f"found {{{part[1]}}}, which {glob!r} does not capture")
    stars = known.groups - len(known.groupindex)
    if "?" in template or template.count("*") > stars:
        raise BadName(f"found {template!r}, which has more wildcards than {glob!r}")


@dataclass(frozen=True)
class Rename:
    """One rename: names that match ``glob`` become ``to``, on ranks at ``at`` along the axes it names.

    ``add`` maps a captured number to what is added to it: by axis, one number per coordinate; by another
    captured number, one per its value. Several add up.
    """

    glob: re.Pattern[str]
    to: str
    at: Mapping[str, int]
    add: Mapping[str, Mapping[str, tuple[int, ...]]]

    def apply(self, name: str, where: Mapping[str, int]) -> str:
        """Return the new name, or the old one where the rename does not concern it.

        ``where`` is the rank's coordinate by axis. Raises BadName for a number that is none or that the
        lists of ``add`` don't reach.
        """
        if any(where[axis] != number for axis, number in self.at.items()):
            return name
        match = match_glob(self.glob, name)
        if match is None and self.glob.pattern.endswith(_INSIDE):
            match = match_glob(self.glob, name + ".")  # ``experts.{e}.*`` means the module too
        if match is None:
            return name
        captured = match.groupdict()
        values = dict(captured)
        for number, tables in self.add.items():
            total = _number(captured[number], name)
            for key, table in tables.items():
                total += self._entry(key, table, captured, where, name)
            values[number] = str(total)
        return fill(self.to, match, values).removesuffix(".")

    def _entry(
        self,
        key: str,
        table: tuple[int, ...],
        captured: Mapping[str, str],
        where: Mapping[str, int],
        name: str,
    ) -> int:
        at = where[key] if key in where else _number(captured[key], name)
        if at >= len(table):
            raise BadName(f"{name}: {key} is {at}, but 'add' lists {len(table)} numbers")
        return table[at]


def _number(text: str, name: str) -> int:
    if not text.isdecimal():
        raise BadName(f"{name}: found {text!r} where 'add' expects a number")
    return int(text)
