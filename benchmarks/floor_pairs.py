"""Count false alarms of repeated clean runs of the nondeterministic example judged with a floor.

    python benchmarks/floor_pairs.py [--runs 20] [--pairs 100] [--floors 3]

Every pair is two distinct runs of the same code, with floors that are other runs again. Printed are the
alarms with the floor and without, how near boundaries that the floor decides come to their limit, and which
of the example's planted mistakes are found with the same floors.
"""

from __future__ import annotations

import argparse
import itertools
import random
import runpy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tensortrace import tracer
from tensortrace.diff.engine import CompareOptions, compare
from tensortrace.diff.result import Result

EXAMPLE = Path(__file__).parents[1] / "examples" / "nondeterministic.py"
STEPS = 2


def record(folder: Path, mistake: str | None = None) -> Path:
    """Record one run of the example in this process."""
    program = runpy.run_path(str(EXAMPLE), run_name="example")
    with tracer.record(folder, min_free="0", buffer="64MiB"):
        program["train"](STEPS, 0, mistake)
    return folder


def draw(runs: list[Path], pairs: int, floors: int) -> Iterator[tuple[Path, Path, tuple[Path, ...]]]:
    """Yield distinct pairs of runs, each with floors that are neither of the two."""
    chooser = random.Random(0)  # noqa: S311 - it draws pairs, not secrets
    every = list(itertools.permutations(runs, 2))
    for a, b in chooser.sample(every, pairs):
        yield a, b, tuple(chooser.sample([run for run in runs if run not in (a, b)], floors))


def decided(result: Result) -> list[float]:
    """Return error over limit of every boundary that the floor decided."""
    return [b.judgement.ratio for b in result.boundaries if b.judgement.policy == "floor"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--floors", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [record(Path(folder) / f"run{number}") for number in range(options.runs)]
        alarms = bare = 0
        ratios: list[float] = []
        for number, (a, b, floors) in enumerate(draw(runs, options.pairs, options.floors)):
            result = compare(a, b, options=CompareOptions(floor=floors))
            ratios += decided(result)
            if not result:
                alarms += 1
                print(f"alarm in pair {number}: {result.headline}")
            bare += number < 10 and not compare(a, b)
            if number % 10 == 9:
                print(f"{number + 1} pairs: {alarms} alarms", flush=True)
        print(f"{alarms} alarms in {options.pairs} clean pairs with {options.floors} floor runs each")
        print(f"{bare} of the first {min(options.pairs, 10)} pairs alarm without a floor")
        quantiles = np.quantile(ratios, [0.5, 0.9, 0.99, 1.0])
        shown = zip(quantiles, ("median", "90 %", "99 %", "worst"), strict=True)
        spread = ", ".join(f"{quantile:.2f} ({at})" for quantile, at in shown)
        print(f"{len(ratios)} judgements by the floor, error over limit: {spread}")
        for mistake in runpy.run_path(str(EXAMPLE), run_name="example")["PLANTS"]:
            bad = record(Path(folder) / mistake, mistake)
            result = compare(runs[0], bad, options=CompareOptions(floor=tuple(runs[1 : 1 + options.floors])))
            print(f"planted {mistake}: {result.verdict}: {result.headline}")


if __name__ == "__main__":
    main()
