"""Scalars as an event file of TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tensortrace.cli.export.scalars import Scalars
from tensortrace.tracer.errors import BadRequest

EVENTS = "events.out.tfevents."
"""How the names of TensorBoard's files begin."""


class ScalarWriter(Protocol):
    """What is used of TensorBoard's writer."""

    def add_scalar(self, tag: str, data: float, step: int) -> object:
        """Write one number."""

    def close(self) -> object:
        """Finish the file."""


def require() -> Callable[[str], ScalarWriter]:
    """Return TensorBoard's writer, made of a folder; raises BadRequest where it is not installed."""
    try:
        from tensorboard.summary import Writer
    except ImportError as error:
        remedy = "pip install 'tensortrace[tensorboard]'"
        raise BadRequest("--format tensorboard", found="no TensorBoard here", remedy=remedy) from error
    writer: Callable[[str], ScalarWriter] = Writer
    return writer


def write(scalars: Scalars, about: dict[str, str], folder: Path) -> None:
    """Write the scalars into a new folder, a log directory of TensorBoard."""
    folder.mkdir()
    writer = require()(str(folder))
    for step, values in scalars.items():
        for tag, value in values.items():
            writer.add_scalar(tag, value, step=step)
    writer.close()
