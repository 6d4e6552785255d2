"""The command ``trace record``: runs a training command with every rank recorded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast, get_args

import click

from tensortrace.cli.command import Command
from tensortrace.cli.comparing import TRACE
from tensortrace.cli.completing import begun_kinds
from tensortrace.cli.render.live import WARNING, Live, ending
from tensortrace.tracer import job_step, launch
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.options import parse_start, resolve
from tensortrace.tracer.settings import Compress


@click.command("record", cls=Command, context_settings={"allow_interspersed_args": False})
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder of the new trace."
)
@click.option("--force", is_flag=True, help="Replace a trace that exists.")
@click.option("--steps", default="", metavar="0-3,100", help="Steps to record; default all.")
@click.option(
    "--kinds", default="", metavar="KIND,…", shell_complete=begun_kinds,
    help="Kinds of boundary to record; default all.",
)  # fmt: skip
@click.option("--include", multiple=True, metavar="GLOB", help="Record only canonical names that match.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Don't record names that match.")
@click.option(
    "--zoom", multiple=True, metavar="GLOB",
    help="Record every operation inside the modules that match; repeatable.",
)  # fmt: skip
@click.option(
    "--zoom-steps", default="", metavar="0-3,100",
    help="Steps in which --zoom looks; default the first one recorded.",
)  # fmt: skip
@click.option(
    "--level", multiple=True, metavar="[KIND,…][@STEPS]=LEVEL",
    help="What to keep of tensors: full (default), sketch, sketch:K1xK2 or stats; repeatable, the last that "
    "fits holds. --level sketch --level param@0-10=full",
)  # fmt: skip
@click.option(
    "--full-at", type=click.Path(path_type=Path, dir_okay=False), metavar="REPORT.json",
    help="Keep in full the step at which this report of `trace diff --json` says that two runs part, of the "
    "others sketches (or --level).",
)  # fmt: skip
@click.option(
    "--dedup-replicas", is_flag=True,
    help="Of equal copies that ranks declare (parameters under DDP …) store the first rank's alone.",
)  # fmt: skip
@click.option(
    "--keep-last", type=int, default=0, metavar="N",
    help="Keep only the last N steps on disk; the others are removed as the run goes on.",
)  # fmt: skip
@click.option(
    "--trigger", default="", metavar="T,…",
    help="With --keep-last: end the recording, and keep the steps up to it, on nonfinite (a number stopped "
    "being finite), loss-spike[:K] or SIGUSR1. Training goes on.",
)  # fmt: skip
@click.option(
    "--after", type=int, metavar="M", help="With --trigger: steps to record after it; default 0."
)  # fmt: skip
@click.option(
    "--buffer", default="1GiB", metavar="SIZE", help="Host memory per rank for what awaits writing."
)
@click.option(
    "--on-pressure",
    type=click.Choice(["block", "drop"]),
    default="block",
    help="When the buffer is full: make training wait, or drop boundaries and count them.",
)
@click.option("--max-bytes", metavar="SIZE", help="Most that a rank may write; default no limit.")
@click.option("--min-free", default="1GiB", metavar="SIZE", help="Free disk space that is left alone.")
@click.option(
    "--hang-after",
    type=float,
    default=300.0,
    metavar="SECONDS",
    help="Print each rank's last boundary when none makes progress for so long; 0 never.",
)
@click.option(
    "--compress", type=click.Choice(get_args(Compress)), default="auto",
    help="How tensors are held: byte planes, compressed fast (planes) or as far as possible (best); as they "
    "are (none); planes where cores are spare or much is gained (auto).",
)  # fmt: skip
@click.option(
    "--layout",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Layout file of the run (docs/layouts.md), checked now and kept in the trace for `trace diff`.",
)
@click.option("--dry-run", is_flag=True, help="Record one step into nothing, and say what it would hold.")
@click.option("--strict", is_flag=True, help="Let a failure of the recorder end the training.")
@click.option("--eager", is_flag=True, help="Turn torch.compile off, to see every module. Changes the run.")
@click.option(
    "--init-from", type=TRACE, metavar="TRACE",
    help="Begin with TRACE's initial parameters, buffers and optimizer state. Changes the run.",
)  # fmt: skip
@click.option(
    "--consistent-init", type=int, metavar="SEED",
    help="Draw parameters from names and global indices alone. Changes the run.",
)  # fmt: skip
@click.option(
    "--consistent-dropout", type=int, metavar="SEED",
    help="Draw dropout masks from rows and global positions alone. Changes the run.",
)  # fmt: skip
@click.option(
    "--eager-attention", is_flag=True,
    help="With --consistent-dropout: compute attention with dropout unfused. Changes the run.",
)  # fmt: skip
@click.option(
    "--pad-id", type=int, metavar="TOKEN",
    help="With --consistent-dropout: the token that rows are padded with at their end.",
)  # fmt: skip
@click.option(
    "--adversarial", is_flag=True,
    help="Draw parameters that make mistakes of meaning large (--consistent-init 0 unless given).",
)  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but warnings and errors.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    output: Path, force: bool, steps: str, kinds: str, include: tuple[str, ...],
    exclude: tuple[str, ...], zoom: tuple[str, ...], zoom_steps: str, level: tuple[str, ...],
    full_at: Path | None,
    dedup_replicas: bool, keep_last: int, trigger: str, after: int | None, buffer: str, on_pressure: str,
    max_bytes: str | None, min_free: str,
    hang_after: float, compress: str, layout: Path | None, dry_run: bool, strict: bool, eager: bool,
    init_from: Path | None, consistent_init: int | None, consistent_dropout: int | None,
    eager_attention: bool, pad_id: int | None, adversarial: bool, quiet: bool, command: tuple[str, ...],
) -> int:  # fmt: skip
    """Run COMMAND and record every boundary of its training on every rank."""
    settings = resolve(
        output, steps=steps, kinds=kinds, include=include, exclude=exclude,
        zoom=zoom, zoom_steps=zoom_steps, level=level, full_at=full_at,
        dedup_replicas=dedup_replicas, keep_last=keep_last, trigger=trigger, after=after, buffer=buffer,
        on_pressure="drop" if on_pressure == "drop" else "block", max_bytes=max_bytes, min_free=min_free,
        compress=cast(Compress, compress), strict=strict, dry_run=dry_run,
        eager=eager, layout=layout,
        start=parse_start(
            init_from=init_from, init_seed=consistent_init, dropout_seed=consistent_dropout,
            adversarial=adversarial, eager_attention=eager_attention, pad_id=pad_id,
        ),
    )  # fmt: skip
    described = None if layout is None else _checked(layout)
    if force and not dry_run:
        if job_step.shared_run(os.environ):  # which of its tasks would come first?
            raise BadRequest(
                "--force: several tasks of this Slurm step record into one folder",
                remedy="name it by the job, such as -o runs/$SLURM_JOB_ID",
            )
        launch.clear(output)
    if options := settings.start.options():
        asked = " ".join(f"--{name} {value}".removesuffix(" True") for name, value in options.items())
        click.echo(f"trace: {asked} changes the run: it does not begin or draw as the program says", err=True)
    if eager:
        click.echo("trace: --eager changes the run: what torch.compile compiles runs uncompiled", err=True)
    live = Live(hang_after_s=hang_after, root=None if dry_run else output, quiet=quiet)
    try:
        outcome = launch.run(command, settings, environ=os.environ, observe=live.show, described=described)
    except launch.CannotStart as error:
        click.echo(f"trace: error: {error}", err=True)
        return error.exit_code
    live.end()
    for line in [] if dry_run or outcome.joined else ending(outcome, output):
        if not quiet or line.startswith(WARNING):
            click.echo(line, err=True)
    return launch.exit_code(outcome, settings)


def _checked(layout: Path) -> bytes:
    """Return a layout file as it stands when the run starts; raise LayoutFileError where it is none."""
    from tensortrace.tracer.rules import RunLayout, read_text  # needs numpy, which --help does not

    text = read_text(layout)
    RunLayout.parse(text, layout)
    return text
