"""Fill docs/performance.md with what the benchmarks print on this machine.

    python -m docs.performance                          run every benchmark that the page names
    python -m docs.performance --only '*diff_speed*'    some of them: globs on commands; the others stay
    python -m docs.performance --check                  run nothing; exit 1 where a block is out of shape

The page marks an output with its command, ``<!-- made by: python benchmarks/diff_speed.py -->``, above a
block of text. What is written there is the command, the date, versions, then what it printed, as soon as it
has. A benchmark that does not exist, or fails, leaves its block as it was and is named. Run it from the
repository's folder, on a machine that does nothing else. ``--check`` is about structure: figures differ from
machine to machine.
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
import xxhash

from tensortrace.tracer.codec import Decoder, Encoder, logical, parse_frame

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
BLOCK = re.compile(r"(<!-- made by: (?P<command>.+?) -->\n```text\n)(?P<shown>.*?)(```\n)", re.DOTALL)
MACHINE = "python -m docs.performance --machine"
ROUNDS = 7
BENCHMARKS = ("record_overhead", "trace_size", "diff_speed", "sketch_accuracy")
UNMEASURED = "not measured yet\n"
CIRCUMSTANCES = re.compile(r"# \d{4}-\d\d-\d\d, [0-9a-f]+, Python [\d.]+, torch \S+, .+")
OPTION = re.compile(r"--[a-z][a-z-]*")
PACKAGES = ("torch", "numpy", "zstandard", "xxhash", "msgspec")


def main() -> int:
    """Rewrite the page's blocks; return how many could not be made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="a glob on commands")
    parser.add_argument("--machine", action="store_true", help="print the machine's limits and stop")
    parser.add_argument("--check", action="store_true", help="run nothing; say which block is out of shape")
    chosen = parser.parse_args()
    if chosen.machine:
        print("\n".join(machine()))
        return 0
    if chosen.check:
        found = problems(PAGE.read_text())
        print("\n".join(found), file=sys.stderr)
        return len(found)
    failed = [
        command
        for command in (block["command"] for block in BLOCK.finditer(PAGE.read_text()))
        if fnmatchcase(command, chosen.only) and not fill(command)
    ]
    for command in failed:
        print(f"could not be made: {command}", file=sys.stderr)
    return len(failed)


def fill(command: str) -> bool:
    """Run one command and write its block; False where it failed, and the block stays."""
    print(command, file=sys.stderr)
    shown = output(command)
    if shown is not None:
        PAGE.write_text(
            BLOCK.sub(
                lambda found: f"{found[1]}{shown}{found[4]}" if found["command"] == command else found[0],
                PAGE.read_text(),
            )
        )
    return shown is not None


def problems(page: str) -> list[str]:
    """Return what is wrong with the blocks of the page: with what they show, and with what makes them."""
    blocks = list(BLOCK.finditer(page))
    commands = [block["command"] for block in blocks]
    found = [
        f"{command}: twice on the page" for command in sorted(set(commands)) if commands.count(command) > 1
    ]
    found += [f"{line}: no block of text follows it" for line in _marks(page) if line not in commands]
    wanted = [MACHINE, *(f"python benchmarks/{name}.py" for name in BENCHMARKS)]
    found += [f"{each}: not on the page" for each in wanted if not any(c.startswith(each) for c in commands)]
    return found + [problem for block in blocks for problem in _of_block(block["command"], block["shown"])]


def _marks(page: str) -> list[str]:
    return re.findall(r"<!-- made by: (.+?) -->", page)


def _of_block(command: str, shown: str) -> list[str]:
    lines = shown.splitlines()
    found = []
    if shown != UNMEASURED:
        if lines[:1] != [f"$ {command}"]:
            found.append(f"{command}: its block begins with {lines[:1]}")
        if len(lines) < 3 or not CIRCUMSTANCES.fullmatch(lines[1]):
            found.append(f"{command}: date, commit and versions, then what was printed, do not follow")
    script = ROOT / "docs" / "performance.py" if command == MACHINE else ROOT / shlex.split(command)[1]
    if not script.is_file():
        return [*found, f"{command}: there is no {script.name}"]
    known = OPTION.findall(script.read_text())
    return found + [f"{command}: no option {each}" for each in OPTION.findall(command) if each not in known]


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
    described = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    named = re.search(r"^model name\s*: (.+)$", described, re.MULTILINE)
    model = named[1] if named else platform.processor()
    cores = len(os.sched_getaffinity(0))
    source = np.ones(64 << 20, np.uint8)
    target = np.ones_like(source)
    return [
        f"processor              {model}, {cores} cores of this process",
        f"memory                 {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        f"copy, memory in use    {_speed(lambda: np.copyto(target, source), source.size):.1f} GB/CPU-s",
        f"copy, fresh memory     {_speed(source.copy, source.size):.1f} GB/CPU-s",
        *_disk(source),
        *_coding(),
    ]


def _speed(work: object, size: int, clock: object = time.process_time) -> float:
    assert callable(work)
    assert callable(clock)
    best = 0.0
    for _ in range(ROUNDS):
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


def _coding() -> list[str]:
    """Return the speed of what is done with every tensor: of float32 as a normal distribution gives it."""
    data = np.random.default_rng(0).standard_normal(8 << 20).astype("<f4").view(np.uint8)
    encoder, decoder = Encoder("planes"), Decoder()
    frames = [b"".join(parts) for parts in encoder.frames("planes", "float32", data)]

    def encode() -> None:
        for _ in encoder.frames("planes", "float32", data):
            pass

    def decode() -> None:
        raw = [decoder.frame(frame, parse_frame(_Memory(frame), 0)) for frame in frames]
        logical("planes", "float32", np.frombuffer(b"".join(raw), np.uint8))

    plane = np.ascontiguousarray(data[3::4])
    packed = sum(map(len, encoder.frame(plane)))
    return [
        f"hash, xxh3-128         {_speed(lambda: xxhash.xxh3_128_digest(data.data), data.size):.1f} GB/CPU-s",
        f"zstd of exponents      {_speed(lambda: encoder.frame(plane), plane.size):.1f} GB/CPU-s, "
        f"to {packed / plane.size:.3f} of their bytes",
        f"planes and zstd        {_speed(encode, data.size):.1f} GB/CPU-s, "
        f"to {sum(map(len, frames)) / data.size:.3f} of float32",
        f"and back               {_speed(decode, data.size):.1f} GB/CPU-s",
    ]


class _Memory:
    """Random access to bytes that are there."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def at(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset``."""
        return self._data[offset : offset + size]


if __name__ == "__main__":
    sys.exit(main())
