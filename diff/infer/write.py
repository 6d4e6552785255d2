"""Writes what inference has found as a layout file that a person can read and correct."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tensortrace.diff.infer.found import Body, Found, FoundRename, FoundRule


def write_layout(found: Found, *, a: str, b: str) -> str:
    """Return the text of a layout file: the evidence stands above each rule, what is open at the top."""
    lines = [f"# Layout of {b}, found from {a} by `trace layout`."]
    lines += [f"# {note}" for note in found.notes]
    lines += [f"# SWAP {swap}" for swap in found.swaps]
    lines += [f"# DOUBT {doubt}" for doubt in found.doubts]
    lines += [f"# UNDECIDED {name}" for name in found.undecided]
    lines += ["format = 1"]
    lines += [f"data = {_list(found.data)}"] if found.data else []
    lines += [f"stages = {_list(found.stages)}"] if found.stages else []
    lines += ["", "[axes]", *(f"{axis} = {size}" for axis, size in found.axes.items())]
    for rename in found.renames:
        lines += ["", *_rename(rename)]
    for group in _grouped(found.rules):
        lines += ["", *_rule(group)]
    return "\n".join(lines) + "\n"


def _grouped(rules: Iterable[FoundRule]) -> list[list[FoundRule]]:
    """Return neighbours in meaning together: equal bodies, slots and kinds share a rule."""
    groups: dict[tuple[Body, str, tuple[str, ...]], list[FoundRule]] = {}
    for rule in rules:
        key = (rule.body, rule.slot, rule.kinds)
        if rule.body.whole:
            groups[rule.body, f"{rule.slot} {rule.name}", rule.kinds] = [rule]
        else:
            groups.setdefault(key, []).append(rule)
    return list(groups.values())


def _rename(rename: FoundRename) -> list[str]:
    lines = [f"# {rename.evidence}"] if rename.evidence else []
    lines += ["[[rename]]", f"from = {_text(rename.glob)}", f"to = {_text(rename.to)}"]
    if rename.at:
        lines.append("at = { " + ", ".join(f"{axis} = {n}" for axis, n in rename.at) + " }")
    tables: dict[str, list[str]] = {}
    for number, axis, table in rename.add:
        tables.setdefault(number, []).append(f"{axis} = [{', '.join(map(str, table))}]")
    if tables:
        texts = (f"{number} = {{ {', '.join(own)} }}" for number, own in tables.items())
        lines.append(f"add = {{ {', '.join(texts)} }}")
    return lines


def _rule(group: list[FoundRule]) -> list[str]:
    first = group[0]
    names = list(dict.fromkeys(rule.name for rule in group))
    evidence = list(dict.fromkeys(rule.evidence for rule in group))
    lines = [f"# {text}" for text in evidence[:3]]
    lines += ["[[rule]]", f"name = {_text(names[0]) if len(names) == 1 else _list(names)}"]
    lines += [f"kind = {_list(first.kinds)}"] if first.kinds else []
    lines += [f"slot = {_text(first.slot)}"] if first.slot != "*" else []
    lines.append(f"dims = {_text(first.body.dims)}")
    lines += [f"grad = {_text(first.body.grad)}"] if first.body.grad else []
    lines += [f"sizes = {_table(dict(first.body.sizes))}"] if first.body.sizes else []
    lines += [f"valid = {_table(dict(first.body.valid))}"] if first.body.valid else []
    if first.body.whole:
        lines.append(f"to = {{ {_text(names[0])} = {_text(first.body.whole)} }}")
    return lines


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _list(values: Iterable[str]) -> str:
    return "[" + ", ".join(map(_text, values)) + "]"


def _table(values: Mapping[str, int]) -> str:
    return "{ " + ", ".join(f"{name} = {number}" for name, number in values.items()) + " }"
