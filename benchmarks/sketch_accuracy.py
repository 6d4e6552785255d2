"""Compare what sketches estimate with exact relative L2 errors, on recorded tensors.

    python benchmarks/sketch_accuracy.py [--each 12] [--size 16x16]

A GPT of 4 layers (``benchmarks/gpt.py``) is recorded in full; of each kind of boundary ``--each`` tensors are
taken, and errors of known size are put on them: unstructured, of rank one (all rows alike up to a factor), in
one row alone, and what really differs one step later. Both sides go through the record of an index line.
Printed are the estimated over the exact error (5 %, median, 95 % of all cases), the half width of the error
bar that the diff states over the exact error (median), and the share of cases inside it. The bar: the mean of
K1 x K2 squares, whose signs are shared by rows and columns, has the variance of the row means / K1, of the
column means / K2, less that of single numbers / (K1 K2); see ``diff/estimating.py``.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gpt import Program

from tensortrace import tracer
from tensortrace.diff.estimate import Estimate
from tensortrace.diff.estimating import measure_estimates
from tensortrace.tracer.levels import SMALL, read_level
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.sketch import sketch_flat, sketch_product, whole_sides
from tensortrace.tracer.sketch_record import decode_numbers, encode_numbers
from tensortrace.tracer.types import Kind

KINDS = (Kind.PARAM, Kind.OPTIMIZER_STATE, Kind.LOCAL_GRAD, Kind.ACTIVATION, Kind.ACTIVATION_GRAD)
ERRORS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
STRUCTURES = ("unstructured", "rank one", "one row", "a step later")

Pair = tuple[np.ndarray, np.ndarray]


def record(folder: Path) -> Trace:
    """Record three steps in full."""
    program = Program(autocast=False)
    with tracer.record(folder, min_free="0"):
        for _ in range(3):
            program.step()
    return Trace.open(folder)


def pairs(trace: Trace, each: int) -> Iterator[tuple[Kind, np.ndarray, np.ndarray]]:
    """Yield tensors of step 1 and the same boundaries' of step 2, evenly over each kind."""
    (rank,) = trace.ranks
    later = {e.key[1:]: e for e in rank.entries if e.step == 2}
    for kind in KINDS:
        found = [
            e for e in rank.entries
            if e.step == 1 and e.kind == kind and e.dtype == "float32" and math.prod(e.local_shape) > SMALL
        ]  # fmt: skip
        for entry in found[:: max(len(found) // each, 1)][:each]:
            yield kind, rank.read(entry), rank.read(later[entry.key[1:]])


def difference(
    structure: str, tensor: np.ndarray, later: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Return a difference of some structure and any size, in float64."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    if structure == "a step later":
        return later.astype("f8") - tensor
    if structure == "unstructured":
        return random.standard_normal(tensor.shape)
    if structure == "rank one":
        return np.outer(random.standard_normal(len(rows)), random.standard_normal(rows.shape[1])).reshape(
            tensor.shape
        )
    delta = np.zeros(rows.shape)
    delta[random.integers(len(rows))] = random.standard_normal(rows.shape[1])
    return delta.reshape(tensor.shape)


def with_error(tensor: np.ndarray, delta: np.ndarray, error: float) -> np.ndarray:
    """Return the tensor with the difference scaled to a relative error, not rounded: the error is exact."""
    norm = float(np.linalg.norm(tensor.astype("f8")))
    return tensor.astype("f8") + delta * (error * norm / float(np.linalg.norm(delta)))


def estimate(tensor: np.ndarray, size: tuple[int, int]) -> Estimate:
    """Return what a float32 tensor's index line tells of it."""
    flat, sides = tensor.reshape(-1), whole_sides(tensor.shape)
    if tensor.ndim == 1:
        numbers = sketch_flat(lambda a, b: flat[a:b], sides, [(0, flat.size)], size)
    else:
        numbers = sketch_product(lambda a, b: flat[a:b], sides, size)
    kept = decode_numbers(encode_numbers(numbers, dtype="float32"))
    return Estimate(kept, tensor.shape, float(np.linalg.norm(flat.astype("f8"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--each", type=int, default=12)
    parser.add_argument("--size", default="16x16")
    options = parser.parse_args()
    size = read_level(f"sketch:{options.size}").size
    random = np.random.default_rng(0)
    found: dict[str, list[tuple[float, float, bool]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for kind, tensor, later in pairs(record(Path(folder) / "a"), options.each):
            if not tensor.any():
                continue
            base = estimate(tensor, size)
            for structure in STRUCTURES:
                delta = difference(structure, tensor, later, random)
                for error in ERRORS if delta.any() else ():
                    metrics = measure_estimates(base, estimate(with_error(tensor, delta, error), size))
                    bar = metrics.rel_l2_error or 0.0
                    assert metrics.rel_l2 is not None
                    case = metrics.rel_l2 / error, bar / error, abs(metrics.rel_l2 - error) <= bar
                    for key in ("all", structure, f"error {error:g}", f"{structure}, of {kind.value}"):
                        found[key].append(case)
    print(f"{'':38}  cases  estimate/exact 5 %  median  95 %   bar  inside")
    order = ["all", *STRUCTURES, *(f"error {error:g}" for error in ERRORS)]
    order += [f"{structure}, of {kind.value}" for structure in STRUCTURES for kind in KINDS]
    for key in order:
        ratios, bars, inside = (np.array(column) for column in zip(*found[key], strict=True))
        low, middle, high = np.quantile(ratios, (0.05, 0.5, 0.95))
        print(
            f"{key:38} {len(ratios):6} {low:18.2f} {middle:7.2f} {high:5.2f} {np.median(bars):5.2f} "
            f"{100 * inside.mean():6.1f} %"
        )


if __name__ == "__main__":
    main()
