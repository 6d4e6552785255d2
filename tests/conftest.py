"""Fixtures that several folders of tests share: traces of the example, each recorded once."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

    ``recorded(2, "--accumulate", 2)`` returns the trace; a session that asks again gets the same, in
    whichever of its processes (``-n 2``).
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "example"
    folder.mkdir(exist_ok=True)

    def record(ranks: int, *arguments: object) -> Path:
        key = hashlib.sha256(repr((ranks, *map(str, arguments))).encode()).hexdigest()[:16]
        trace, whole = folder / key, folder / f"{key}.whole"
        with _held(folder / f"{key}.lock"):
            if not whole.exists():
                shutil.rmtree(trace, ignore_errors=True)  # another process of the session could not finish it
                harness.record(trace, harness.on_ranks(ranks, harness.EXAMPLE, *arguments))
                whole.touch()
        return trace

    return record


@contextmanager
def _held(lock: Path) -> Iterator[None]:
    """Let one process of the session at a time be in the body; the system lets go of it if that one dies."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
