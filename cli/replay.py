"""``trace replay``: hold one trace against what its own inputs give, or a live run against it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from tensortrace.cli.command import Command
from tensortrace.cli.comparing import FILE
from tensortrace.cli.completing import TracePath
from tensortrace.cli.delivery import Delivery, Form, deliver, delivery_options, requested
from tensortrace.cli.machine import cores, given_environ
from tensortrace.cli.render.document import refuse_existing, write_text
from tensortrace.cli.render.progress import Progress
from tensortrace.cli.render.replayed import hints, render
from tensortrace.cli.render.say import say
from tensortrace.cli.render.text import Detail

if TYPE_CHECKING:
    from tensortrace.replay.objective import Name
    from tensortrace.tracer.settings import Forced as Kinds


FORCED = ("inputs", "activation_grads", "params", "reduced_grads")


class Replaying(Command):
    """A command whose ``--force`` alone replaces a file, and with a kind behind it says what to force."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Tell the two apart: both names are public, and mean one thing each where they stand."""
        end = args.index("--") if "--" in args else len(args)
        for number in range(end - 1):
            if args[number] == "--force" and _is_kind(args, number + 1, end):
                args[number] = "--force-kind"
        args[:end] = [
            arg.replace("--force=", "--force-kind=", 1) if arg.startswith("--force=") else arg
            for arg in args[:end]
        ]
        return super().parse_args(ctx, args)


def _is_kind(args: list[str], at: int, end: int) -> bool:
    """Tell whether a word behind ``--force`` says what to force, be it a kind that exists or not.

    A word that names none is meant as one where a live run's command follows and another word is the trace.
    """
    if set(args[at].split(",")) <= set(FORCED):
        return True
    if end == len(args) or args[at].startswith("-") or Path(args[at]).exists():
        return False
    return any(Path(args[other]).is_dir() for other in range(end) if other != at)


@click.command("replay", cls=Replaying)
@click.argument("trace", type=TracePath(otherwise="file"))
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--force-kind", "kinds", multiple=True, metavar="KIND,…",
    help="Written --force KIND: what a live run is given of the trace: inputs, activation_grads, params, "
    "reduced_grads; repeatable. Without it the first three.",
)  # fmt: skip
@click.option("-o", "--output", type=FILE, metavar="DIR", help="Keep the trace of the live run there.")
@click.option(
    "--objective", type=click.Choice(["mean", "sum", "sequence-mean"]),
    help="What the loss should be: a mean over the step's valid tokens, their sum, or a mean over sequences "
    "of each one's mean. Without it what tokens weigh tells.",
)  # fmt: skip
@click.option(
    "--layout",
    type=FILE,
    metavar="FILE",
    help="Layout file of the trace, or of the live run (docs/layouts.md).",
)
@click.option("--no-modules", is_flag=True, help="Do not execute modules again, which is most of the work.")
@click.option(
    "--pytest", "test", type=FILE, metavar="FILE", help="Write a test that replays the packed case."
)
@delivery_options
def command(
    trace: Path, command: tuple[str, ...], *, kinds: tuple[str, ...], output: Path | None,
    objective: str | None, layout: Path | None, no_modules: bool,
    test: Path | None, form: Form, json_path: str | None, force: bool, detail: Detail | None,
) -> int:  # fmt: skip
    """Hold every boundary of TRACE against what its recorded inputs give in float64: no second run is needed.

    Or, where TRACE is a file that `trace pack` made, replay the case in it.

    trace replay TRACE -- COMMAND runs COMMAND live and gives each module what was recorded of it, so that
    every module's own error stands alone and all faulty ones are told.
    """
    from tensortrace.cli.formats.replayed import of_replay  # what --help does not need
    from tensortrace.replay.engine import ReplayOptions, replay

    asked = requested(form, json_path, detail, force=force)
    refuse_existing(None if test is None else str(test), force=force)
    if trace.is_file():
        if objective or layout or command:
            raise click.UsageError("a packed case has its own objective and layout, and runs no command")
        return _packed(trace, asked, test)
    if test is not None:
        raise click.UsageError("--pytest is for a packed case: see `trace pack`")
    if command:
        if objective is not None:
            raise click.UsageError("--objective is of a replay without COMMAND")
        return _live(trace, command, kinds, output, layout, asked, force=force)
    if kinds or output:
        raise click.UsageError("--force KIND and --output are of a live run: give its command behind --")
    options = ReplayOptions(cast("Name | None", objective), layout, "none" if no_modules else "all")
    with Progress(sys.stderr) as progress:
        result = replay(trace, options=options, progress=progress.tell if progress.shown else None)
    deliver(result, asked, render, of_replay, hints)
    return 0 if result else 1


def _packed(path: Path, asked: Delivery, test: Path | None) -> int:
    """Replay a packed case, and write a test of it where asked to."""
    from tensortrace.cli.formats.replayed import of_case
    from tensortrace.cli.render import case  # what the replay of a trace does not need
    from tensortrace.replay.packed import replay_case
    from tensortrace.replay.pytest_file import pytest_file

    with Progress(sys.stderr) as progress:
        found = replay_case(path, progress=progress.tell if progress.shown else None, jobs=cores())
    if test is not None:
        write_text(pytest_file(found.case, path, test), str(test))
    deliver(found, asked, case.render, of_case, lambda _: case.hints(str(path)))
    return 0 if found else 1


def _live(
    trace: Path, command: tuple[str, ...], kinds: tuple[str, ...], output: Path | None, layout: Path | None,
    asked_for: Delivery, *, force: bool,
) -> int:  # fmt: skip
    from tensortrace.cli.formats.replayed import of_forced
    from tensortrace.cli.render.forced import render as render_forced
    from tensortrace.cli.render.live import Live
    from tensortrace.replay import forcing
    from tensortrace.tracer import launch

    asked = tuple(dict.fromkeys(kind for given in kinds for kind in given.split(","))) or forcing.DEFAULT
    if unknown := [kind for kind in asked if kind not in forcing.KINDS]:
        raise click.UsageError(f"--force {unknown[0]!r} is not one of {', '.join(forcing.KINDS)}")
    if force and output is not None:
        launch.check(command)  # before anything is removed
        launch.clear(output)
    live = Live(hang_after_s=300.0)
    options = forcing.ForceOptions(
        kinds=cast("tuple[Kinds, ...]", asked), layout=layout, output=output, jobs=cores()
    )
    result = forcing.force(
        trace, command, environ=given_environ(), options=options, observe=live.show, began=_warn
    )
    live.end()
    deliver(result, asked_for, render_forced, of_forced)
    return 0 if result else 1


def _warn() -> None:
    say("trace: the run is given recorded values: what it trains is not what it would", err=True)
