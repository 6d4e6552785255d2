"""How large a trace is beside the bytes it records, and what each means contributes.

    python benchmarks/trace_size.py [--steps 5] [--compress planes] [--autocast]
    python benchmarks/trace_size.py --trace DIR

Records the GPT of ``gpt.py`` on one rank, or looks at a trace that is there. ``bound`` is the entropy of each
byte plane of what deduplication leaves: no coder that takes every byte for itself gets below it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from tensortrace.tracer.codec_dtypes import Bytes, dtype_of, size_bytes
from tensortrace.tracer.reader import Trace

CHILD = Path(__file__).parent / "gpt.py"


def record(folder: Path, steps: int, compress: str, *, autocast: bool) -> Path:
    """Record ``steps`` steps of the program and return the trace."""
    way = {"planes": "full-planes", "auto": "full", "none": "full-none"}[compress]
    command = [sys.executable, "-W", "ignore", str(CHILD), way, str(folder / "t"), "--warm-up", "0"]
    command += ["--steps", str(steps), *(["--autocast"] if autocast else [])]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "2"}, stdout=subprocess.DEVNULL, check=True)
    return folder / "t"


def entropy_bytes(data: Bytes, itemsize: int) -> float:
    """Return the sum over byte planes of their entropy, in bytes."""
    total = 0.0
    for byte in range(itemsize):
        counts = np.bincount(data[byte::itemsize], minlength=256)
        share = counts[counts > 0] / counts.sum()
        total -= float((share * np.log2(share)).sum()) * counts.sum() / 8
    return total


def report(trace: Path) -> list[str]:
    """Return the lines of the table."""
    raw = kept = coded = raw_frames = 0
    bound = 0.0
    for rank in Trace.open(trace).ranks:
        for entry in rank.entries:
            raw += size_bytes(entry.dtype, entry.local_shape)
            if entry.blob is None or not entry.blob.raw_length:
                continue
            kept += entry.blob.raw_length
            coded += entry.blob.length
            raw_frames += entry.blob.codec == "raw" and entry.blob.raw_length >= 4096
            bound += entropy_bytes(rank.read_bytes(entry), dtype_of(entry.dtype).itemsize)
    disk = sum(path.stat().st_size for path in trace.rglob("*") if path.is_file())
    rows = {
        "recorded": raw, "after deduplication": kept, "after planes and coding": coded, "bound": bound,
        "files, index and all": disk,
    }  # fmt: skip
    lines = [f"{name:26s}{size / 1e6:10.1f} MB{size / raw:8.3f} of recorded" for name, size in rows.items()]
    return [*lines, f"{raw_frames} tensors of 4 KiB or more were taken as they were"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compress", choices=["auto", "planes", "none"], default="planes")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = args.trace or record(Path(folder), args.steps, args.compress, autocast=args.autocast)
        print("\n".join(report(trace)))


if __name__ == "__main__":
    main()
