"""What recording costs: the same training program untraced and under ways of tracing it, one after the other.

    python benchmarks/record_overhead.py [--rounds 3] [--steps 8] [--only full,unselected] [--autocast]

Each round runs every way in a process of its own, so that noise of the machine meets all of them. Ratios are
to the untraced run of the same round; their medians over the rounds are printed. CPU time is user and system
time of all threads until everything is written. ``thread`` is the CPU time of the training thread beyond the
untraced one's, as a share of the untraced one's. Idle threads of torch sleep (OMP_WAIT_POLICY),
else spinning ones would count as work. The program is in ``gpt.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

CHILD = Path(__file__).parent / "gpt.py"
WAYS = (
    "plain",
    "unselected",
    "copied-only",
    "full",
    "full-none",
    "torch.save",
    "safetensors",
    "sketch",
    "stats",
)


class Run(NamedTuple):
    """Seconds a step: median wall time, everything until written (wall, CPU), the training thread's CPU."""

    step: float
    wall: float
    cpu: float
    thread: float
    extra_mib: float
    written_mib: float


def run(way: str, steps: int, *, autocast: bool, folder: Path) -> Run:
    """Run the program once, in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-W", "ignore", str(CHILD), way, str(folder / "out"), "--steps", str(steps)]
    command += ["--autocast"] if autocast else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    walls, _, threads = zip(*found["steps"], strict=True)
    return Run(
        median(walls), found["all"][0] / steps, found["all"][1] / steps, median(threads),
        found["peak_kib"] / 1024, written / 2**20,
    )  # fmt: skip


def line(way: str, runs: list[Run], plain: list[Run]) -> str:
    """Return a way's row of the table."""
    pairs = list(zip(runs, plain, strict=True))
    step, wall, cpu = (
        median(getattr(a, of) / getattr(b, of) for a, b in pairs) for of in ("step", "wall", "cpu")
    )
    thread = median((a.thread - b.thread) / b.thread for a, b in pairs)
    extra = median(a.extra_mib - b.extra_mib for a, b in pairs)
    written = median(a.written_mib for a in runs)
    return f"{way:14s}{step:8.2f}{wall:12.2f}{cpu:12.2f}{100 * thread:9.0f} %{extra:10.0f}{written:10.0f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default=",".join(WAYS[1:]))
    parser.add_argument("--autocast", action="store_true")
    args = parser.parse_args()
    ways = ["plain", *args.only.split(",")]
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way in ways:
            with tempfile.TemporaryDirectory() as folder:
                runs[way].append(run(way, args.steps, autocast=args.autocast, folder=Path(folder)))
    plain = runs["plain"]
    print(f"untraced: {median(r.step for r in plain):.3f} s a step, {median(r.cpu for r in plain):.3f} CPU-s")
    print("way               step   wall, all    CPU, all     thread  MiB more  MiB disk")
    for way in ways[1:]:
        print(line(way, runs[way], plain))


if __name__ == "__main__":
    main()
