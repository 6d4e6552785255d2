"""Makes an export: opens what is asked for, has one format write it, and says what was written."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tensortrace.cli.export import chrome, npz, safetensors, tensorboard, wandb
from tensortrace.cli.export.chosen import GLOBAL, LOCAL, Chosen, choose
from tensortrace.cli.export.output import refuse, written
from tensortrace.cli.export.scalars import Scalars, of_comparison, of_trace
from tensortrace.cli.machine import cores
from tensortrace.cli.render.numbers import counted
from tensortrace.cli.render.safe import safe
from tensortrace.diff.engine import CompareOptions
from tensortrace.diff.opened import OpenTrace
from tensortrace.tracer.request import Request

__all__ = ["GLOBAL", "LOCAL", "Asked", "Told", "make"]

OF_TENSORS: dict[str, Callable[[list[Chosen], dict[str, str], Path], None]] = {
    "safetensors": safetensors.write, "npz": npz.write,
}  # fmt: skip
"""Formats that hold tensors."""


class ScalarFormat(NamedTuple):
    """How numbers over steps are written; ``ours`` tells which files of a folder an export may replace.

    ``require`` raises where the tool is not installed. Where ``keeps`` the tool has a folder of its own, to
    which it adds: nothing there is replaced.
    """

    require: Callable[[], object]
    write: Callable[[Scalars, dict[str, str], Path], None]
    ours: Callable[[str], bool]
    keeps: bool = False


OF_SCALARS = {
    "tensorboard": ScalarFormat(
        tensorboard.require, tensorboard.write, lambda name: name.startswith(tensorboard.EVENTS)
    ),
    "wandb": ScalarFormat(wandb.require, wandb.write, lambda _: True, keeps=True),
}
"""Formats that hold numbers over steps, whose output is a folder."""

_NEXT = {
    "safetensors": "in Python, safetensors.torch.load_file({text!r})",
    "npz": "in Python, numpy.load({text!r})",
    "chrome": "open it in https://ui.perfetto.dev or chrome://tracing",
    "tensorboard": "tensorboard --logdir {path}",
    "wandb": "wandb sync {path}/wandb/offline-run-*, if it was kept offline",
}


class Asked(NamedTuple):
    """What is exported: of one trace, or of the comparison of two; ``scope`` is GLOBAL or LOCAL."""

    a: Path
    b: Path | None
    request: Request
    scope: str
    layout: Path | None


class Told(NamedTuple):
    """What was written, what could not be, and what to do next."""

    text: str
    notes: list[str]
    next: str = ""


def make(asked: Asked, form: str, output: Path, *, force: bool) -> Told:
    """Write an export; the output appears whole or not at all, but for wandb's, which is its own.

    Raises BadRequest where the output exists or nothing is selected, and as traces do that can't be read.
    """
    about = {"made by": "tensortrace export", "trace": safe(str(asked.a), limit=400)}
    if form in OF_SCALARS:
        return _of_scalars(asked, OF_SCALARS[form], about, output, force=force)._replace(
            next=_next(form, output)
        )
    refuse(output, force=force, ours=None)
    with OpenTrace.open(asked.a, layout=asked.layout) as trace, written(output, folder=False) as part:
        notes = [*trace.problems]
        if form == "chrome":
            count = chrome.write(trace, asked.request, about, part)
            told = f"{counted(count, 'boundary')} of {counted(len(trace.ranks), 'rank')}"
        else:
            chosen = choose(trace, asked.request, asked.scope)
            notes += [f"{counted(n, 'tensor')} left out: {why}" for why, n in chosen.left_out.items()]
            OF_TENSORS[form](chosen.tensors, about | {"tensors": asked.scope}, part)
            told = f"{counted(len(chosen.tensors), 'tensor')}, {part.stat().st_size:,} bytes"
    return Told(told, notes, _next(form, output))


def _of_scalars(
    asked: Asked, form: ScalarFormat, about: dict[str, str], output: Path, *, force: bool
) -> Told:
    form.require()
    refuse(output, force=force, ours=form.ours)
    scalars, text, notes = _scalars(asked, about)
    if form.keeps:
        form.write(scalars, about, output)
    else:
        with written(output, folder=True) as part:
            form.write(scalars, about, part)
    return Told(text, notes)


def _scalars(asked: Asked, about: dict[str, str]) -> tuple[Scalars, str, list[str]]:
    """Return the numbers, what they are in words, and notes; ``about`` is told of a comparison."""
    said, notes = "", list[str]()
    if asked.b is None:
        with OpenTrace.open(asked.a, layout=asked.layout) as trace:
            scalars, notes = of_trace(trace, asked.request), [*trace.problems]
    else:
        name = asked.request.name
        options = CompareOptions(
            kinds=asked.request.kinds, include=() if name is None else (name,), layout_b=asked.layout,
            jobs=cores(),
        )  # fmt: skip
        scalars, result = of_comparison(asked.a, asked.b, asked.request, options)
        about |= {"compared with": safe(str(asked.b), limit=400), "verdict": result.verdict}
        said = f"; {result.headline}"
    count = len({tag for values in scalars.values() for tag in values})
    return scalars, f"{counted(count, 'number')} over {counted(len(scalars), 'step')}{said}", notes


def _next(form: str, output: Path) -> str:
    text = safe(str(output), limit=400)
    return _NEXT[form].format(text=text, path=shlex.quote(text))
