"""Numbers over steps: how far two runs are apart at each boundary, or what one run's norms and losses are."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

from tensortrace.diff.engine import CompareOptions, compare
from tensortrace.diff.examined import Examined
from tensortrace.diff.opened import OpenTrace
from tensortrace.diff.result import Result
from tensortrace.diff.survey import survey
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.request import Request
from tensortrace.tracer.safe import safe
from tensortrace.tracer.types import INIT_STEP, Kind

Scalars = dict[int, dict[str, float]]
"""What each number is, by step and name; ``init`` is step -1."""

_LONGEST = 200


def of_trace(trace: OpenTrace, request: Request) -> Scalars:
    """Return loss, tokens and schedule under ``run/``, and the norm of each boundary under ``norm/``.

    A boundary's norm is that of all its microbatches and data-parallel ranks taken together. With kinds or a
    name selected, those boundaries' alone.
    """
    found: Scalars = defaultdict(dict)
    if not request.kinds and request.name is None:
        for name, values in trace.numbers.items():
            for step, value in values.items():
                if request.wants_step(step):
                    found[step][f"run/{safe(name, limit=_LONGEST)}"] = value
    for tensor in trace.wanted(request):
        if tensor.norm is not None and tensor.kind != Kind.SCHEDULE:
            step = INIT_STEP if tensor.step == "init" else tensor.step
            tag = _tag("norm", tensor.kind, tensor.name, tensor.slot)
            found[step][tag] = math.hypot(found[step].get(tag, 0.0), tensor.norm)
    return _some(found)


def of_comparison(a: Path, b: Path, request: Request, options: CompareOptions) -> tuple[Scalars, Result]:
    """Return the relative error of each boundary under ``error/``, under ``ratio/`` over what is allowed.

    Of several microbatches and calls the worst; what is equal in every bit is 0. Steps are a's.
    """
    found: Scalars = defaultdict(dict)

    def look(examined: Examined) -> None:
        for each in survey(examined.execution, examined.result):
            node, slot, judgement = each.node, each.node.slot, each.judgement
            if each.state == "missing" or not request.wants_step(node.step):
                continue
            values = {"error": judgement.error, "ratio": judgement.ratio} if judgement else {}
            if each.state == "equal":
                values = {"error": 0.0, "ratio": 0.0}
            for what, value in values.items():
                tag = _tag(what, slot.kind, slot.name, slot.slot)
                found[node.step][tag] = max(found[node.step].get(tag, 0.0), value)

    result = compare(a, b, options=options, look=look)
    return _some(found), result


def _tag(what: str, kind: Kind, name: str, slot: str) -> str:
    return safe(f"{what}/{kind}/{name}/{slot}", limit=_LONGEST)


def _some(found: Scalars) -> Scalars:
    if not found:
        raise BadRequest("no number to export", remedy="select other steps, kinds or names")
    return {step: found[step] for step in sorted(found)}
