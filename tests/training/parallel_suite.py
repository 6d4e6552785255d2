"""Run many trainings of ``parallel.py`` one after another in one launch, some of them recorded.

    torchrun --nproc-per-node 2 parallel_suite.py CASES.json

CASES holds a list of {"name", "arguments", "trace"}: where ``trace`` is a folder, the training is recorded
there. Each case leaves NAME.rankN.json with what this rank computed, or its error, beside CASES, and NAME.pt
with the global weights. A case that fails on every rank doesn't keep the next ones from running.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import parallel
from tensortrace import tracer


def run(case: dict[str, object], folder: Path) -> dict[str, object]:
    """Train one case, and return what it computed."""
    trace = case.get("trace")
    arguments = [str(argument) for argument in case["arguments"]]
    with tracer.record(trace) if trace else contextlib.nullcontext():
        outcome = parallel.train(parallel.arguments(arguments))
    if dist.get_rank() == 0:
        torch.save(outcome.weights, folder / f"{case['name']}.pt")
    return {"losses": outcome.losses, "digest": outcome.digest}


def main() -> None:
    cases = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    for case in json.loads(cases.read_text()):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                told = run(case, cases.parent)
        except Exception:
            told = {"error": traceback.format_exc()}
        (cases.parent / f"{case['name']}.rank{dist.get_rank()}.json").write_text(json.dumps(told))
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
