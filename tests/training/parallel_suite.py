"""Run many trainings of ``parallel.py`` one after another in one launch, some of them recorded.

    torchrun --nproc-per-node 2 parallel_suite.py CASES.json

CASES holds a list of {"name", "arguments", "trace", "start", "layout"}: where ``trace`` is a folder, the
training is recorded there, with the layout file, begun as ``start`` (fields of the recorder's Start) says.
Each case leaves NAME.rankN.json with what this rank computed, or its error, beside CASES, and NAME.pt with
the global weights. A case that fails on every rank does not keep the next ones from running.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import parallel
import torch
import torch.distributed as dist

from tensortrace import tracer
from tensortrace.tracer.settings import Start

RANK = int(os.environ.get("RANK", "0"))
TIMEOUT = timedelta(seconds=30)


def run(case: dict[str, object], folder: Path) -> dict[str, object]:
    """Train one case, and return what it computed."""
    trace = case["trace"]
    start = Start(**case.get("start", {}))
    options = {"min_free": "0", "start": start, "layout": case.get("layout")}
    with tracer.record(str(trace), **options) if trace else contextlib.nullcontext():
        outcome = parallel.train(parallel.arguments(case["arguments"]))
    if RANK == 0:
        torch.save(outcome.weights, folder / f"{case['name']}.pt")
    return {"losses": outcome.losses, "digest": outcome.digest}


def main() -> None:
    cases = Path(sys.argv[1])
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    warnings.simplefilter("ignore")
    for case in json.loads(cases.read_text()):
        try:
            told = run(case, cases.parent)
        except Exception:
            told = {"error": traceback.format_exc()}
        (cases.parent / f"{case['name']}.rank{RANK}.json").write_text(json.dumps(told))
        gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
