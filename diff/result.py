"""The outcome of a diff: typed, ordered, with its JSON version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import msgspec
from msgspec import Struct

from tensortrace.diff.notebook import card, listing, table
from tensortrace.tracer.safe import safe

if TYPE_CHECKING:
    import pandas

SCHEMA = "tensortrace.diff/1"

Verdict = Literal["equivalent", "divergent", "incomplete"]
Role = Literal["origin", "receiver", "declared"]
StepLabel = int | Literal["init"]


class Outcome(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the records of a result; every field is written to JSON."""


class Where(Outcome, frozen=True):
    """A boundary as shown to people; ``step`` counts from 0 or is ``init``."""

    step: StepLabel
    microbatch: int | None
    kind: str
    name: str
    slot: str
    call: int

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else f", microbatch {self.microbatch}"
        call = f" call {self.call}" if self.call else ""
        return f"step {self.step}{microbatch}: {self.kind} {safe(self.name)} {safe(self.slot)}{call}"


class Metrics(Outcome, frozen=True):
    """How far two global tensors are apart, in float64.

    ``rel_l2`` is ‖a−b‖/‖a‖ (inf where ‖a‖ is 0 and they differ). ``projection`` is ⟨a,b⟩/⟨a,a⟩ with its
    standard error. ``max_abs_at`` is the global index of the greatest absolute difference, ``max_ulp`` the
    greatest difference in units of the last place of the coarser dtype. ``max_rel`` is the greatest
    ``|a−b|/|a|`` over elements where a is not 0, ``max_rel_at`` its global index. ``outside`` is the fraction
    of elements whose difference exceeds the allowed one.

    ``estimated`` numbers come from sketches, of which ``rel_l2_error`` is the error bar of ``rel_l2`` and
    ``rel_l2_least`` what it is at least; there are no greatest differences then.
    """

    elements: int
    equal: bool
    rel_l2: float | None = None
    abs_l2: float | None = None
    norm_a: float | None = None
    norm_b: float | None = None
    projection: float | None = None
    projection_error: float | None = None
    cosine: float | None = None
    max_abs: float | None = None
    max_abs_at: tuple[int, ...] = ()
    max_abs_a: float | None = None
    max_abs_b: float | None = None
    max_ulp: float | None = None
    outside: float | None = None
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    max_rel: float | None = None
    max_rel_at: tuple[int, ...] = ()
    estimated: bool = False
    rel_l2_error: float | None = None
    rel_l2_least: float | None = None


class Judgement(Outcome, frozen=True):
    """Which policy judged a boundary and why.

    ``ratio`` is error over allowed error (or over the measured floor). ``power_*`` is the smallest
    relative error, coherent (one common factor) and incoherent, that would have been flagged; relative to
    the tensor, or where it is ``cancelled``, no more than round-off of the terms summed, relative to these.
    ``noise`` is the relative L2 error that was allowed, whichever test decided.
    """

    policy: Literal["floor", "error-model", "exact", "declared"]
    allowed: float
    error: float
    ratio: float
    reason: str
    power_coherent: float | None = None
    power_incoherent: float | None = None
    floor_runs: int = 0
    noise: float | None = None
    cancelled: bool = False


class Judged(Outcome, frozen=True):
    """One boundary that was compared, and how it was judged."""

    where: Where
    judgement: Judgement


class Along(Outcome, frozen=True):
    """Which parts of a tensor hold a difference, of those that one way to cut it gives.

    ``what`` names them (``rows``, ``columns``, ``shards``, …). ``dim`` is the dimension of the global tensor,
    None where rows of the batch were put one after the other. ``indices`` are at most 64 of the ``held``
    parts that hold the difference, of ``count`` in all.
    """

    what: str
    dim: int | None
    indices: tuple[int, ...]
    held: int
    count: int


class Location(Outcome, frozen=True):
    """Where in a tensor the difference lies: ``share`` of its square, in ``part`` of the elements."""

    text: str
    share: float
    part: float
    along: tuple[Along, ...]


class Finding(Outcome, frozen=True, kw_only=True):
    """One divergent boundary. ``ranks`` are those of ``b`` (of ``a`` where only ``a`` has it).

    ``unseen`` says what it was computed from that was not compared: the difference may begin there. Empty for
    an origin in view.
    """

    where: Where
    role: Role
    ranks: tuple[int, ...]
    text: str
    metrics: Metrics | None = None
    judgement: Judgement | None = None
    dtype_a: str | None = None
    dtype_b: str | None = None
    shape: tuple[int, ...] = ()
    source: str | None = None
    inputs: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    location: Location | None = None
    unseen: tuple[str, ...] = ()


class Cause(Outcome, frozen=True):
    """A tested explanation of the first origin.

    ``number`` was measured, ``equals`` names the known quantity it equals; the residuals are relative L2
    errors before and after the hypothesised mistake was applied to ``a``.
    """

    code: str
    text: str
    number: float | None
    equals: str | None
    residual_before: float
    residual_after: float
    floor: float
    evidence: tuple[str, ...] = ()


class Operation(Outcome, frozen=True, kw_only=True):
    """The first operation at which the runs part, inside a module that ``--zoom`` looked into.

    ``module`` is that in which it runs, ``call_of`` the one whose call was looked into, with its
    ``microbatch`` and ``call``. One side's ``operation_*`` and ``source_*`` (``file.py:12 in function``) are
    None where only the other has it. ``differs`` are arguments that aren't tensors.
    """

    module: str
    call_of: str
    microbatch: int | None
    call: int
    text: str
    operation_a: str | None
    operation_b: str | None
    source_a: str | None
    source_b: str | None
    differs: tuple[str, ...] = ()
    metrics: Metrics | None = None
    judgement: Judgement | None = None
    evidence: tuple[str, ...] = ()


class Missing(Outcome, frozen=True):
    """A group of boundaries that only one side has, or that could not be compared, with the reason."""

    side: Literal["a", "b", "both"]
    kind: str
    reason: str
    count: int
    examples: tuple[Where, ...]
    counts_as_incomplete: bool


class Coverage(Outcome, frozen=True):
    """What was compared and what was not. ``compared`` includes ``bitwise_equal``."""

    compared: int
    bitwise_equal: int
    by_kind: dict[str, int]
    missing: tuple[Missing, ...]
    complete: bool


class Expectation(Outcome, frozen=True):
    """A rule that declares differences, and what it met.

    ``met`` counts the boundaries that it speaks of, ``declared`` those that differ as it says, ``otherwise``
    those that differ otherwise and are origins. ``likely`` is what a rule that met nothing may have meant.
    """

    rule: str
    place: str
    reason: str
    met: int
    declared: int
    otherwise: int
    likely: str = ""


class Declared(Outcome, frozen=True):
    """What was declared with ``--expect``, and what follows from it.

    ``total`` counts the boundaries that differ as declared, of which ``findings`` are the first.
    ``downstream`` counts those that differ because of them, ``unjudged`` the ones among these of which
    nothing bounds how much they may differ.
    """

    rules: tuple[Expectation, ...]
    findings: tuple[Finding, ...]
    total: int
    downstream: int
    unjudged: int


class Power(Outcome, frozen=True):
    """What the comparison could see: the smallest relative error that would have been flagged.

    ``coherent`` (one common factor) and ``incoherent`` are those of ``weakest``, the compared boundary
    where they are greatest; ``typical_*`` are medians over all boundaries judged by a tolerance, of which
    ``cancelled`` are left out: they are no more than the round-off of terms that cancel.
    """

    coherent: float | None
    incoherent: float | None
    weakest: Where | None = None
    typical_coherent: float | None = None
    typical_incoherent: float | None = None
    cancelled: int = 0


class Side(Outcome, frozen=True):
    """One trace, as the headline shows it."""

    path: str
    ranks: int
    steps: int
    microbatches: int
    ended: str
    problems: tuple[str, ...] = ()


class Result(Outcome, frozen=True, kw_only=True):
    """The outcome of ``diff.compare``; true where the runs are equivalent, but for what was declared.

    Steps are in ``a``'s numbering; the same step of ``b`` is ``step_offset`` less. ``boundaries`` are those
    whose values were read, in the order in which they were judged, each with its power.

    >>> from tensortrace import diff
    >>> result = diff.compare("a", "b")
    >>> bool(result), result.verdict
    (False, 'divergent')
    >>> result
    <divergent: divergent at step 1, microbatch 0: activation hidden out: ...>

    It iterates over what diverges, the first divergent boundary first:

    >>> str(next(iter(result)).where)
    'step 1, microbatch 0: activation hidden out'
    >>> worst = max(result.boundaries, key=lambda judged: judged.judgement.ratio)
    >>> worst.judgement.ratio > 1
    True
    """

    schema: str = SCHEMA
    verdict: Verdict
    headline: str
    a: Side
    b: Side
    first_divergent: Finding | None
    causes: tuple[Cause, ...]
    origins: tuple[Finding, ...]
    receivers: tuple[Finding, ...]
    receivers_total: int
    coverage: Coverage
    policy: str
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    power: Power | None = None
    step_offset: int = 0
    declared: Declared | None = None
    operation: Operation | None = None
    boundaries: tuple[Judged, ...] = ()

    def __bool__(self) -> bool:
        """Tell whether the runs are equivalent."""
        return self.verdict == "equivalent"

    def __iter__(self) -> Iterator[Finding]:
        """Iterate over what diverges: origins, then receivers, each in causal order."""
        yield from self.origins
        yield from self.receivers

    def __repr__(self) -> str:
        return f"<{self.verdict}: {safe(self.headline, limit=300)}>"

    def to_pandas(self) -> pandas.DataFrame:
        """Return ``boundaries`` as a table, one row each; ``init`` is step -1. See ``judged_table``."""
        found = [*self, *(self.declared.findings if self.declared else ())]
        return judged_table(self.boundaries, found)

    def _repr_html_(self) -> str:
        """Return what notebooks show: headline, cause, first origin, coverage."""
        lost = [
            f"{missing.kind} of {missing.side}, {missing.count:,}: {missing.reason}"
            for missing in self.coverage.missing
            if missing.counts_as_incomplete
        ]
        compared = f"{self.coverage.compared:,} boundaries, {self.coverage.bitwise_equal:,} bitwise equal"
        return card(
            self.headline,
            found_html(self.headline, self.first_divergent, self.causes),
            table([("compared", compared), ("judged by", self.policy), *sides(a=self.a, b=self.b)]),
            listing("origins", [str(finding.where) for finding in self.origins]),
            listing("not compared", lost), listing("notes", self.notes), listing("next", self.hints),
            mark={"equivalent": "good", "divergent": "bad"}.get(self.verdict, "open"),
        )  # fmt: skip

    def to_json(self) -> bytes:
        """Return the result as JSON, UTF-8, as ``docs/json.md`` describes it.

        Numbers that are not finite are null. Raises UnicodeEncodeError for a path that is not UTF-8.
        """
        document = msgspec.structs.asdict(self)
        document["first_divergent"] = self.first_divergent and flat(self.first_divergent)
        document["origins"] = [flat(finding) for finding in self.origins]
        document["receivers"] = [flat(finding) for finding in self.receivers]
        if self.declared:
            findings = [flat(finding) for finding in self.declared.findings]
            document["declared"] = msgspec.structs.asdict(self.declared) | {"findings": findings}
        return msgspec.json.encode(document)


def flat(finding: Finding) -> dict[str, object]:
    """Return a finding as JSON holds it: the parts of its key and ``rel_l2`` stand beside its own fields."""
    fields: dict[str, object] = msgspec.structs.asdict(finding)
    del fields["where"]
    metrics = finding.metrics
    return msgspec.structs.asdict(finding.where) | {"rel_l2": metrics and metrics.rel_l2} | fields


def found_html(headline: str, first: Finding | None, causes: tuple[Cause, ...]) -> str:
    """Return the first finding with its numbers, and the causes with theirs, as a table of HTML.

    What the headline says is not said again.
    """
    rows: list[tuple[str, str]] = []
    if first is not None:
        told = [text for text in (first.text, first.judgement.reason if first.judgement else "") if text]
        told = [text for text in told if not any(text != other and text in other for other in told)]
        rows += [("first", str(first.where)), *(("", text) for text in dict.fromkeys(told))]
    rows += [("source", first.source)] if first and first.source else []
    for cause in causes:
        left = f"relative error {cause.residual_before:.3g}, {cause.residual_after:.3g} with it undone"
        text = "as the headline says" if cause.text in headline else cause.text
        rows += [(f"cause {cause.code}", text), ("", left)]
    return table(rows)


def sides(**found: Side) -> Iterator[tuple[str, str]]:
    """Yield a line about each trace, under the name by which it is passed."""
    for label, side in found.items():
        ranks, steps = (
            f"{n} {noun}{'s' * (n != 1)}" for n, noun in ((side.ranks, "rank"), (side.steps, "step"))
        )
        yield label, f"{side.path}: {ranks}, {steps}, {side.ended}"


def judged_table(boundaries: Iterable[Judged], findings: Iterable[Finding]) -> pandas.DataFrame:
    """Return judged boundaries as a pandas table, in the order in which they were judged.

    Columns are the fields of ``Where`` and of ``Judgement``; ``role`` is that of a finding, else empty: of
    many receivers the first alone are findings. Step -1 is ``init``. Raises ImportError where pandas is not
    installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError("a table needs pandas: pip install 'tensortrace[pandas]'") from error
    roles = {finding.where: finding.role for finding in findings}
    columns = (*Where.__struct_fields__, *Judgement.__struct_fields__)
    rows = [
        {name: getattr(judged.where, name) for name in Where.__struct_fields__}
        | {name: getattr(judged.judgement, name) for name in Judgement.__struct_fields__}
        | {"role": roles.get(judged.where, "")}
        for judged in boundaries
    ]
    frame = pandas.DataFrame(rows, columns=[*columns, "role"])
    frame["step"] = frame["step"].replace("init", -1).astype("int64")
    frame["microbatch"] = frame["microbatch"].astype("Int64")
    return frame
