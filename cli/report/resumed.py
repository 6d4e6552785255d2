"""The page of a resume check: the comparison that the headline speaks of, over the steps of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from tensortrace.cli.render.resumed import hints, told
from tensortrace.cli.render.safe import safe
from tensortrace.cli.report.commands import LONG, NEXT, commands
from tensortrace.cli.report.history import history, thinned
from tensortrace.cli.report.ladder import ROWS, Ladder, LadderRow, Number
from tensortrace.cli.report.page import Half, Page, Recording, Side, of_comparison
from tensortrace.diff.examined import Examined
from tensortrace.diff.resume import ResumeResult
from tensortrace.diff.series import Series, series_of

RESTORED = "resumed"
"""What the ladder calls the state that the resumed run began with."""


class Seen(NamedTuple):
    """What is kept of one of the two comparisons: its page, and the numbers of both runs over the steps."""

    page: Page
    steps: tuple[int, ...]
    a: Series
    b: Series


def seen(found: Examined, options: Sequence[str], output: str) -> Seen:
    """Return what a page needs of a comparison; call it while the traces are open."""
    steps = tuple(thinned(found.steps))
    own = series_of(found.b, [step - found.offset for step in steps])
    moved = {name: {step + found.offset: value for step, value in of.items()} for name, of in own.items()}
    return Seen(of_comparison(found, options, output), steps, series_of(found.a, steps), moved)


def of_resumed(whole: ResumeResult, before: Seen, after: Seen, options: Sequence[str], output: str) -> Page:
    """Return the page of a resume check."""
    is_after = told(whole) is whole.after
    main = after.page if is_after else before.page
    contents = [before.page.sides[0].contents, before.page.sides[1].contents, after.page.sides[1].contents]
    steps = sorted({*before.steps, *after.steps})
    moment = f"resumed at step {whole.step}"
    parted = "in the state that it restored" if is_after and main.place == "init" else main.place
    said = whole.headline.partition(": ")[2] if whole else main.claim
    hinted = hints(whole)
    return main._replace(
        title=f"{whole.verdict}: {contents[0].path}, resumed at step {whole.step}",
        verdict=whole.verdict,
        place=f"{moment}; the runs part {parted}" if parted else moment,
        claim=said,
        ladder=joined(before.page.ladder, after.page.ladder, from_after=is_after),
        history=history(steps, _over(before.a, after.a), _over(before.b, after.b)),
        sides=(
            Side("a, the full run", "a", contents[0]),
            Side("b, the run that was saved", "b", contents[1]),
            Side("b, the run that went on", "b", contents[2]),
        ),
        commands=tuple(commands(contents, options, output, hints=hinted)),
        hints=tuple((*whole.notes, *(hint for hint in hinted if not hint.startswith(NEXT)))),
        recordings=(
            Recording(safe(contents[1].path, limit=LONG)),
            Recording(safe(contents[2].path, limit=LONG), whole.step, after.page.recordings[0].offset),
        ),
        halves=(
            Half("before the interruption", whole.before, not is_after),
            Half("after it", whole.after, is_after),
        ),
        init=RESTORED if is_after else "init",
    )


def _over(first: Series, second: Series) -> dict[str, dict[int, float]]:
    """Return the numbers of both; where both have a step the second's."""
    names = dict.fromkeys([*first, *second])
    return {name: {**first.get(name, {}), **second.get(name, {})} for name in names}


def joined(before: Ladder, after: Ladder, *, from_after: bool) -> Ladder:
    """Return one ladder of both: the steps of the resumed run follow those that it does not do again."""
    kept = [place for place, step in enumerate(before.steps) if step == "init" or step not in after.steps]
    begins = len(kept)
    steps = [before.steps[place] for place in kept]
    steps += [RESTORED if step == "init" else step for step in after.steps]
    of_before: dict[Number, int] = {place: number for number, place in enumerate(kept)}
    of_after: dict[Number, int] = {place: begins + place for place in range(len(after.steps))}
    missing = len(before.reasons)
    left = {_key(row): _moved(row, of_before, 0) for row in before.rows}
    right = {_key(row): _moved(row, of_after, missing) for row in after.rows}
    order = _merged(list(left), list(right))
    shown = right if from_after else left
    if len(order) > ROWS:  # what the page speaks of stays
        others = [key for key in order if key not in shown][: max(ROWS - len(shown), 0)]
        wanted = {*shown, *others}
        order = [key for key in order if key in wanted]
    rows = [
        replace(right.get(key) or left[key], cells=tuple(c for side in (left, right) if key in side
                                                        for c in side[key].cells))
        for key in order
    ]  # fmt: skip
    ladder, places = (after, of_after) if from_after else (before, of_before)
    first = None
    if ladder.first is not None and ladder.first[1] in places:
        first = order.index(_key(ladder.rows[ladder.first[0]])), places[ladder.first[1]]
    return Ladder(
        steps=tuple(steps), rows=tuple(rows), reasons=(*before.reasons, *after.reasons), first=first,
        rows_left_out=before.rows_left_out + after.rows_left_out + len({*left, *right}) - len(order),
        steps_left_out=before.steps_left_out + after.steps_left_out,
        resumed=begins,
    )  # fmt: skip


Key = tuple[int | None, str, str, str, int]


def _key(row: LadderRow) -> Key:
    return row.microbatch, row.kind, row.name, row.slot, row.call


def _moved(row: LadderRow, places: dict[Number, int], reasons: int) -> LadderRow:
    """Return a row whose cells lie at other steps' places, their reasons counted from ``reasons`` on."""
    cells: list[tuple[Number, ...]] = []
    for step, state, *numbers in row.cells:
        if step not in places:
            continue
        if len(numbers) == 1 and numbers[0] is not None:  # why it was not compared
            numbers = [numbers[0] + reasons]
        cells.append((places[step], state, *numbers))
    return replace(row, cells=tuple(cells))


def _merged(left: list[Key], right: list[Key]) -> list[Key]:
    """Return the keys of both: those of the right alone after what they follow there."""
    order = {key: (number, 0) for number, key in enumerate(left)}
    last, extra = (-1, 0), 0
    for key in right:
        if key in order:
            last, extra = order[key], 0
        else:
            extra += 1
            order[key] = (last[0], extra)
    return sorted(order, key=order.__getitem__)
