"""From pairs of names that hold the same content to the renames that explain them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from tensortrace.diff.infer.found import FoundRename
from tensortrace.diff.infer.grid import STAGE


def glob_of(name: str) -> str:
    """Return a name with its first number, the layer's, left open."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return name if at is None else ".".join([*parts[:at], "{n}", *parts[at + 1 :]])


def offset_of(local: str, whole: str) -> tuple[str, int] | None:
    """Return the prefix of the layer's number and what is to be added to it, None for any other change."""
    own, other = local.split("."), whole.split(".")
    different = [i for i, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]]
    first = next((i for i, part in enumerate(own) if part.isdecimal()), None)
    if len(own) != len(other) or first is None or (different and different != [first]):
        return None
    return (".".join(own[:first]), int(other[first]) - int(own[first])) if other[first].isdecimal() else None


def offsets_of(pairs: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return by prefix what one rank's layer numbers lack; prefixes of which pairs disagree are left out."""
    found: dict[str, set[int]] = defaultdict(set)
    for local, whole in pairs:
        if offset := offset_of(local, whole):
            found[offset[0]].add(offset[1])
    return {prefix: numbers.pop() for prefix, numbers in found.items() if len(numbers) == 1}


def other_renames(pairs: Iterable[tuple[str, str]]) -> list[FoundRename]:
    """Return renames for pairs that differ in more than a layer's number."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for local, whole in pairs:
        if local == whole or offset_of(local, whole):
            continue
        own, other = glob_of(local).split("."), glob_of(whole).split(".")
        while len(own) > 1 and len(other) > 1 and own[-1] == other[-1]:
            own, other = own[:-1], other[:-1]
        found[(".".join(own), ".".join(other))].append(local)
    order = sorted(found, key=lambda heads: -len(heads[0]))
    return [
        FoundRename(f"{own}*", f"{other}*", evidence=f"{', '.join(found[own, other][:3])} hold the same")
        for own, other in order
    ]


def offset_renames(offsets: Mapping[int, Mapping[str, int]], stages: Mapping[int, int]) -> list[FoundRename]:
    """Return renames from each rank's offsets by prefix; ``stages`` has each rank's stage."""
    found = []
    for prefix in sorted({p for own in offsets.values() for p in own}):
        by_stage = {stages[rank]: own[prefix] for rank, own in offsets.items() if prefix in own}
        if any(by_stage.values()):
            numbers = tuple(by_stage.get(stage, 0) for stage in range(max(stages.values()) + 1))
            glob = f"{prefix}.{{n}}*" if prefix else "{n}*"
            evidence = "the parameters of these layers are found under other numbers"
            found.append(FoundRename(glob, glob, (), (("n", STAGE, numbers),), evidence))
    return found
