"""Trains and diffs in processes forked from one that has imported torch: the same in a fraction of the time.

A program is recorded from inside (``tensortrace.tracer.record``) in place of ``trace record``; each rank is a
process of its own, as under torchrun. The process that forks may have one thread only.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.optim
import torch.distributed.tensor.parallel  # noqa: F401 - all imported here once, and in no child again

from tensortrace import tracer
from tensortrace.cli.main import run as trace
from tensortrace.diff import engine  # noqa: F401

gc.collect()
gc.freeze()  # recordings look through what the collector tracks: not through half a million objects of ours

GRACE_S = 3.0
"""How long other ranks have, once one has failed, to tell their own errors."""


def record(
    program: Path,
    arguments: Sequence[str],
    ranks: int,
    to: Path,
    kinds: Sequence[str],
    limit_s: float,
    level: str = "full",
) -> str:
    """Record a program on ``ranks`` ranks, each with its kinds ("" for all); return "" or what went wrong."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tasks = []
    for rank in range(ranks):
        variables = {"OMP_NUM_THREADS": "1"}
        if ranks > 1:
            variables |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
        tasks.append(
            lambda rank=rank, given=variables: _train(program, arguments, to, kinds[rank], given, level)
        )
    return forked(tasks, to.with_name(f"{to.name}.log"), limit_s)


def diff(arguments: Sequence[str], log: Path, limit_s: float) -> str:
    """Run ``trace diff`` with these arguments; return "" or what went wrong."""
    return forked([lambda: trace(["diff", *arguments])], log, limit_s, good=(0, 1))


def forked(tasks: Sequence[Callable[[], int]], log: Path, limit_s: float, good: Sequence[int] = (0,)) -> str:
    """Run each task in a process of its own; return "" if all ended well, else the end of what they said."""
    running = {_fork(task, log): number for number, task in enumerate(tasks)}
    every, deadline, failed = list(running), time.monotonic() + limit_s, ""
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            code = os.waitstatus_to_exitcode(status)
            number = running.pop(process)
            if code not in good:
                failed = failed or f"process {number} ended with {code}"
                deadline = min(deadline, time.monotonic() + GRACE_S)
        elif time.monotonic() > deadline:
            failed = failed or f"did not end within {limit_s:g} s"
            for other in every:
                if other in running:
                    os.killpg(other, signal.SIGKILL)
                    os.waitpid(other, 0)
            break
        else:
            time.sleep(0.02)
    said = log.read_text(errors="replace") if log.exists() else ""
    log.unlink(missing_ok=True)
    return failed and f"{failed}: " + "\n".join(said.strip().splitlines()[-25:])


def _fork(task: Callable[[], int], log: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setpgid(0, 0)
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        code = task()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _train(
    program: Path, arguments: Sequence[str], to: Path, kinds: str, variables: Mapping[str, str], level: str
) -> int:
    os.environ.update(variables)
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.parent))
    warnings.resetwarnings()
    with tracer.record(to, kinds=kinds, min_free="0", level=[level]):
        runpy.run_path(str(program), run_name="__main__")
    return 0
