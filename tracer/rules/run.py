"""The layout of one run, from its file: names, meshes, and where each local tensor lies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from tensortrace.tracer.mesh import coordinate
from tensortrace.tracer.rules.document import (
    Document,
    LayoutFileError,
    Rule,
    RuleFields,
    check_document,
    parse_document,
    read_text,
)
from tensortrace.tracer.rules.names import BadName, Rename, compile_glob, fill, match_glob
from tensortrace.tracer.rules.pattern import Blocks, Leaf, Pattern, Product, Term, leaves, parse_pattern
from tensortrace.tracer.rules.place import Copies, Grid, Part, Placing, Unfit, solve
from tensortrace.tracer.types import Boundary, Box, Kind, Mesh, Placement, Shard

MESH = "layout"
"""The key of the mesh that a layout file declares."""

SAMPLE_KINDS = frozenset({Kind.INPUT, Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.LOSS})
GRADIENT_KINDS = frozenset({Kind.LOCAL_GRAD, Kind.ACTIVATION_GRAD})
"""Kinds that a rule's ``grad`` describes."""


@dataclass(frozen=True)
class View:
    """A local tensor, or a block of it, as a part of a global tensor.

    ``local_shape`` is of what ``take`` returns for the local tensor; ``whole`` tells that this is the local
    tensor itself. ``shard`` speaks of what ``take`` returns. Of equal tensors, views whose ``picked`` are
    equal are equal.
    """

    name: str
    slot: str
    shard: Shard
    local_shape: tuple[int, ...]
    whole: bool
    picked: str
    take: Callable[[np.ndarray], np.ndarray] = field(compare=False)


@dataclass(frozen=True)
class RunLayout:
    """What a layout file says of one run. Ranks are laid out over the axes in order, the last the fastest."""

    path: Path
    mesh: Mesh
    axes_of_data: tuple[str, ...]
    axes_of_stages: tuple[str, ...]
    renames: tuple[Rename, ...]
    rules: tuple[Rule, ...]
    _placed: dict[object, list[tuple[str | None, View]]] = field(default_factory=dict, compare=False)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read and check a layout file; raises LayoutFileError naming file, rule and field."""
        return cls.parse(read_text(Path(path)), Path(path))

    @classmethod
    def parse(cls, text: bytes, path: Path) -> Self:
        """Check what was read from a layout file; raises as ``load``. ``path`` is for complaints."""
        return cls.of(parse_document(path, text), path)

    @classmethod
    def of(cls, document: Document, path: Path) -> Self:
        """Return the layout that a document describes; raises as ``load``. ``path`` is for complaints."""
        renames, rules = check_document(path, document)
        sizes = tuple(document.axes.values())
        mesh = Mesh(tuple(document.axes), sizes, tuple(range(math.prod(sizes))))
        return cls(path, mesh, document.data, document.stages, renames, rules)

    def check_world(self, world_size: int) -> None:
        """Raise LayoutFileError where the axes don't multiply to the run's number of ranks."""
        if (made := len(self.mesh.ranks)) != world_size:
            sizes = " x ".join(f"{n} {size}" for n, size in zip(self.mesh.axes, self.mesh.shape, strict=True))
            raise LayoutFileError(
                f"{self.path}: axes: {sizes or 'none'} make {made} ranks", expected=f"{world_size}",
                remedy="correct the sizes in [axes], or add the axis that is missing",
            )  # fmt: skip

    def canonical(self, name: str, rank: int) -> str:
        """Return the name in the unpartitioned program of what a rank calls ``name``; '' if it has none."""
        where = self.where(rank)
        try:
            for rename in self.renames:
                name = rename.apply(name, where)
        except BadName as error:
            raise LayoutFileError(f"{self.path}: rename of {error}", found=f"on rank {rank}") from error
        return name

    def names(self, name: str, rank: int) -> tuple[str, ...]:
        """Return the unpartitioned program's names of what a rank's parameter holds parts of."""
        canonical = self.canonical(name, rank)
        rule = self.rule(Kind.PARAM, "model", canonical)
        match = rule.match(canonical) if rule else None
        if rule is None or match is None or not rule.to:
            return (canonical,)
        return tuple(fill(target, match, match.groupdict()) for target, _ in rule.to)

    def rule(self, kind: Kind, slot: str, name: str) -> Rule | None:
        """Return the first rule for a boundary of this canonical name, None where there is none."""
        for rule in self.rules:
            if rule.written.kind and kind not in rule.written.kind:
                continue
            if match_glob(rule.slot, slot) and rule.match(name):
                return rule
        return None

    def names_exactly(self, entry: Boundary, canonical: str) -> bool:
        """Tell whether the rule for a boundary names it alone, without a wildcard."""
        rule = self.rule(entry.kind, entry.slot, canonical)
        return rule is not None and canonical in rule.written.globs

    def shares(self, kind: Kind, slot: str, name: str) -> bool:
        """Tell whether some blocks of a boundary's tensor are split over an axis and others are not."""
        rule = self.rule(kind, slot, name)
        return rule is not None and (rule.grad if kind in GRADIENT_KINDS else rule.value).shares()

    def stated(self, text: str, kind: Kind, name: str, rank: int, local_shape: tuple[int, ...]) -> Shard:
        """Return where a local tensor lies of which ``text`` says so, in the terms of a rule's ``dims``.

        Raises BadPattern where it says nothing that can be understood, LayoutFileError where the shape cannot
        be of it.
        """
        pattern = parse_pattern(text)
        rule = Rule(0, RuleFields(name=name, dims=text), (), compile_glob("*"), pattern, pattern, ())
        try:
            [(_, part)] = self._parts(rule, pattern, rank, local_shape, "all")
        except Unfit as error:
            raise LayoutFileError(f"shape {local_shape} on rank {rank}: {error}") from error
        return self._shard(pattern, part, kind, rank, local_shape)

    def shard(
        self, kind: Kind, slot: str, name: str, rank: int, local_shape: tuple[int, ...]
    ) -> Shard | None:
        """Return where a local tensor lies that is one part of one tensor, None where no rule says so.

        ``name`` is what the rank calls it. Raises LayoutFileError where the shape cannot be of the rule.
        """
        views = self.views(kind, slot, name, rank, local_shape)
        return views[0].shard if len(views) == 1 and views[0].whole else None

    def views(
        self,
        kind: Kind,
        slot: str,
        name: str,
        rank: int,
        local_shape: tuple[int, ...],
        *,
        copies: Copies = "first",
    ) -> tuple[View, ...]:
        """Return the parts of global tensors that a local tensor holds; empty where no rule is of it.

        ``name`` is what the rank calls it. With ``copies`` of "shared" it is the blocks that ranks hold equal
        copies of beside blocks that are split. Raises LayoutFileError where the shape cannot be of the rule.
        """
        canonical = self.canonical(name, rank)
        rule = self.rule(kind, slot, canonical)
        if rule is None or not canonical:
            return ()
        key = (rule.number, kind, rank, local_shape, copies)
        if key not in self._placed:
            self._placed[key] = self._all_placed(rule, kind, rank, local_shape, canonical, copies)
        match = rule.match(canonical)
        assert match is not None, canonical
        names = [
            canonical if to is None else fill(to, match, match.groupdict()) for to, _ in self._placed[key]
        ]
        found = zip(names, self._placed[key], strict=True)
        return tuple(replace(view, name=named, slot=slot) for named, (_, view) in found)

    def _all_placed(
        self, rule: Rule, kind: Kind, rank: int, shape: tuple[int, ...], name: str, copies: Copies
    ) -> list[tuple[str | None, View]]:
        """Return, by the target's name, views whose name and slot are still to be filled in."""
        if kind == Kind.OPTIMIZER_STATE and not shape:
            targets: list[str | None] = [target for target, _ in rule.to] or [None]
            pattern, parts = Pattern((), same=self.mesh.axes), [(target, _SCALAR) for target in targets]
        else:
            pattern = rule.grad if kind in GRADIENT_KINDS else rule.value
            parts = self._place(rule, pattern, rank, shape, (kind, name), copies)
        found = []
        for target, part in parts:
            shard = self._shard(pattern, part, kind, rank, shape)
            whole, picked = part.is_all(shape), part.picked()
            found.append((target, View("", "", shard, part.shape, whole, picked, part.take)))
        return found

    def _place(
        self,
        rule: Rule,
        pattern: Pattern,
        rank: int,
        shape: tuple[int, ...],
        what: tuple[Kind, str],
        copies: Copies,
    ) -> list[tuple[str | None, Part]]:
        text = rule.written.grad if pattern is not rule.value else rule.written.dims
        try:
            return self._parts(rule, pattern, rank, shape, copies)
        except Unfit as error:
            tensor = f"{what[0]} {what[1]} of shape {shape} on rank {rank}"
            raise LayoutFileError(
                f"{self.path}: {rule.title}: dims {text!r}: {tensor}: {error}",
                remedy="correct 'dims' or 'sizes', or give the tensor a rule of its own before this one",
            ) from error

    def _parts(
        self, rule: Rule, pattern: Pattern, rank: int, shape: tuple[int, ...], copies: Copies
    ) -> list[tuple[str | None, Part]]:
        grid = Grid(dict(zip(self.mesh.axes, self.mesh.shape, strict=True)), self.where(rank))
        terms = pattern.spread(len(shape))
        if terms is None:
            raise Unfit(f"found {len(shape)} dimensions, expected {len(pattern.dims)}")
        sizes = solve(terms, shape, rule.written.sizes, grid)
        placing = Placing(terms, sizes, rule.written.valid, grid, pattern.partial, copies)
        if not rule.to:
            return [(None, part) for part in placing.parts(Pattern(tuple(map(_bare, terms))))]
        return [(target, part) for target, to in rule.to for part in placing.parts(to)]

    def _shard(
        self, pattern: Pattern, part: Part, kind: Kind, rank: int, local_shape: tuple[int, ...]
    ) -> Shard:
        terms = pattern.spread(len(local_shape)) or ()
        dim_of = {s.axis: dim for dim, term in enumerate(terms) for leaf in leaves(term) for s in leaf.splits}
        placements = tuple(
            self._placement(axis, size, pattern, dim_of, kind)
            for axis, size in zip(self.mesh.axes, self.mesh.shape, strict=True)
        )
        whole = not dim_of and all(
            r == (range(n),) for r, n in zip(part.held, part.global_shape, strict=True)
        )
        boxes = tuple(
            Box(tuple(r.start for r in runs), tuple(len(r) for r in runs))
            for runs in itertools.product(*part.held)
        )
        where = coordinate(self.mesh, rank)
        assert where is not None, rank
        return Shard(MESH, where, placements, part.global_shape, () if whole else boxes)

    def _placement(
        self, axis: str, size: int, pattern: Pattern, dim_of: Mapping[str, int], kind: Kind
    ) -> Placement:
        if axis in pattern.partial:
            return Placement("partial", op=pattern.partial[axis])
        if axis in dim_of:
            return Placement("shard", dim=dim_of[axis])
        if axis in self.axes_of_data and axis not in pattern.axes():
            if kind in SAMPLE_KINDS:
                return Placement("data")
            if kind == Kind.LOCAL_GRAD:
                return Placement("partial", op="sum")
        return Placement("replicate")

    def stage(self, rank: int) -> tuple[int, int]:
        """Return a rank's stage and the number of stages: one where no axis is of stages."""
        where, number, count = self.where(rank), 0, 1
        for axis, size in zip(self.mesh.axes, self.mesh.shape, strict=True):
            if axis in self.axes_of_stages:
                number, count = number * size + where[axis], count * size
        return number, count

    def where(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate by axis; raises LayoutFileError where the axes don't reach it."""
        found = coordinate(self.mesh, rank)
        if found is None:
            raise LayoutFileError(
                f"{self.path}: axes", found=f"{len(self.mesh.ranks)} ranks", expected=f"rank {rank} too"
            )
        return dict(zip(self.mesh.axes, found, strict=True))


_SCALAR = Part((), (), (), (), (), ())


def _bare(term: Term) -> Term:
    """Return a term without its splits: the dimension of the whole tensor."""
    if isinstance(term, Leaf):
        return Leaf(term.name)
    if isinstance(term, Product):
        return Product(tuple(map(_bare, term.factors)))
    return Blocks(tuple(map(_bare, term.blocks)))
