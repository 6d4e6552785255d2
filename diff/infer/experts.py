"""Whether ranks own different experts: by their content, under whatever numbers ranks call them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tensortrace.diff.infer.found import Body, Found, FoundRename, FoundRule
from tensortrace.diff.infer.grid import DATA
from tensortrace.diff.infer.names import glob_of
from tensortrace.diff.infer.runs import Recorded
from tensortrace.diff.infer.values import CLOSE
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.types import Kind

EXPERT, OWNER = "{e}", "ep"


@dataclass(frozen=True)
class Ownership:
    """Which experts each rank owns, by the glob of their names up to the number.

    ``sets`` are the distinct sets of owned experts in order of the rank that first has them; ``of`` is each
    rank's set. ``numbers`` has, by glob and set, the whole program's number of each local number.
    """

    sets: int
    of: dict[int, int]
    numbers: dict[str, list[dict[int, int]]]

    @property
    def first(self) -> str:
        """The glob of the first layer's experts."""
        return next(iter(self.numbers))


def split_name(name: str) -> tuple[str, int] | None:
    """Return a name with its expert's number left open, and that number; None where it has none.

    It is the number behind a part that speaks of experts, else the last behind the layer's.
    """
    parts = name.split(".")
    at = [i for i, part in enumerate(parts) if part.isdecimal()]
    named = [i for i in at if i and "expert" in parts[i - 1].lower()]
    chosen = named[-1:] or at[1:][-1:]
    if not chosen:
        return None
    return ".".join([*parts[: chosen[0]], EXPERT, *parts[chosen[0] + 1 :]]), int(parts[chosen[0]])


def find_experts(
    pairs: Mapping[int, Sequence[tuple[str, str]]], names: Mapping[int, Sequence[str]]
) -> Ownership | None:
    """Return who owns which experts, from each rank's pairs of local and whole name and all its local names.

    None where ranks hold anything else apart (layers of stages), or no parameters apart.
    """
    owned = {rank: {whole for _, whole in pairs.get(rank, ())} for rank in names}
    everywhere = set.intersection(*owned.values())
    apart = {rank: own - everywhere for rank, own in owned.items()}
    if not any(apart.values()):
        return None
    keys = [frozenset(own) for own in apart.values()]
    distinct = list(dict.fromkeys(keys))
    globs = [{split_name(name)[0] if split_name(name) else "" for name in key} for key in distinct]  # type: ignore[index]
    if len(distinct) < 2 or any(found != globs[0] or "" in found for found in globs):
        return None
    if any(x & y for i, x in enumerate(distinct) for y in distinct[:i]):
        return None
    of = {rank: distinct.index(frozenset(own)) for rank, own in apart.items()}
    numbers: dict[str, list[dict[int, int]]] = defaultdict(lambda: [{} for _ in distinct])
    for rank, own in pairs.items():
        for local, whole in own:
            mine, theirs = split_name(local), split_name(whole)
            if whole in apart[rank] and mine and theirs:
                at = numbers[theirs[0]][of[rank]]
                if mine[0] != theirs[0] or at.setdefault(mine[1], theirs[1]) != theirs[1]:
                    return None
    return Ownership(len(distinct), of, dict(numbers))


OWNED = ("param", "optimizer_state", "local_grad", "reduced_grad", "unscaled_grad", "clipped_grad")


def lay_out(
    found: Found, ownership: Ownership, ranks: Sequence[Recorded], agrees: Callable[[str], float | None]
) -> None:
    """Fill in the layout of ranks that own experts and hold the rest whole.

    ``agrees`` returns by how much the output of a module is off, None where that is not known. A numbering
    that is no ownership in order is one only where the module around the experts agrees under it.
    """
    order = sorted(ownership.of)
    count, copies = ownership.sets, len(order) // ownership.sets
    sets = [ownership.of[rank] for rank in order]
    if sets == [n % count for n in range(len(order))]:
        axes = {DATA: copies, OWNER: count}
    elif sets == [n // max(copies, 1) for n in range(len(order))]:
        axes = {OWNER: count, DATA: copies}
    else:
        raise BadRequest(
            "the ranks of b make no grid", found=f"owners of experts {sets}",
            expected="owners in row-major order", remedy="write the layout file by hand",
        )  # fmt: skip
    found.axes = {axis: size for axis, size in axes.items() if size > 1}
    given = {_given(own) for own in ranks}
    if len(given) > 1:
        found.data = tuple(found.axes)
    told = "were given different inputs" if found.data else "were given the same inputs"
    ranks_text = ", ".join(map(str, order))
    found.notes.append(f"axis {OWNER}: ranks {ranks_text} own different experts, by content, and {told}")
    globs = sorted({glob_of(name.partition(EXPERT)[0] + "*") for name in ownership.numbers})
    for glob in globs:
        _number(found, ownership, glob, agrees)
        evidence = "by content at init: each expert is on one rank of the axis"
        found.rules.append(FoundRule(glob, "*", OWNED, Body(f"... own:{OWNER}"), evidence))
    marks = "" if found.data else f" same:{OWNER}"
    grad = None if found.data else f"... partial:{OWNER}"
    found.rules.append(
        FoundRule("*", "*", OWNED, Body(f"...{marks}", grad), "by content at init: equal on all ranks")
    )


def _number(found: Found, ownership: Ownership, glob: str, agrees: Callable[[str], float | None]) -> None:
    """Add the rename of one group of experts, whose ranks number them from 0, and report a swap."""
    tables = [t for name, t in ownership.numbers.items() if glob_of(name.partition(EXPERT)[0] + "*") == glob]
    first = tables[0]
    known = sorted(first[0])
    offsets = tuple(table.get(known[0], -1) - known[0] for table in first if known)
    straight = tuple(owner * len(known) for owner in range(len(first)))
    if any(table != first for table in tables) or any(sorted(table) != known for table in first):
        wrong = {pair for table in tables for own in table for pair in own.items() if pair[0] != pair[1]}
        if wrong:  # they have the whole program's numbers, but not its content
            told = ", ".join(f"{local} holds {whole}" for local, whole in sorted(wrong)[:4])
            found.swaps.append(f"{glob}: {told}")
        return
    by_local = tuple(first[0][local] - local - offsets[0] for local in known)
    regular = all(
        own[local] == local + offset + more
        for own, offset in zip(first, offsets, strict=True)
        for local, more in zip(known, by_local, strict=True)
    )
    if regular and not any(by_local) and offsets == straight:
        _rename(found, glob, offsets, ())
        return
    around = next(iter(ownership.numbers)).partition(EXPERT)[0].rstrip(".").rpartition(".")[0]
    error = agrees(around)
    if regular and known == list(range(len(known))) and error is not None and error < CLOSE:
        _rename(found, glob, offsets, by_local)
        return
    order = "; ".join(
        f"owner {owner} holds {', '.join(str(own[local]) for local in known)}"
        for owner, own in enumerate(first)
    )
    why = "its activations were not recorded" if error is None else f"the output then differs by {error:.2g}"
    found.swaps.append(f"{glob}: {order}; {why}")
    if known == list(range(len(known))):
        _rename(found, glob, straight, ())


def _rename(found: Found, glob: str, offsets: tuple[int, ...], by_local: tuple[int, ...]) -> None:
    name = glob.removesuffix("*") + EXPERT + ".*"
    add = [("e", OWNER, offsets)] + ([("e", "e", by_local)] if any(by_local) else [])
    evidence = "each rank numbers its own experts; by content they are these"
    found.renames.append(FoundRename(name, name, (), tuple(add), evidence))


def _given(own: Recorded) -> str:
    """Return a digest of what a rank's root was first given."""
    inputs = [e.digest for (kind, _, _), e in own.passes.get(0, {}).items() if kind == Kind.INPUT]
    return " ".join(inputs)
