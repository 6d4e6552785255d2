"""Says which operation of a divergent module is the first at which the runs part, and where to look else."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensortrace.diff import result
from tensortrace.diff.assemble import by_rows
from tensortrace.diff.catalog import Catalog, enclosing
from tensortrace.diff.compare import EPS
from tensortrace.diff.execute import Execution
from tensortrace.diff.operations.calls import Call, CallKey, Given, Operation, calls_of
from tensortrace.diff.operations.gradients import GradientSearch
from tensortrace.diff.operations.search import SIGNIFICANT, ByRows, Found, Search
from tensortrace.diff.operations.sides import Side
from tensortrace.diff.outcome import Outcome
from tensortrace.diff.plan.fitted import gradient_scale
from tensortrace.diff.plan.pair import StepPair
from tensortrace.tracer.types import INIT_STEP, ROOT, Kind

_LOOKED_INTO = frozenset({Kind.ACTIVATION, Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD})
MAX_CALLS = 64
MAX_SHOWN = 6
MAX_CALLERS = 2


class Looked(NamedTuple):
    """What looking into modules told: the operation, or in ``notes`` why a ``covered`` origin has none."""

    operation: result.Operation | None = None
    covered: bool = False
    notes: tuple[str, ...] = ()


def first_operation(origin: Outcome, execution: Execution, a: Catalog, b: Catalog, offset: int) -> Looked:
    """Return the first divergent operation behind an origin, if anything of it was looked into.

    Calls of the modules around the origin come first, then of others in which anything diverges. The calls
    themselves are judged by the boundaries of their module alone: whatever is computed inside, by however
    many operations, is no divergence where the ends agree.
    """
    step, kind = origin.node.step, origin.node.slot.kind
    if kind not in _LOOKED_INTO or step == INIT_STEP:
        return Looked()
    calls_a, calls_b = calls_of(a.trace, step), calls_of(b.trace, step - offset)
    touched = {
        o.node.slot.name
        for o in execution.outcomes
        if o.node.step == step and (kind != Kind.ACTIVATION or o.node.slot.kind == kind)
    }
    keys = [key for key in calls_a if key in calls_b and _of_microbatch(key, origin)]
    keys = [key for key in keys if _covers(key[1], origin.node.slot.name)] + [
        key for key in keys if not _covers(key[1], origin.node.slot.name) and _any_in(key[1], touched)
    ]
    notes: list[str] = []
    for key in keys[:MAX_CALLS]:
        noise = _noise(execution, step, key[1])
        found = _in_call(key, calls_a[key], calls_b[key], origin, a, b, noise)
        if isinstance(found, result.Operation):
            return Looked(found, covered=True)
        notes.append(found)
    covered = any(_covers(key[1], origin.node.slot.name) for key in keys)
    return Looked(None, covered, tuple(notes[:1]) if covered else ())


def _in_call(
    key: CallKey, calls_a: Sequence[Call], calls_b: Sequence[Call], origin: Outcome, a: Catalog, b: Catalog,
    noise: float,
) -> result.Operation | str:  # fmt: skip
    """Return the first divergent operation of one call, or why none can be named."""
    coarser = _precision(a, key[1]) != _precision(b, key[1])
    search = Search(
        Side(a, calls_a),
        Side(b, calls_b),
        coarser=coarser,
        noise=noise,
        microbatch=key[0],
        **_by_rows(origin.pair),
    )
    error = origin.metrics.rel_l2 if origin.metrics and origin.metrics.rel_l2 else 0.0
    least = SIGNIFICANT * min(error, 1.0)
    found = search.forward(least=least)
    if found is None and origin.node.slot.kind != Kind.ACTIVATION:
        found = GradientSearch(search).first(least=least)
    if found is not None:
        return _stated(found, search, key)
    unmet = [op for op, _ in search.unmet]
    why = f"; not compared: {_some(unmet)} ({search.unmet[0][1]})" if unmet else ""
    for side, only in zip(("a", "b"), search.only(), strict=True):
        why += f"; only in {side}: {_some(only)}" if only else ""
    return f"the operations of {key[1]} were compared, and none could be named{why}"


def _by_rows(pair: StepPair | None) -> dict[str, ByRows]:
    """Return what brings values, and gradients, of both runs to one order of rows."""
    if pair is None:
        return {}
    return {
        "rows": lambda a, b: by_rows(a, b, pair.pairing),
        "gradient_rows": lambda a, b: by_rows(
            a, b, pair.pairing, scale_b=gradient_scale(pair), additive=True
        ),
    }


def _noise(execution: Execution, step: int, module: str) -> float:
    """Return the greatest relative error at the boundaries of a module that agree."""
    of_module = (
        error.rel
        for node, error in execution.errors.items()
        if node.step <= step and _covers(module, node.slot.name) and not error.diverges
        if node.slot.kind in (Kind.ACTIVATION, Kind.PARAM)
    )
    return max((rel for rel in of_module if math.isfinite(rel)), default=0.0)


def _covers(module: str, name: str) -> bool:
    return module == ROOT or name == module or name.startswith(f"{module}.")


def _any_in(module: str, names: Iterable[str]) -> bool:
    return any(_covers(module, name) for name in names)


def _of_microbatch(key: CallKey, origin: Outcome) -> bool:
    return origin.node.microbatch is None or key[0] == origin.node.microbatch


def _precision(catalog: Catalog, module: str) -> frozenset[str]:
    """Return the dtypes in which a module's calls compute, as their boundaries say."""
    return frozenset(
        entry.meta.autocast or entry.dtype
        for rank in catalog.trace.ranks[:1]
        for entry in rank.entries
        if entry.kind == Kind.ACTIVATION and entry.name == module and EPS.get(entry.dtype)
    )


def _stated(found: Found, search: Search, key: CallKey) -> result.Operation:
    differs = _differences(found.a, found.b, lists=search.same_layout) if found.a and found.b else ()
    shown = found.b or found.a
    assert shown is not None
    verdict = found.verdict
    return result.Operation(
        module=shown.module,
        call_of=key[1],
        microbatch=key[0],
        call=key[2],
        text=_text(found, differs),
        operation_a=found.a.op if found.a else None,
        operation_b=found.b.op if found.b else None,
        source_a=_place(found.a) if found.a else None,
        source_b=_place(found.b) if found.b else None,
        differs=differs,
        metrics=verdict.metrics if verdict else None,
        judgement=verdict.judgement if verdict else None,
        evidence=_evidence(found, search),
    )


def _text(found: Found, differs: Sequence[str]) -> str:
    if found.way == "flow":
        return _flow_text(found)
    if found.way == "function":
        return _function_text(found)
    if found.a is None or found.b is None:
        one, side, other = (found.a, "a", "b") if found.a else (found.b, "b", "a")
        assert one is not None
        return f"{_named(one)}, only in {side}: {other} has no such operation there{_shown(found)}"
    if found.a.op != found.b.op:
        left, right = _several(found.a, found.others_a), _several(found.b, found.others_b)
        return f"{right} in b, {left} in a{_shown(found)}"
    places = _named(found.b)
    if found.a.source != found.b.source:
        places += f" in b, {_place(found.a)} in a"
    if found.way == "wiring" and found.given is not None:
        left, right = (
            _result(given, others)
            for given, others in zip(found.given, (found.others_a, found.others_b), strict=True)
        )
        return f"{places}: as {found.given[1].argument} it was given {right} in b, {left} in a"
    if differs:
        return f"{places}: {'; '.join(differs)}{_shown(found)}"
    users = ", ".join(dict.fromkeys(_named(used) for _, used in found.used_by[:MAX_SHOWN]))
    what = "its gradient differs although those of all that use its result agree"
    what += f" ({users})" if users else ""
    if found.way == "value":
        what = "its result differs although all that it was given agrees"
    return f"{places}: {what}{_shown(found)}"


def _result(given: Given, makers: Sequence[Operation]) -> str:
    if not makers:
        return "what came from outside of the module"
    number = given.reference.partition(".")[2]
    which = f"result {number}" if number.isdigit() else "the result"
    return f"{which} of {_named(makers[0])}"


def _function_text(found: Found) -> str:
    assert found.b is not None
    assert found.shows_at is not None
    return (
        f"{_named(found.b)}: it runs inside an autograd.Function, whose backward gives another gradient to"
        f" the result of {_named(found.shows_at[1])}, unless a hook on that does"
    )


def _flow_text(found: Found) -> str:
    assert found.shows_at is not None
    at_a, at_b = found.shows_at
    if found.a is not None and found.b is not None:
        at_a, at_b = found.a, found.b
    if found.a is None or found.b is None:
        stop, side, other = (found.a, "a", "b") if found.a else (found.b, "b", "a")
        flows = at_b if side == "a" else at_a
        assert stop is not None
        return f"{_named(stop)}, only in {side}: in {other} a gradient flows through {_named(flows)}"
    with_flow, without = ("b", "a") if at_b.requires_grad else ("a", "b")
    if at_a.requires_grad == at_b.requires_grad:
        return _operand_text(found.a, found.b)
    reason = ""
    if at_a.grad_enabled != at_b.grad_enabled:
        reason = f": in {without} it runs under no_grad"
    return f"{_named(at_b)}: a gradient flows through it in {with_flow}, none in {without}{reason}"


def _operand_text(a: Operation, b: Operation) -> str:
    """Say to what an operation was given no gradient flows, in one run only: nothing was dispatched there."""
    pairs = zip(a.given, b.given, strict=True)
    left, right = next((x, y) for x, y in pairs if x.flows != y.flows)
    without = "b" if left.flows else "a"
    what = f"its {right.argument} requires no gradient in {without}, as behind detach() or .data"
    return f"{_named(b)}: {what}"


def _shown(found: Found) -> str:
    if found.shows_at is None:
        return ""
    _, at = found.shows_at
    what = "gradient" if found.way == "gradient" else "result"
    return f"; it shows in the {what} of {_named(at)}"


def _named(operation: Operation) -> str:
    if operation.source is None:
        return operation.op
    called = "".join(f", called at {caller}" for caller in operation.callers[:MAX_CALLERS])
    return f"{operation.op} at {_place(operation)}{called}"


def _several(first: Operation, others: Sequence[Operation]) -> str:
    if not others:
        return _named(first)
    return f"{len(others) + 1} operations from {_named(first)} to {_named(others[-1])}"


def _place(operation: Operation) -> str | None:
    if operation.source is None:
        return None
    return f"{operation.source} in {operation.function}" if operation.function else operation.source


def _differences(a: Operation, b: Operation, *, lists: bool) -> tuple[str, ...]:
    """Return what beside tensors the operations were given otherwise; ``lists`` are sizes, of a layout."""
    found = []
    for name in dict.fromkeys((*b.settings, *a.settings)):
        left, right = a.settings.get(name), b.settings.get(name)
        if left != right and (lists or name.startswith("dim") or not str(left or right).startswith("[")):
            found.append(f"{name} {_said(right)} in b, {_said(left)} in a")
    if a.dtypes != b.dtypes and not any(text.startswith("dtype ") for text in found):
        found.append(
            f"result {', '.join(b.dtypes) or 'nothing'} in b, {', '.join(a.dtypes) or 'nothing'} in a"
        )
    return tuple(found)


def _said(value: str | None) -> str:
    return "not given" if value is None else value


def _evidence(found: Found, search: Search) -> tuple[str, ...]:
    lines = []
    verdict = found.verdict
    if verdict is not None and verdict.how:
        lines.append(f"the ranks' tensors met as: {verdict.how}")
    if found.a is None or found.b is None or found.a.op != found.b.op:
        alone = [(side, op) for side, op in (("a", found.a), ("b", found.b)) if op and op.settings]
        lines += [f"{op.op} in {side} is given {_settings(op)}" for side, op in alone]
    for side, others in (("a", found.others_a), ("b", found.others_b)) if found.way != "wiring" else ():
        rest = [op for op in others if op is not found.a and op is not found.b]
        if rest:
            lines.append(f"also only in {side}: {_some(rest)}")
    only_a, only_b = search.only()
    mentioned = {id(op) for op in (found.a, found.b, *found.others_a, *found.others_b)}
    for side, only in (("a", only_a), ("b", only_b)):
        rest = [op for op in only if id(op) not in mentioned]
        if rest:
            lines.append(f"{len(rest)} operations only in {side}: {_some(rest)}")
    lines.append(f"{len(search.pairs)} operations of both were paired")
    if search.unmet:
        unmet = [op for op, _ in search.unmet]
        lines.append(f"not compared before it: {_some(unmet)} ({search.unmet[0][1]})")
    return tuple(lines)


def _settings(operation: Operation) -> str:
    return ", ".join(f"{name} {value}" for name, value in list(operation.settings.items())[:MAX_SHOWN])


def _some(operations: Sequence[Operation]) -> str:
    shown = ", ".join(_named(op) for op in operations[:MAX_SHOWN])
    left = len(operations) - MAX_SHOWN
    return shown + (f" and {left} more" if left > 0 else "")


def where_to_look(origin: Outcome, offset: int) -> str | None:
    """Return the options with which to record both runs again, to see inside the module of an origin."""
    slot, step = origin.node.slot, origin.node.step
    if slot.kind not in _LOOKED_INTO or step == INIT_STEP or slot.slot == "hooked":
        return None  # a tensor hook runs in no module
    given = slot.slot.startswith("in")
    outside = given if slot.kind == Kind.ACTIVATION else slot.kind == Kind.ACTIVATION_GRAD and not given
    inner = next(enclosing(slot.name), ROOT) if slot.kind == Kind.LOCAL_GRAD else slot.name
    module = next((name for name in enclosing(inner)), ROOT) if outside and inner != ROOT else inner
    steps = f"--zoom-steps {step}" if not offset else f"--zoom-steps {step} (of b: {step - offset})"
    return f"--zoom {shlex.quote(module)} {steps}"
