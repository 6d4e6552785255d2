"""Trains once unrecorded, then once per guarded hook with an error in that hook on rank 1.

Prints one JSON object per rank and hook: what was computed, and whether it is what was computed alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from train import train

from tensortrace.tracer import hooks
from tensortrace.tracer.hooks import guard
from tensortrace.tracer.recorder import Identity, Recorder, Surroundings
from tensortrace.tracer.settings import Settings
from tensortrace.tracer.types import Environment
from tensortrace.tracer.writer import RankWriter

STEPS = 3


def recorder_in(root: Path) -> Recorder:
    return Recorder(
        Settings(root=str(root), min_free_bytes=0),
        Surroundings(
            identify=lambda: Identity(dist.get_rank(), dist.get_world_size(), 0),
            describe=Environment,
            open_store=lambda root, me: RankWriter(root, me.rank, attempt=me.attempt),
            is_guest=lambda: False,
            opened=lambda: None,
        ),
    )


def train_with_fault(root: Path, name: str) -> str:
    recorder = recorder_in(root)
    installed = hooks.install(recorder)
    if dist.get_rank() == 1:
        guard.inject(name)
    try:
        return train(STEPS)
    finally:
        installed.finish()
        recorder.close("finished")
        installed.remove()


def main() -> None:
    dist.init_process_group("gloo")
    alone = train(STEPS)
    assert train(STEPS) == alone, "the training itself must repeat"
    for name in ["none", *sorted(guard.GUARDED)]:
        same = train_with_fault(Path(sys.argv[1]) / name.replace("/", "_"), name) == alone
        told = {"hook": name, "rank": dist.get_rank(), "same": same}
        os.write(1, (json.dumps(told) + "\n").encode())  # ranks share the pipe
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
