"""Replays a packed case: unpacks it for a moment, judges its traces, and looks whether it is as stated."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tensortrace.diff.engine import CompareOptions, compare, compare_opened
from tensortrace.diff.notebook import card, listing
from tensortrace.diff.result import Outcome, Result, Side
from tensortrace.replay.archive import CASE, SIDES, check_members, rules_name, unpack
from tensortrace.replay.case import Asked, Case, Expected, decode_case, deviations, expected_of
from tensortrace.replay.engine import ReplayOptions, replay, replay_opened
from tensortrace.replay.result import Replay
from tensortrace.tracer.errors import DamagedTrace
from tensortrace.tracer.reader import Trace

SCHEMA = "tensortrace.case/1"

Progress = Callable[[float, int], None]


class CaseReplay(Outcome, frozen=True, kw_only=True):
    """The outcome of replaying a packed case; true where its traces give the stated verdict.

    ``deviations`` say in what they don't. ``outcome`` is what the diff, or the replay, of the traces gives;
    paths in it are those inside the archive.
    """

    schema: str = SCHEMA
    reproduced: bool
    deviations: tuple[str, ...]
    expected: Expected
    found: Expected
    case: Case
    outcome: Result | Replay

    def __bool__(self) -> bool:
        """Tell whether the verdict is the stated one."""
        return self.reproduced

    def _repr_html_(self) -> str:
        """Return what notebooks show: whether it is as stated, and what its traces give."""
        told = "reproduced: its traces give the stated verdict" if self else "not reproduced"
        deviating = listing("deviations", self.deviations)
        return card(told, deviating, self.outcome._repr_html_(), mark="good" if self else "bad")

    def to_json(self) -> bytes:
        """Return the outcome as JSON, UTF-8, as ``docs/pack.md`` describes it."""
        document = msgspec.structs.asdict(self)
        document["outcome"] = msgspec.Raw(self.outcome.to_json())
        return msgspec.json.encode(document)


def replay_case(path: Path | str, *, progress: Progress | None = None, jobs: int = 1) -> CaseReplay:
    """Replay a packed case; only the archive is needed, and nothing is left behind.

    Raises DamagedTrace for an archive that no case can be, UnsupportedFormat for a newer one, other
    TraceErrors where its traces cannot be read.
    """
    with unpacked(Path(path)) as (folder, case):
        outcome = _judged(folder, case, progress, jobs)
        found = expected_of(outcome)
        deviating = deviations(case.expected, found)
        return CaseReplay(
            reproduced=not deviating, deviations=deviating, expected=case.expected, found=found, case=case,
            outcome=_inside(outcome, folder),
        )  # fmt: skip


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[Path, Case]]:
    """Yield a temporary folder with the files of a case, and what the case states; the folder is removed."""
    with tempfile.TemporaryDirectory(prefix="tensortrace-case-") as name:
        folder = Path(name)
        unpack(path, folder)
        case = decode_case((folder / CASE).read_bytes(), where=f"{path}: {CASE}")
        there = [side for side in SIDES if (folder / side).is_dir()]
        rules = [number for number in range(case.asked.rules) if not (folder / rules_name(number)).is_file()]
        if there != list(SIDES[: len(case.traces)]) or rules:
            raise DamagedTrace(f"{path}: a trace or a file of rules that {CASE} tells of is missing")
        if case.members:
            check_members(path, folder, case.members)
        yield folder, case


def compare_options(
    asked: Asked, *, layouts: Sequence[Path | None] = (None, None), expect: Sequence[str] = (), jobs: int = 1
) -> CompareOptions:
    """Return the options of the diff that a case asks for; ``layouts`` in the place of recorded ones."""
    return CompareOptions(
        policy=asked.policy, allow_missing=asked.allow_missing, kinds=asked.kinds, include=asked.include,
        exclude=asked.exclude, align=asked.align, layout_a=layouts[0], layout_b=layouts[-1],
        expect=tuple(expect), jobs=jobs,
    )  # fmt: skip


def judge(
    traces: Sequence[Trace], asked: Asked, *, layouts: Sequence[Path | None], expect: Sequence[str] = (),
    progress: Progress | None = None,
) -> Result | Replay:  # fmt: skip
    """Return what the diff of two opened traces gives, or the replay of one, under a case's options."""
    if len(traces) == 1:
        options = ReplayOptions(objective=asked.objective, layout=layouts[0])
        return replay_opened(traces[0], options=options, progress=progress)
    compared = compare_options(asked, layouts=layouts, expect=expect)
    return compare_opened(*traces, options=compared, progress=progress)


def _judged(folder: Path, case: Case, progress: Progress | None, jobs: int) -> Result | Replay:
    sides = [folder / side for side in SIDES[: len(case.traces)]]
    if case.of == "replay":
        options = ReplayOptions(objective=case.asked.objective)
        return replay(sides[0], options=options, progress=progress)
    expect = [str(folder / rules_name(number)) for number in range(case.asked.rules)]
    compared = compare_options(case.asked, expect=expect, jobs=jobs)
    return compare(sides[0], sides[1], options=compared, progress=progress)


def _inside(outcome: Result | Replay, folder: Path) -> Result | Replay:
    """Return an outcome whose texts name files as the archive does."""
    prefix = f"{folder}/"

    def side(told: Side) -> Side:
        problems = tuple(problem.replace(prefix, "") for problem in told.problems)
        return replace(told, path=told.path.replace(prefix, ""), problems=problems)

    notes = tuple(note.replace(prefix, "") for note in outcome.notes)
    if isinstance(outcome, Result):
        return replace(outcome, a=side(outcome.a), b=side(outcome.b), notes=notes)
    return replace(outcome, run=side(outcome.run), notes=notes)
