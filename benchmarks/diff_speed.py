"""How fast two traces are compared: GB of one trace per CPU-second (user + system), and the memory it takes.

    python benchmarks/diff_speed.py [--gb 2] [--folder DIR] [--repeat 3] [--jobs N]

Writes pairs of traces into a temporary folder, compares each with ``trace diff`` and deletes them. Where all
differ, they do by round-off; ``raw`` are stored as they are, ``compressed`` as the recorder stores them by
default. Equal traces are compared by their digests alone, or with ``--verify`` after reading every byte. The
time includes starting Python, whose bytecode is compiled before as that of an installed package is. Beside it
stands the speed at which one core copies memory, and the least that a comparison of raw traces does: read
both once into memory that is used again, hash them, subtract and square; nothing is imported or judged.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.diff_traces import SMALL_VOCABULARY, VOCABULARY, Run
from tensortrace.tracer.codec import Compress

LAYER_BYTES = 51 << 20
"""Bytes of a layer in one step: two activations of three in bfloat16, with gradients; six of each weight."""

WORD_BYTES = 32 << 10
"""Bytes of a word of the vocabulary in one step: logits and their gradient, and six of its weight."""

TRACE = Path(sys.executable).parent / "trace"


class Spent(NamedTuple):
    """What one comparison took."""

    cpu_s: float
    wall_s: float
    peak_mb: float


def diff(a: Path, b: Path, *options: str, expect: int = 0) -> Spent:
    """Run ``trace diff`` and return what it took; its exit code must be the expected one."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    child = subprocess.Popen(
        [TRACE, "diff", "-q", a, b, *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=kept | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert child.stderr is not None
    told = child.stderr.read().decode()
    _, status, usage = os.wait4(child.pid, 0)
    code = child.returncode = os.waitstatus_to_exitcode(status)
    if code != expect:
        raise SystemExit(f"trace diff {a} {b}: exit code {code}, not {expect}\n{told}")
    return Spent(usage.ru_utime + usage.ru_stime, time.perf_counter() - began, usage.ru_maxrss / 1024)


def median(measure: Callable[[], Spent], repeat: int) -> Spent:
    """Return the medians of some runs, after one that warms the page cache."""
    measure()
    found = [measure() for _ in range(repeat)]
    return Spent(*(statistics.median(values) for values in zip(*found, strict=True)))


def copy_speed() -> float:
    """Return GB/s at which memory is copied into memory that is in use, by one core."""
    source = np.ones(64 << 20, np.uint8)
    target = np.ones_like(source)
    best = 0.0
    for _ in range(9):
        began = time.process_time()
        np.copyto(target, source)
        best = max(best, source.size / (time.process_time() - began))
    return best / 1e9


def least(a: Path, b: Path) -> float:
    """Return the CPU-seconds of one pass over both traces' files: read, hashed, subtracted, squared."""
    memory = [np.empty(1 << 20, np.uint8) for _ in range(2)]
    values = [block.view(np.float32) for block in memory]
    apart = np.empty_like(values[0])
    began = time.process_time()
    with np.errstate(all="ignore"):  # headers between the tensors make any number
        for paths in zip(sorted(a.glob("rank*/seg*")), sorted(b.glob("rank*/seg*")), strict=True):
            hashes = [xxhash.xxh3_128() for _ in paths]
            with open(paths[0], "rb", buffering=0) as left, open(paths[1], "rb", buffering=0) as right:
                while min(left.readinto(memory[0]), right.readinto(memory[1])):
                    for one, block in zip(hashes, memory, strict=True):
                        one.update(block.data)
                    np.subtract(values[1], values[0], out=apart)
                    apart @ apart
    return time.process_time() - began


class Size(NamedTuple):
    """How large a trace is: layers and words of its model, and steps."""

    layers: int
    vocabulary: int
    steps: int

    @classmethod
    def of(cls, gb: float) -> Size:
        """Return about so many GB, in two steps or more, of which the first has no update before it.

        Traces under 1.2 GB have no tensors of 64 MB.
        """
        vocabulary = VOCABULARY if gb >= 1.2 else SMALL_VOCABULARY
        steps = max(2, round(gb))
        return cls(
            max(1, round((gb / steps * 1e9 - vocabulary * WORD_BYTES) / LAYER_BYTES)), vocabulary, steps
        )


def pair(folder: Path, size: Size, compress: Compress, *, equal: bool) -> tuple[Path, Path, float]:
    """Write two traces; return them and the GB of tensors in one."""
    layers, vocabulary, steps = size
    made = []
    for noise in (0,) if equal else (0, 1):
        run = Run(folder / "ab"[noise], layers=layers, noise=noise, compress=compress, vocabulary=vocabulary)
        made.append(run.write(steps))
    if equal:
        shutil.copytree(folder / "a", folder / "b")
    return folder / "a", folder / "b", made[0] / 1e9


WAYS: tuple[tuple[str, Compress, bool, tuple[str, ...]], ...] = (
    ("raw, all differ", "none", False, ()),
    ("compressed, all differ", "auto", False, ()),
    ("equal, by digests", "auto", True, ()),
    ("equal, --verify", "auto", True, ("--verify",)),
)


def main() -> None:
    """Measure and print one line for each way of comparing, and one on memory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0, help="about the size of one trace")
    parser.add_argument("--folder", type=Path, help="where traces are written")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--jobs", type=int, help="as of trace diff")
    chosen = parser.parse_args()
    options = ("--jobs", str(chosen.jobs)) if chosen.jobs else ()
    copied = copy_speed()
    print(f"memory copy, one core: {copied:.1f} GB/s")
    peaks = {}
    for title, compress, equal, more in WAYS:
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            a, b, size = pair(Path(folder), Size.of(chosen.gb), compress, equal=equal)
            spent = median(lambda: diff(a, b, *options, *more), chosen.repeat)  # noqa: B023
            passed = least(a, b) if compress == "none" else 0.0
        speed = size / spent.cpu_s
        peaks[title] = size, spent.peak_mb
        print(
            f"{title:24s} {size:6.2f} GB  {spent.cpu_s:7.2f} s CPU {spent.wall_s:7.2f} s wall  "
            f"{speed:7.2f} GB/CPU-s = {speed / copied:5.2f} of a copy   peak {spent.peak_mb:5.0f} MB"
        )
        if passed:
            title = "  read, hash, subtract"
            print(f"{title:24s} {size:6.2f} GB  {passed:7.2f} s CPU {size / passed:23.2f} GB/CPU-s")
    once = Size.of(chosen.gb)
    twice = once._replace(steps=2 * once.steps)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        a, b, size = pair(Path(folder), twice, "none", equal=False)
        spent = diff(a, b, *options)
    half, peak = peaks["raw, all differ"]
    print(f"peak memory: {peak:.0f} MB at {half:.1f} GB, {spent.peak_mb:.0f} MB at {size:.1f} GB")


if __name__ == "__main__":
    main()
