"""Fill docs/performance.md with what the benchmarks print on this machine.

    python -m docs.performance                          run every benchmark that the page names
    python -m docs.performance --only '*diff_speed*'    some of them: globs on commands; the others stay

The page marks an output with its command, ``<!-- made by: python benchmarks/diff_speed.py -->``, above a
block of text. What is written there is the command, the date, versions, then what it printed. A benchmark
that does not exist, or fails, leaves its block as it was and is named. Run it from the repository's folder,
on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BLOCK = re.compile(r"(<!-- made by: (?P<command>.+?) -->\n```text\n)(?P<shown>.*?)(```\n)", re.DOTALL)
MACHINE = "python -m docs.performance --machine"
PACKAGES = ("torch", "numpy", "zstandard", "xxhash", "msgspec")


def main() -> int:
    """Rewrite the page's blocks; return how many could not be made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="a glob on commands")
    parser.add_argument("--machine", action="store_true", help="print the machine's limits and stop")
    chosen = parser.parse_args()
    if chosen.machine:
        print("\n".join(machine()))
        return 0
    failed = []

    def filled(found: re.Match[str]) -> str:
        command = found["command"]
        if not fnmatchcase(command, chosen.only):
            return found[0]
        print(command, file=sys.stderr)
        shown = output(command)
        if shown is None:
            failed.append(command)
            return found[0]
        return f"{found[1]}{shown}{found[4]}"

    PAGE.write_text(BLOCK.sub(filled, PAGE.read_text()))
    for command in failed:
        print(f"could not be made: {command}", file=sys.stderr)
    return len(failed)


def output(command: str) -> str | None:
    """Return what a block shows of a command, None where it failed."""
    words = shlex.split(command)
    assert words[0] == "python", command
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return None
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join([f"$ {command}", f"# {circumstances()}", *lines, ""])


def circumstances() -> str:
    """Return date, commit and versions."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    python = f"Python {platform.python_version()}"
    return ", ".join([datetime.date.today().isoformat(), commit, python, *versions])


def machine() -> list[str]:
    """Return what one core, the memory and the disk of this machine can do at most."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").open()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    cores = len(os.sched_getaffinity(0))
    source = np.ones(64 << 20, np.uint8)
    target = np.ones_like(source)
    return [
        f"processor              {model}, {cores} cores of this process",
        f"memory                 {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        f"copy, memory in use    {_speed(lambda: np.copyto(target, source), source.size):.1f} GB/CPU-s",
        f"copy, fresh memory     {_speed(source.copy, source.size):.1f} GB/CPU-s",
        *_disk(source),
    ]


def _speed(work: object, size: int, clock: object = time.process_time) -> float:
    assert callable(work)
    assert callable(clock)
    best = 0.0
    for _ in range(7):
        began = clock()
        work()
        best = max(best, size / (clock() - began))
    return best / 1e9


def _disk(source: np.ndarray) -> list[str]:
    with tempfile.TemporaryFile() as file:

        def write() -> None:
            file.seek(0)
            file.write(source.data)
            file.flush()

        def synced() -> None:
            write()
            os.fsync(file.fileno())

        def read() -> None:
            os.preadv(file.fileno(), [target], 0)

        target = np.empty_like(source)
        return [
            f"write(2), no fsync     {_speed(write, source.size):.1f} GB/CPU-s",
            f"write and fsync        {_speed(synced, source.size, time.perf_counter):.1f} GB/s",
            f"read, in page cache    {_speed(read, source.size):.1f} GB/CPU-s",
        ]


if __name__ == "__main__":
    sys.exit(main())
