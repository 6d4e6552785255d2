"""Recordings of one kind alone: correct runs on one rank and on two never diverge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.types import Kind
from tests.integration.judged import judge_in
from tests.simulated import At, Program

KINDS = (
    Kind.INPUT, Kind.ACTIVATION, Kind.LOSS, Kind.ACTIVATION_GRAD, Kind.LOCAL_GRAD, Kind.CLIPPED_GRAD,
    Kind.SCHEDULE, Kind.OPTIMIZER_STATE, Kind.PARAM,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_alone_is_no_alarm(tmp_path: Path, kind: Kind) -> None:
    class Alone(Program):
        def keeps(self, at: At) -> bool:
            return at.kind == kind

    judge = judge_in(tmp_path)
    try:
        result = judge(Alone(steps=2, max_norm=1e3), Alone(ranks=2, steps=2, max_norm=1e3, order=3))
    except TraceError as refused:
        pytest.skip(str(refused))  # no step to compare
    assert result.verdict != "divergent", result.headline
