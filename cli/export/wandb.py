"""Scalars as a run of Weights & Biases, which its own settings send somewhere or keep here."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from tensortrace.cli.export.scalars import Scalars
from tensortrace.tracer.errors import BadRequest, TraceError

PROJECT = "tensortrace"

STEP = "training step"


def require() -> ModuleType:
    """Return wandb; raises BadRequest where it is not installed."""
    try:
        import wandb
    except ImportError as error:
        remedy = "pip install 'tensortrace[wandb]'"
        raise BadRequest("--format wandb", found="no wandb here", remedy=remedy) from error
    module: ModuleType = wandb
    return module


def write(scalars: Scalars, about: dict[str, str], folder: Path) -> None:
    """Log the scalars as one run, whose files lie in ``folder``; WANDB_MODE=offline sends nothing.

    Raises TraceError where wandb refuses.
    """
    wandb = require()
    folder.mkdir(exist_ok=True)
    try:
        run = wandb.init(project=PROJECT, dir=str(folder), config=about, job_type="export")
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        for step, values in scalars.items():
            run.log({STEP: step, **values})
        run.finish()
    except (wandb.errors.Error, OSError) as error:
        raise TraceError(
            "wandb refused", found=" ".join(str(error).split())[:300],
            remedy="set WANDB_MODE=offline, or `wandb login`",
        ) from error  # fmt: skip
