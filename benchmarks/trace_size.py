"""How large a trace is beside the bytes it records, and what each means contributes.

    python benchmarks/trace_size.py [--steps 5] [--compress planes] [--autocast] [--ranks 2]
    python benchmarks/trace_size.py --trace DIR

Records the GPT of ``gpt.py``, on one rank or under DistributedDataParallel with ``--dedup-replicas``, or
looks at a trace that is there. ``bound`` is the entropy of each byte plane of what deduplication leaves: no
coder that takes every byte for itself gets below it. The last line says how much smaller a trace would be if
parameters and moments were held as differences to the step before, in planes: the format has no such thing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tensortrace.tracer.codec import Encoder
from tensortrace.tracer.codec_dtypes import Bytes, dtype_of, size_bytes
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.reader_rank import RankTrace
from tensortrace.tracer.types import Entry, Kind

CHILD = Path(__file__).parent / "gpt.py"
FROM_BYTES = 4096
MOVED = (Kind.PARAM, Kind.OPTIMIZER_STATE)


def record(folder: Path, steps: int, compress: str, *, autocast: bool, ranks: int) -> Path:
    """Record ``steps`` steps of the program and return the trace."""
    way = "full" if ranks == 1 else "dedup"
    launch = (
        [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    command = [sys.executable, "-W", "ignore", *launch, str(CHILD)]
    command += [way if compress == "auto" else f"{way}-{compress}", str(folder / "t"), "--warm-up", "0"]
    command += ["--steps", str(steps), *(["--autocast"] if autocast else [])]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, 2 // ranks))}
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return folder / "t"


def entropy_bytes(data: Bytes, itemsize: int) -> float:
    """Return the sum over byte planes of their entropy, in bytes."""
    total = 0.0
    for byte in range(itemsize):
        counts = np.bincount(data[byte::itemsize], minlength=256)
        share = counts[counts > 0] / counts.sum()
        total -= float((share * np.log2(share)).sum()) * counts.sum() / 8
    return total


class Difference:
    """What parameters and moments would be smaller by as differences to the ones before, of one rank."""

    def __init__(self) -> None:
        self._encoder = Encoder("planes")
        self._before: dict[tuple[str, str, str], Bytes] = {}

    def saves(self, entry: Entry, data: Bytes) -> int:
        """Return how many bytes it would save to hold a tensor so."""
        if entry.kind not in MOVED or entry.dtype != "float32" or data.size < FROM_BYTES:
            return 0
        key = entry.kind.value, entry.name, entry.slot
        before = self._before.get(key)
        self._before[key] = data
        if before is None or before.size != data.size:
            return 0
        moved = data.view("<i4") - before.view("<i4")
        folded = ((moved << 1) ^ (moved >> 31)).view(np.uint8)
        return max(0, self._size(data) - self._size(folded))

    def _size(self, data: Bytes) -> int:
        frames = self._encoder.frames("planes", "float32", data)
        return sum(len(part) for frame in frames for part in frame)


@dataclass
class Sizes:
    """Bytes of one rank, or of several added up."""

    recorded: int = 0
    distinct: int = 0
    kept: int = 0
    coded: int = 0
    files: int = 0
    bound: float = 0.0
    difference: int = 0
    raw_tensors: int = 0
    left: set[str] = field(default_factory=set)

    def add(self, other: Sizes) -> None:
        """Add another rank's."""
        for name in ("recorded", "distinct", "kept", "coded", "files", "bound", "difference", "raw_tensors"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def sizes_of(rank: RankTrace) -> Sizes:
    """Return the sizes of what one rank recorded."""
    found = Sizes(files=sum(path.stat().st_size for path in rank.folder.iterdir()))
    difference = Difference()
    for entry in rank.entries:
        size = size_bytes(entry.dtype, entry.local_shape)
        found.recorded += size
        if entry.blob is None and entry.same_as is None and entry.digest not in found.left:
            found.left.add(entry.digest)
            found.distinct += size
        if entry.blob is None or not entry.blob.raw_length:
            continue
        found.distinct += size
        found.kept += size
        found.coded += entry.blob.length
        found.raw_tensors += entry.blob.codec == "raw" and size >= FROM_BYTES
        data = np.array(rank.read_bytes(entry))
        found.bound += entropy_bytes(data, dtype_of(entry.dtype).itemsize)
        found.difference += difference.saves(entry, data)
    return found


def report(trace: Path) -> list[str]:
    """Return the lines of the table."""
    total, ranks = Sizes(), [sizes_of(rank) for rank in Trace.open(trace).ranks]
    for rank in ranks:
        total.add(rank)
    rows = {
        "recorded": total.recorded,
        "equal contents once, by rank": total.distinct,
        "without copies of other ranks": total.kept,
        "after planes and coding": total.coded,
        "bound": total.bound,
        "files, index and all": total.files,
    }
    if len(ranks) == 1:
        del rows["without copies of other ranks"]
    lines = [
        f"{name:30s}{size / 1e6:10.1f} MB{size / total.recorded:8.3f} of recorded"
        for name, size in rows.items()
    ]
    if len(ranks) > 1:
        shares = ", ".join(f"{rank.files / rank.recorded:.3f}" for rank in ranks)
        lines.append(f"files of each rank, of what it recorded: {shares}")
    lines.append(f"{total.raw_tensors} tensors of 4 KiB or more were taken as they were")
    share = 100 * total.difference / total.files
    return [
        *lines,
        f"differences to the step before would save {total.difference / 1e6:.1f} MB, {share:.1f} %",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compress", choices=["auto", "planes", "none"], default="planes")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = args.trace or record(
            Path(folder), args.steps, args.compress, autocast=args.autocast, ranks=args.ranks
        )
        print("\n".join(report(trace)))


if __name__ == "__main__":
    main()
