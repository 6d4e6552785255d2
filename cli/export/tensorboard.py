"""Scalars as an event file of TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tensortrace.cli.export.scalars import Scalars
from tensortrace.tracer.errors import BadRequest

if TYPE_CHECKING:
    from tensorboard.summary import Writer

EVENTS = "events.out.tfevents."
"""How the names of TensorBoard's files begin."""


def require() -> type[Writer]:
    """Return TensorBoard's writer; raises BadRequest where it is not installed."""
    try:
        from tensorboard.summary import Writer
    except ImportError as error:
        remedy = "pip install 'tensortrace[tensorboard]'"
        raise BadRequest("--format tensorboard", found="no TensorBoard here", remedy=remedy) from error
    return Writer


def write(scalars: Scalars, about: dict[str, str], folder: Path) -> None:
    """Write the scalars into a new folder, a log directory of TensorBoard."""
    folder.mkdir()
    writer = require()(str(folder))
    for step, values in scalars.items():
        for tag, value in values.items():
            writer.add_scalar(tag, value, step=step)
    writer.close()
