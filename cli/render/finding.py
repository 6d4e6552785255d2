"""One divergent boundary in text: where, how many elements, the greatest differences, what was allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tensortrace.cli.render import words
from tensortrace.cli.render.numbers import counted, exactly, number, ranks
from tensortrace.cli.render.page import Page
from tensortrace.cli.render.safe import safe
from tensortrace.diff.result import Finding, Metrics

SENTENCE = 600
"""Greatest length of a sentence from a result, in characters."""

SHORT = 160
"""Greatest length of a path, a name or a term."""

POLICIES = {
    "error-model": "error model",
    "floor": "measured floor",
    "exact": "exact (bitwise)",
    "declared": "declared difference",
}
"""The policies in words."""

MANTISSA = 2.0**23
"""Units in the last place of float32 from which on they tell no more than a relative difference."""

_DIMS = 8
"""Numbers of a shape or an index that are shown."""


HEADER = ("step", "mb", "rel L2", "×allowed", "boundary")


def further(page: Page, findings: Sequence[Finding], *, limit: int | None) -> None:
    """Write a table of boundaries that differ beside the first one, a row each."""
    rows = [row(finding) for finding in findings[:limit]]
    page.table(HEADER, rows, right="step,mb,rel L2,×allowed")
    page.more(len(findings) - len(rows))


def row(finding: Finding) -> tuple[str, ...]:
    """Return a row of that table: step, microbatch, relative L2 error, error over allowed, boundary."""
    where, judgement = finding.where, finding.judgement
    return (
        str(where.step),
        "-" if where.microbatch is None else str(where.microbatch),
        number(finding.metrics.rel_l2) if finding.metrics else "-",
        number(judgement.ratio) if judgement and judgement.policy != "exact" else "-",
        words.key(where),
    )


def first(
    page: Page, finding: Finding, *, limit: int | None, said: str, what: str = "first divergent boundary"
) -> None:
    """Write the first divergent boundary: where, what, how far apart, what was allowed, evidence.

    What stands in ``said``, the headline, is not said again.
    """
    where = finding.where
    page.blank()
    page.line((f"{what}:", "bold"), f" {words.moment(where)}: {words.key(where)}")
    page.line(f"the {words.boundary(where)}{_origin_of(finding)}", indent=2)
    text = without_numbers(finding)
    if text and text not in said:
        page.line(safe(text, limit=SENTENCE), indent=2)
    for line in (*difference(finding), *tolerance(finding)):
        page.line(line, indent=2)
    if finding.location:
        page.line(safe(finding.location.text, limit=SENTENCE), indent=2)
    if finding.inputs:
        page.line("computed from " + _list(finding.inputs, limit), indent=2)
    if finding.unseen:
        page.line(
            "no origin in view: it may lie in what this was computed from and was not compared", indent=2
        )
        page.bullets([safe(line, limit=SENTENCE) for line in finding.unseen], limit=limit)
    page.bullets([safe(line, limit=SENTENCE) for line in finding.evidence], limit=limit)


def without_numbers(finding: Finding) -> str:
    """Return a finding's text without the error and the allowance at its end: they stand further below."""
    metrics, judgement = finding.metrics, finding.judgement
    if metrics is None or judgement is None or not finding.text.endswith(judgement.reason):
        return finding.text
    rel_l2 = math.nan if metrics.rel_l2 is None else metrics.rel_l2
    text = finding.text.removesuffix(judgement.reason).rstrip("; ")
    return text.removesuffix(f"relative L2 error {rel_l2:.3g}").rstrip(": ")


def _origin_of(finding: Finding) -> str:
    line = f", called at {safe(finding.source, limit=SHORT)}" if finding.source else ""
    side = "a" if only_in_a(finding) else "b"
    return line + (f", on {ranks(finding.ranks)} of {side}" if finding.ranks else "")


def only_in_a(finding: Finding) -> bool:
    """Tell whether only ``a`` has the boundary, so that the ranks are those of ``a``."""
    return finding.dtype_a is not None and finding.dtype_b is None


def difference(finding: Finding) -> Iterator[str]:
    """Yield how far the tensors are apart: how many elements, then the greatest differences."""
    metrics = finding.metrics
    if metrics is None:
        return
    known = finding.dtype_a or finding.dtype_b
    yield _extent(metrics) + (f"; {_tensor(finding)}" if known else "")
    if metrics.equal:
        return
    if metrics.elements == 1 and metrics.max_abs_a is not None and metrics.max_abs_b is not None:
        yield f"a {exactly(metrics.max_abs_a)}, b {exactly(metrics.max_abs_b)}"
        return
    if metrics.max_abs is not None:
        values = f": a {number(metrics.max_abs_a)}, b {number(metrics.max_abs_b)}"
        place = f" at {_index(metrics.max_abs_at)}" if metrics.max_abs_at else ""
        yield f"greatest absolute difference {number(metrics.max_abs)}{place}{values}"
    if relative := _relative(metrics):
        yield relative
    if metrics.projection is not None:
        cosine = f", cosine {metrics.cosine:.6g}" if metrics.cosine is not None else ""
        spread = f" ± {number(metrics.projection_error)}" if metrics.projection_error is not None else ""
        yield f"b is {metrics.projection:.6g}{spread} times a{cosine}"
    if metrics.nonfinite_a or metrics.nonfinite_b:
        yield f"NaN or Inf: {metrics.nonfinite_a:,} elements of a, {metrics.nonfinite_b:,} of b"


def _extent(metrics: Metrics) -> str:
    error = "equal" if metrics.equal else f"relative L2 error {number(metrics.rel_l2)}"
    if metrics.estimated:
        error += f" ± {number(metrics.rel_l2_error)}, estimated from sketches"
    if metrics.outside is None:
        return f"{counted(metrics.elements, 'element')}, {error}"
    outside = round(metrics.outside * metrics.elements)
    return f"{outside:,} of {counted(metrics.elements, 'element')} outside, {error}"


def _tensor(finding: Finding) -> str:
    a, b = (safe(dtype or "nothing", limit=30) for dtype in (finding.dtype_a, finding.dtype_b))
    shape = f" {_index(finding.shape)}" if finding.shape else ""
    return f"{a}{shape}" if a == b else f"{a} in a, {b} in b{shape}"


def _relative(metrics: Metrics) -> str:
    parts = []
    if metrics.max_rel is not None:
        place = f" at {_index(metrics.max_rel_at)}" if metrics.max_rel_at else ""
        parts.append(f"greatest relative difference {number(metrics.max_rel)}{place}")
    if metrics.max_ulp is not None and metrics.max_ulp < MANTISSA:
        parts.append(f"at most {number(metrics.max_ulp)} ULP")
    return ", ".join(parts)


def _index(numbers: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, numbers[:_DIMS])) + (", …" if len(numbers) > _DIMS else "") + "]"


def tolerance(finding: Finding) -> Iterator[str]:
    """Yield which error was allowed and why, once."""
    judgement = finding.judgement
    if judgement is None:
        return
    reason = safe(judgement.reason, limit=SENTENCE)
    if judgement.policy == "exact":
        yield reason if reason.startswith("compared exactly") else f"compared exactly: {reason}"
        return
    if ", allowed " in reason:  # it gives both numbers itself
        yield f"{reason}: {number(judgement.ratio)} times as much, by the {POLICIES[judgement.policy]}"
        return
    why = f" ({reason})" if reason else ""
    runs = f", {counted(judgement.floor_runs, 'floor run')}" if judgement.floor_runs else ""
    yield (
        f"error {number(judgement.error)}, allowed {number(judgement.allowed)} by the "
        f"{POLICIES[judgement.policy]}{runs}: {number(judgement.ratio)} times as much{why}"
    )


def _list(texts: Sequence[str], limit: int | None) -> str:
    shown = ", ".join(safe(text, limit=SHORT) for text in texts[:limit])
    left = len(texts) - len(texts[:limit])
    return shown + (f" and {left:,} more" if left else "")
