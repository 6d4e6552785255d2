"""Tasks of one job step of Slurm: each starts its own ``trace record``, and together they are one run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensortrace.tracer.errors import DamagedTrace, TraceError
from tensortrace.tracer.manifest import read_manifest

PATIENCE_S = 2.0
"""How long a manifest that another task is writing may take to be whole."""

_LOOK_EVERY_S = 0.05


def shared_run(environ: Mapping[str, str]) -> str | None:
    """Return the name of the run that the tasks of a step have in common; None where a task is alone.

    ``srun`` sets these variables in each task that it starts, of one node or many.
    """
    job, step = environ.get("SLURM_JOB_ID"), environ.get("SLURM_STEP_ID")
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if not job or not step or not tasks.isdecimal() or int(tasks) < 2:
        return None
    return f"slurm-{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}"


def began(path: Path, run_id: str) -> bool:
    """Tell whether ``trace.json`` is that of this run, begun by another task and not at its end."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            manifest = read_manifest(path)
        except DamagedTrace:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_EVERY_S)
            continue
        except (OSError, TraceError):
            return False
        return manifest.run_id == run_id and manifest.ended_at is None
