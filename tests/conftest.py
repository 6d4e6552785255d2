"""Fixtures that several folders of tests share: traces of the example, each recorded once."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import harness

RecordExample = Callable[..., Path]

# Started in the background, a shell has interrupts ignored and programs inherit that: tests that interrupt
# a program would then wait for ever. A handler here makes the programs we start begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def only_what_tests_make() -> None:
    """Take what is there before the first test of a file out of the collector's sight: torch, pytest's own.

    A recording looks through all that the collector tracks for models that the program has made. Half a
    million objects that no test has made would cost each of a thousand recordings half a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordExample:
    """Return a function that records the example once for each number of ranks and arguments.

    ``recorded(2, "--accumulate", 2)`` returns the trace; a session that asks again gets the same.
    """
    folder = tmp_path_factory.mktemp("traces")
    traces: dict[tuple[str, ...], Path] = {}

    def record(ranks: int, *arguments: object) -> Path:
        key = (str(ranks), *map(str, arguments))
        if key not in traces:
            command = harness.on_ranks(ranks, harness.EXAMPLE, *arguments)
            traces[key] = harness.record(folder / f"trace{len(traces)}", command)
        return traces[key]

    return record
