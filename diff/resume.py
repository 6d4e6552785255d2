"""A run that was saved and went on, held against one that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from tensortrace.diff.align import starts_from
from tensortrace.diff.catalog import Catalog
from tensortrace.diff.engine import CompareOptions, Progress, compare
from tensortrace.diff.examined import Examined
from tensortrace.diff.relaid import laid_out
from tensortrace.diff.result import Outcome, Result, Verdict
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import INIT_STEP

SCHEMA = "tensortrace.resume/1"


class ResumeResult(Outcome, frozen=True, kw_only=True):
    """Both comparisons with the uninterrupted run; true where it makes no difference to be interrupted.

    ``step`` is the first step after the interruption, in the numbers of the uninterrupted run. ``before`` is
    the comparison with the run that was saved, ``after`` that with the one that went on from it; this
    begins with the state that was restored.
    """

    schema: str = SCHEMA
    verdict: Verdict
    headline: str
    step: int
    before: Result
    after: Result
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Tell whether the resumed run computes what the uninterrupted one does."""
        return self.verdict == "equivalent"

    def to_json(self) -> bytes:
        """Return the result as JSON, UTF-8, as ``docs/json.md`` describes it."""
        document = msgspec.structs.asdict(self)
        document |= {part: msgspec.Raw(getattr(self, part).to_json()) for part in ("before", "after")}
        return msgspec.json.encode(document)


def compare_resumed(
    full: Path, first: Path, resumed: Path, *, options: CompareOptions | None = None,
    progress: Progress | None = None, look: Callable[[Examined], None] | None = None,
) -> ResumeResult:  # fmt: skip
    """Compare an uninterrupted run with one that was saved (``first``) and one that went on (``resumed``).

    The resumed run begins at the step after the last one that was saved: the latest step of the first run
    whose state it starts from, else the one after all of it. ``options.align`` says it in their place.
    ``look`` is called with each comparison, that with the saved run first, while its traces are open.
    Raises as ``compare`` does, and BadRequest where the first run has steps that the full one lacks.
    """
    options = options or CompareOptions()
    offset, last, notes = _offset(full, first, resumed, options)
    saved = msgspec.structs.replace(options, align=None, layout_b=None, until=last)
    before = compare(full, first, options=saved, progress=progress, look=look)
    after = compare(
        full, resumed, options=msgspec.structs.replace(options, align=f"b:{offset[1]}=a:{offset[0]}"),
        progress=progress, look=look,
    )  # fmt: skip
    verdict, headline = _outcome(before, after, offset[0])
    return ResumeResult(
        verdict=verdict, headline=headline, step=offset[0], before=before, after=after, notes=tuple(notes)
    )


def _offset(
    full: Path, first: Path, resumed: Path, options: CompareOptions
) -> tuple[tuple[int, int], int, list[str]]:
    """Return the steps of the full and of the resumed run that meet, the first run's last step, and notes."""
    with Trace.open(full) as a, Trace.open(first) as b, Trace.open(resumed) as c:
        whole = Catalog(laid_out(a, options.layout_a)[0])
        saved = Catalog(laid_out(b, None)[0])
        again = Catalog(laid_out(c, options.layout_b)[0])
        for name, catalog in (("full", whole), ("first", saved), ("resumed", again)):
            if not catalog.steps:
                raise BadRequest(f"the {name} run holds no step", remedy="record at least one training step")
        if options.align is not None:
            return _requested(options.align), saved.steps[-1], []
        if saved.steps[-1] > whole.steps[-1]:
            raise BadRequest(
                "--resume: the first run has more steps than the full one",
                found=f"up to step {saved.steps[-1]} and {whole.steps[-1]}",
                remedy="give them in the order FULL FIRST RESUMED",
            )
        begins, ends = again.steps[0], saved.steps[-1] + 1
        met = next(
            (step for step in range(ends, INIT_STEP, -1) if starts_from(whole, again, step - begins)), ends
        )
    notes = []
    if met < ends:
        count = "1 step" if ends - met == 1 else f"{ends - met} steps"
        notes.append(f"the resumed run starts from the state before step {met}: it does {count} again")
    if met not in whole.steps:
        raise BadRequest(
            "--resume: the full run ends where the first one does", found=f"{len(whole.steps)} steps in each",
            remedy="let the full run go on beyond the step at which the first was saved",
        )  # fmt: skip
    return (met, begins), saved.steps[-1], notes


def _requested(request: str) -> tuple[int, int]:
    words = request.removeprefix("b:").split("=a:")
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        raise BadRequest("--align", found=repr(request), expected="b:STEP=a:STEP, such as b:0=a:100")
    return int(words[1]), int(words[0])


def _outcome(before: Result, after: Result, step: int) -> tuple[Verdict, str]:
    if before and after:
        return (
            "equivalent",
            f"equivalent: resumed at step {step}, the run goes on as if it had not been interrupted",
        )
    if before.verdict == "divergent":
        return "divergent", f"divergent before the interruption: {_bare(before)}"
    if after.verdict == "divergent":
        return "divergent", f"divergent after it was resumed at step {step}: {_bare(after)}"
    part = after if before else before
    return "incomplete", f"incomplete {'after' if before else 'before'} the interruption: {_bare(part)}"


def _bare(result: Result) -> str:
    return result.headline.removeprefix(result.verdict).lstrip(": ")
