"""Infers a layout: parameters by content at init, then activations by value in the first microbatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tensortrace.diff.infer import params, passes
from tensortrace.diff.infer.constants import changes, fits
from tensortrace.diff.infer.content import Lines, Match, is_constant
from tensortrace.diff.infer.context import Context, find_context
from tensortrace.diff.infer.experts import Ownership, find_experts, lay_out
from tensortrace.diff.infer.found import Found, FoundRename, FoundRule, with_axis
from tensortrace.diff.infer.grid import CONTEXT, DATA, PART, SHARDED, STAGE, RankGrid, find_grid, split_data
from tensortrace.diff.infer.names import glob_of, offset_renames, offsets_of, other_renames
from tensortrace.diff.infer.rules import Guess, merged, rules_of
from tensortrace.diff.infer.runs import Recorded, Slot, recorded, whole_params
from tensortrace.diff.infer.values import CLOSE, distance, total
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.rules.names import Rename, compile_glob
from tensortrace.tracer.types import ROOT, Entry, Kind

Holder = tuple[Recorded, Entry]


def find_layout(a: Trace, b: Trace) -> Found:
    """Return the layout of ``b`` whose parameters at init are parts of ``a``'s.

    Raises BadRequest where ``a`` is partitioned itself, where either lacks ``init``, or where the ranks of
    ``b`` make no grid.
    """
    return _Search(recorded(a, "a"), recorded(b, "b")).run()


class _Search:
    """One inference: names first, then the grid, then rules."""

    def __init__(self, a: Sequence[Recorded], b: Sequence[Recorded]) -> None:
        self.a, self.b = a, b
        self.whole = {name: own.read(entry) for name, (own, entry) in whole_params(a).items()}
        self.found = Found()
        self.matches: dict[tuple[int, str], Match] = {}
        self.placed: dict[str, params.Placed] = {}
        self.renames: dict[int, list[Rename]] = {}
        self.grid = RankGrid({}, {own.rank: {STAGE: 0, DATA: 0, PART: 0} for own in b})
        self.by_rank = {own.rank: own for own in b}
        self.evidence: dict[str, str] = {}
        self.context: Context | None = None
        self.reference: tuple[int, passes.Reference] | None = None

    def run(self) -> Found:
        """Fill in everything and return it."""
        pairs = self._match_content()
        names = {own.rank: list(own.params) for own in self.b}
        if (ownership := find_experts(pairs, names)) and self._all_whole():
            self._lay_out_experts(ownership)
            return self.found
        self._find_names(pairs)
        self._find_grid()
        self.context = self._find_context()
        cell = [self.by_rank[r] for r in self.grid.where if self.grid.where[r][DATA] == 0]
        if self.context:
            self.reference = self.context.microbatch, self.context.reference
        else:
            self.reference = passes.find_reference(self.a, cell)
        if self.reference is None:
            self.found.notes.append(
                "no pass of a has the rows of b's first microbatch: activations have no rules"
            )
        self._place_params()
        if self._parts_are_of_data():
            self._rules_of_params(split_only=True)
            return self._data_that_splits()
        self._rules_of_params()
        self._rules_of_passes()
        return with_axis(self.found, PART, CONTEXT) if self.context else self.found

    def _parts_are_of_data(self) -> bool:
        """Tell whether ranks that hold parts of parameters were given rows of their own, as under ZeRO."""
        if PART not in self.grid.axes or self.context:
            return False
        line = [self.by_rank[rank] for rank in self.grid.line(PART)]
        own = [passes.find_reference(self.a, [rank]) for rank in line]
        given = [passes.ids_of(rank, found[0]) for rank, found in zip(line, own, strict=True) if found]
        different = {ids.tobytes() for ids in given if ids is not None}
        return len(different) == len(line)

    def _data_that_splits(self) -> Found:
        ranks = ", ".join(map(str, self.grid.line(PART)))
        axis = DATA if DATA not in self.grid.axes else SHARDED
        self.found.data = (*self.found.data, PART)
        self.found.notes.append(
            f"axis {axis}: ranks {ranks} hold parts of parameters and were given different inputs"
        )
        return with_axis(self.found, PART, axis)

    def _all_whole(self) -> bool:
        """Tell whether no rank holds a part of a parameter."""
        return all(
            match.dim == match.of and match.is_whole(self.whole[match.name].shape[match.of])
            for match in self.matches.values()
        )

    def _lay_out_experts(self, ownership: Ownership) -> None:
        known = passes.find_reference(self.a, self.b)

        def off(module: str) -> float | None:
            if known is None:
                return None
            microbatch, reference = known
            slot = (Kind.ACTIVATION, module, "out")
            own = next((o for o in self.b if slot in o.passes[microbatch]), None)
            whole = next(iter(reference.readings(slot)), None)
            if own is None or whole is None:
                return None
            return distance(own.read(own.passes[microbatch][slot]), whole, scaled=False)

        lay_out(self.found, ownership, self.b, off)

    def _find_context(self) -> Context | None:
        """Find ranks that hold equal parameters and parts of one sequence: they are the axis of parts."""
        if DATA not in self.grid.axes or PART in self.grid.axes:
            return None
        context = find_context(self.a, [self.by_rank[rank] for rank in self.grid.line(DATA)])
        if context is None:
            return None
        self.grid = split_data(self.grid, context.size)
        self.found.axes = self.grid.axes
        self.found.data = (DATA,) if DATA in self.grid.axes else ()
        ranks = ", ".join(map(str, self.grid.line(PART)))
        way = "an early and a late part each" if context.how == "zigzag" else "contiguous parts"
        self.found.notes = [note for note in self.found.notes if not note.startswith(f"axis {DATA}:")]
        self.found.undecided = [u for u in self.found.undecided if not u.startswith(f"axis {DATA}:")]
        self.found.notes.append(
            f"axis {CONTEXT}: ranks {ranks} hold equal parameters and were given {way} of the rows of a"
        )
        if context.swap:
            self.found.swaps.append(f"positions of the input: {context.swap}")
        return context

    def _match_content(self) -> dict[int, list[tuple[str, str]]]:
        """Match every parameter that says anything; return each rank's pairs of local and whole name."""
        lines = Lines(self.whole)
        pairs: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for own in self.b:
            for name, entry in own.params.items():
                value = own.read(entry)
                if not is_constant(value) and (match := lines.find(value, name)):
                    self.matches[own.rank, name] = match
                    pairs[own.rank].append((name, match.name))
        return pairs

    def _find_names(self, pairs: dict[int, list[tuple[str, str]]]) -> None:
        offsets = {rank: offsets_of(own) for rank, own in pairs.items()}
        keys = list(dict.fromkeys(tuple(sorted(own.items())) for own in offsets.values()))
        stages = {rank: keys.index(tuple(sorted(own.items()))) for rank, own in offsets.items()}
        others = other_renames(sorted({pair for own in pairs.values() for pair in own}))
        self.found.renames = [*offset_renames(offsets, stages), *others]
        for own in self.b:
            stage = {STAGE: stages.get(own.rank, 0)}
            self.renames[own.rank] = [_local(rename, stage) for rename in self.found.renames]

    def name(self, rank: int, local: str) -> str:
        """Return the whole program's name of what a rank calls ``local``."""
        for rename in self.renames[rank]:
            local = rename.apply(local, {})
        return local

    def _find_grid(self) -> None:
        layers, parts = {}, {}
        for own in self.b:
            names = {local: self.name(own.rank, local) for local in own.params}
            layers[own.rank] = frozenset(names.values())
            firsts = []
            for local in sorted(names, key=names.__getitem__):
                match = self.matches.get((own.rank, local))
                kept = match.index[match.index >= 0] if match else np.zeros(0, dtype=np.int64)
                firsts.append((int(kept.min()) if len(kept) else -1) if match else -1)
            parts[own.rank] = tuple(firsts)
        self.grid = find_grid(layers, parts)
        self.found.axes = self.grid.axes
        self.found.stages = (STAGE,) if STAGE in self.grid.axes else ()
        if DATA in self.grid.axes:
            self.found.data = (DATA,)
            self.found.notes.append(self._data_evidence())

    def _data_evidence(self) -> str:
        line = [self.by_rank[rank] for rank in self.grid.line(DATA)]
        digests = [
            tuple(
                e.digest
                for (kind, name, _), e in own.passes.get(0, {}).items()
                if (kind, name) == (Kind.INPUT, ROOT)
            )
            for own in line
        ]
        ranks = ", ".join(str(own.rank) for own in line)
        if len(set(digests)) == len(digests):
            return f"axis {DATA}: ranks {ranks} hold equal parameters and were given different inputs"
        self.found.undecided.append(
            f"axis {DATA}: ranks {ranks} hold equal parameters and equal inputs: data or copies?"
        )
        return f"axis {DATA}: ranks {ranks} hold equal parameters; some were given equal inputs"

    def _holders(self, table: str) -> dict[str, dict[int, list[Holder]]]:
        """Return by whole name and stage the entries along the axis of parts, of the first data copy."""
        found: dict[str, dict[int, list[Holder]]] = defaultdict(dict)
        for stage in {at[STAGE] for at in self.grid.where.values()}:
            line = self.grid.line(PART, **{STAGE: stage})
            for rank in line:
                own = self.by_rank[rank]
                for local, entry in getattr(own, table).items():
                    found[self.name(rank, local)].setdefault(stage, []).append((own, entry))
        return found

    def _place_params(self) -> None:
        known_names = {name: by for name, by in self._holders("params").items() if name in self.whole}
        for name in self._holders("params").keys() - known_names.keys():
            self.found.undecided.append(f"{name}: no parameter of a has this name or content")
        says_nothing = {name for name in known_names if is_constant(self.whole[name])}
        for name in sorted(known_names, key=lambda name: name in says_nothing):  # these may lie as others do
            by_stage = known_names[name]
            line = next(iter(by_stage.values()))
            if name in says_nothing and self._place_constant(name, line):
                continue
            self._place_by_content(name, line, next(iter(by_stage)))

    def _place_by_content(self, name: str, line: list[Holder], stage: int) -> None:
        shapes = {name: value.shape for name, value in self.whole.items()}
        matches = [self.matches.get((own.rank, entry.name)) for own, entry in line]
        known = [m for m in matches if m is not None]
        if not known:
            matches = [params.constant_match(name, own.read(entry), shapes) for own, entry in line]
        elif len(known) < len(matches):
            matches = [
                m or _nothing_of(known[0], own, entry) for m, (own, entry) in zip(matches, line, strict=True)
            ]
        whole = [m for m in matches if m is not None]
        placed = params.place(whole, shapes[name]) if len(whole) == len(matches) else None
        if placed is None:
            self.found.undecided.append(f"{name}: {_why(line, known, shapes[name])}")
            return
        self.placed[name] = self._judged(name, placed, stage)

    def _place_constant(self, name: str, line: Sequence[Holder]) -> bool:
        """Place a parameter that is constant at init by what the first step made of it; tell if it was.

        What lies on all ranks whole is left to its shape; there the first update only bears that out.
        """
        candidates = [placed.candidate for placed in self.placed.values() if placed.split]
        theirs = next((own for own in self.a if name in own.params), None)
        for what, parts, whole, scaled in changes(theirs, name, line) if theirs else ():
            if all(part.shape == whole.shape for part in parts):
                same = max(distance(part, whole, scaled=scaled) for part in parts) < CLOSE
                if same and np.any(whole):
                    self.evidence[name] = f"constant at init: whole by {what}"
                return False
            found = fits(parts, whole, candidates, scaled=scaled)
            if not found:
                continue
            placed = found[0].placed
            ways = {fit.placed.term.text for fit in found} if not placed.swap else set()
            if len(ways) > 1:
                self.found.undecided.append(
                    f"{name}: constant at init, and {what} fits {' and '.join(sorted(ways))}"
                )
                return True
            if placed.swap:
                self.found.swaps.append(f"{name}: {placed.swap}; constant at init, but {what} tells")
            self.placed[name] = replace(placed, swap="")
            self.evidence[name] = f"constant at init: by {what}"
            return True
        return False

    def _judged(self, name: str, placed: params.Placed, stage: int) -> params.Placed:
        """Return a placement; a permutation is one only if the module's activations agree under it."""
        if not placed.swap:
            return placed
        error = self._module_error(name, stage)
        if placed.term.permutes and error is not None and error < CLOSE:
            return replace(placed, swap="")
        told = (
            "its activations were not recorded"
            if error is None
            else f"the output then differs by {error:.2g}"
        )
        self.found.swaps.append(f"{name}: {placed.swap}; {told}")
        return params.straightened(placed)

    def _module_error(self, name: str, stage: int) -> float | None:
        """Return by how much the output of the module around a parameter's own is off, None if unknown."""
        if self.reference is None:
            return None
        microbatch, reference = self.reference
        around = name.rsplit(".", 2)[0] if name.count(".") > 1 else ROOT
        line = [self.by_rank[rank] for rank in self.grid.line(PART, **{STAGE: stage})]
        parts = []
        for own in line:
            for (kind, local, slot), entry in own.passes[microbatch].items():
                if kind == Kind.ACTIVATION and slot == "out" and self.name(own.rank, local) == around:
                    parts.append(own.read(entry))
        whole = next(iter(reference.readings((Kind.ACTIVATION, around, "out"))), None)
        if whole is None or not parts:
            return None
        errors = [distance(np.concatenate(parts, axis=d), whole, scaled=False) for d in range(parts[0].ndim)]
        return min(
            [distance(parts[0], whole, scaled=False), distance(total(parts), whole, scaled=False), *errors]
        )

    def _rules_of_params(self, *, split_only: bool = False) -> None:
        grads = self._holders("grads")
        grouped: dict[str, list[FoundRule]] = defaultdict(list)
        for name, placed in self.placed.items():
            if split_only and not placed.split:
                continue
            marks = self._gradient_marks(name, placed, grads.get(name, {}))
            constant = is_constant(self.whole[name])
            evidence = "by shape: constant at init" if constant else "by content at init"
            evidence = self.evidence.get(name, evidence)
            body = params.body_of(placed, self.grid, marks)
            grouped[glob_of(name)].append(FoundRule(name, "*", (), body, evidence))
        self.found.rules += merged(grouped)

    def _gradient_marks(
        self, name: str, placed: params.Placed, by_stage: dict[int, list[Holder]]
    ) -> list[str]:
        """Return along which axes the ranks' own gradients add up to the whole one."""
        marks = []
        first = next(iter(by_stage.values()), [])
        if PART in self.grid.axes and not placed.split and len({e.digest for _, e in first}) > 1:
            marks.append(f"partial:{PART}")
        if len(by_stage) > 1 and len({line[0][1].digest for line in by_stage.values()}) > 1:
            marks.append(f"partial:{STAGE}")
        return marks

    def _rules_of_passes(self) -> None:
        if self.reference is None:
            return
        microbatch, reference = self.reference
        found: dict[tuple[str, str, str], dict[Kind, Guess]] = defaultdict(dict)
        agree = self._copies_stay_copies()
        for stage in sorted({at[STAGE] for at in self.grid.where.values()}):
            for slot, parts in self._boundaries(stage, microbatch).items():
                body = self._body(slot, parts, reference, stage)
                agree = agree and (slot[0] != Kind.ACTIVATION_GRAD or (body is not None and body.by_value))
                if body:
                    found[slot[1], slot[2], "loss" if slot[0] == Kind.LOSS else "pass"][slot[0]] = body
        if PART in self.grid.axes:
            if not agree:
                self._doubt_sums(found)
            self.found.rules += merged(rules_of(found))

    def _copies_stay_copies(self) -> bool:
        """Tell whether parameters that ranks hold copies of are still copies after the first update."""
        for name, by_stage in self._holders("later").items():
            placed = self.placed.get(name)
            if placed and not placed.split:
                for line in by_stage.values():
                    if len({entry.digest for _, entry in line}) > 1:
                        return False
        return True

    def _doubt_sums(self, found: dict[tuple[str, str, str], dict[Kind, Guess]]) -> None:
        """Take no gradients for contributions to a sum where nothing shows that anybody adds them up.

        A sum that backward forgot looks like a layout, except that what is computed from it is wrong.
        """
        for (name, slot, _), by_kind in found.items():
            value, gradient = by_kind.get(Kind.ACTIVATION), by_kind.get(Kind.ACTIVATION_GRAD)
            if not value or not gradient or not slot.startswith("out"):
                continue
            if f"same:{PART}" in value.body.dims and f"partial:{PART}" in gradient.body.dims:
                del by_kind[Kind.ACTIVATION_GRAD]
                self.found.doubts.append(
                    f"{name} {slot}: ranks hold copies of the value and contributions to its gradient, and "
                    "gradients that were computed from them are not a's: does backward add them up?"
                )

    def _boundaries(self, stage: int, microbatch: int) -> dict[Slot, list[Holder]]:
        found: dict[Slot, list[Holder]] = defaultdict(list)
        for rank in self.grid.line(PART, **{STAGE: stage}):
            own = self.by_rank[rank]
            for (kind, local, slot), entry in own.passes[microbatch].items():
                found[kind, self.name(rank, local), slot].append((own, entry))
        return found

    def _body(self, slot: Slot, parts: list[Holder], reference: passes.Reference, stage: int) -> Guess | None:
        if len(parts) < self.grid.axes.get(PART, 1):
            return None
        ndim = len(parts[0][1].local_shape)
        candidates = [placed.candidate for placed in self.placed.values() if placed.split]
        candidates += self.context.candidates() if self.context else []
        if found := passes.ways(parts, slot, reference, candidates):
            return Guess(passes.body_of(found[0], ndim, split_axis=PART in self.grid.axes), by_value=True)
        of_stages = (slot[1] == ROOT and slot[0] != Kind.ACTIVATION_GRAD) or slot[0] == Kind.LOSS
        if of_stages and STAGE in self.grid.axes:
            self._drop(slot[1], stage)
            return None
        own = [self.placed[p] for p in (f"{slot[1]}.weight", f"{slot[1]}.bias") if p in self.placed]
        like = own[0].candidate if own and own[0].split else None
        way = passes.way_by_shape(parts, slot, reference, like, candidates)
        return (
            Guess(passes.body_of(way, ndim, split_axis=PART in self.grid.axes), by_value=False)
            if way
            else None
        )

    def _drop(self, name: str, stage: int) -> None:
        """Note that what a stage's own root returns, or starts backward from, is not of the whole program."""
        if stage == self.grid.axes[STAGE] - 1:
            return
        evidence = "at this stage it is no boundary of the whole program"
        rename = FoundRename(name, "", ((STAGE, stage),), evidence=evidence)
        if rename not in self.found.renames:
            self.found.renames.append(rename)


def _local(rename: FoundRename, where: dict[str, int]) -> Rename:
    """Return a rename as it applies to ranks of one stage, without tables over the stage."""
    add = {number: {axis: (table[where[axis]],)} for number, axis, table in rename.add}
    return _At(compile_glob(rename.glob), rename.to, {}, add)


class _At(Rename):
    """A rename whose tables hold the one number of the rank's own coordinate."""

    def apply(self, name: str, where: object) -> str:
        """Return the new name; the coordinate is known."""
        return super().apply(name, {axis: 0 for tables in self.add.values() for axis in tables})


def _nothing_of(like: Match, own: Recorded, entry: Entry) -> Match:
    """Return the match of a tensor that is padding from end to end."""
    length = own.read(entry).shape[like.dim]
    return replace(like, index=np.full(length, -1, dtype=np.int64))


def _why(line: Sequence[Holder], known: Sequence[Match], shape: tuple[int, ...]) -> str:
    if not known:
        return f"its content is in no parameter of a ({shape}); do the runs start from the same state?"
    ranks = ", ".join(str(own.rank) for own, _ in line)
    found = sum(int((m.index >= 0).sum()) for m in known)
    return f"{found} lines of ranks {ranks} are {known[0].name}'s, but in no regular order"
