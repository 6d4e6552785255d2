"""Puts an error of 1 % with a common factor into one boundary of a legal pair: the diff must now fail.

The boundary is drawn from those where the diff of the pair claims that so small an error would be flagged.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

from tests import harness
from tests.zoo.case import Draw, Legal
from tests.zoo.inject import Place, inject
from tests.zoo.judging import Row, matches_where, named, options_of, summary
from tests.zoo.powers import Claim
from tests.zoo.recording import Broken, Recordings

FACTOR = 0.01
TRIES = 20


def judge(legal: Legal, draw: Draw, recordings: Recordings) -> Row:
    """Return whether an error of 1 % in one of b's boundaries is found."""
    row = Row("injected", legal.name, draw.seed, right=False, said="broken")
    try:
        with tempfile.TemporaryDirectory(dir=recordings.folder, prefix="injected") as folder:
            return _judge(row, legal, draw, recordings, Path(folder))
    except Broken as error:
        return replace(row, detail=str(error))
    except Exception as error:  # a case that cannot be made is a row too
        return replace(row, detail=repr(error))


def _judge(row: Row, legal: Legal, draw: Draw, recordings: Recordings, folder: Path) -> Row:
    pair = legal.make(draw)
    a = recordings.trace(pair.a)
    b = recordings.trace(pair.b, alone=pair.a.ranks == pair.b.ranks == 1)
    listed, changed = folder / "claims.json", folder / "changed"
    options = options_of(pair)
    recordings.claims(listed, [str(a), str(b), "-q", *options])
    claim = _changed(msgspec.json.decode(listed.read_bytes(), type=list[Claim]), b, changed, legal, draw)
    result = harness.read_result(recordings.diff([str(a), str(changed), *options]))
    first, wrong = result.first_divergent, result.verdict != "divergent"
    there = first is not None and matches_where(first.where, claim.where)
    return replace(
        row,
        right=not wrong,
        said="MISSED" if wrong else "found" if there else "found elsewhere",
        expected=named(claim.where),
        found=named(first.where) if first else "",
        worst=claim.coherent,
        detail=summary(result) if wrong else "",
        traces=(str(a), str(b)),
    )


def _changed(claims: list[Claim], b: Path, changed: Path, legal: Legal, draw: Draw) -> Claim:
    """Write b with one drawn boundary changed, and return what the diff claims of it."""
    able = [c for c in claims if c.coherent is not None and c.coherent < FACTOR and c.where.slot != "weight"]
    # what all tokens weigh more is judged in the gradients, of which a changed record knows nothing
    draw.of(f"boundary of {legal.name}").shuffle(able)
    for claim in able[:TRIES]:
        try:
            inject(b, changed, replace(Place.of(claim.where), microbatch=None), FACTOR, seed=draw.seed)
            return claim
        except ValueError:  # b has it under another name, or as integers: the next
            shutil.rmtree(changed, ignore_errors=True)
    raise Broken(f"none of {len(claims)} boundaries claims to flag an error of 1 % and can be changed")
