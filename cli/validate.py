"""``trace validate``: hold a feature's commit against its base, with the base's own noise as the floor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import click

from tensortrace.cli.command import Command
from tensortrace.cli.completing import begun_kinds
from tensortrace.cli.delivery import Form, deliver, delivery_options, requested
from tensortrace.cli.machine import cores
from tensortrace.cli.render.live import Live
from tensortrace.cli.render.say import say
from tensortrace.cli.render.text import Detail
from tensortrace.cli.render.validated import hints, render
from tensortrace.tracer.errors import BadRequest
from tensortrace.tracer.nearest import meant, sibling

PLACE = click.Path(path_type=Path)


@click.command("validate", cls=Command, context_settings={"allow_interspersed_args": False})
@click.option("--base", required=True, metavar="REV", help="Commit that is known to be right.")
@click.option(
    "--feature", metavar="REV", default="HEAD", show_default=True, help="Commit to hold against it."
)
@click.option(
    "--snapshot", is_flag=True, help="Instead of --feature the checkout as it stands, changes included."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=PLACE,
    help="Folder that keeps all runs; runs in it are not done again.",
)
@click.option(
    "--matrix",
    multiple=True,
    metavar="KEY=V1,V2",
    help="Repeat for each value, put where {KEY} stands in COMMAND; repeatable.",
)
@click.option(
    "--copy",
    "copied",
    multiple=True,
    type=PLACE,
    metavar="PATH",
    help="Give each run a copy of this file or folder of the checkout, which git does not know; repeatable.",
)
@click.option(
    "--reuse-base", type=PLACE, metavar="FOLDER", help="Take the base's runs from another validation."
)
@click.option(
    "--base-runs",
    type=click.IntRange(2),
    default=2,
    show_default=True,
    help="How often the base runs: what its runs differ by is noise.",
)
@click.option("--steps", default="", metavar="0-3,100", help="Steps to record; default all.")
@click.option(
    "--kinds", default="", metavar="KIND,…", shell_complete=begun_kinds,
    help="Kinds of boundary to record; default all.",
)  # fmt: skip
@click.option("--level", multiple=True, metavar="[KIND,…][@STEPS]=LEVEL", help="As for `trace record`.")
@click.option("--consistent-init", type=int, metavar="SEED", help="As for `trace record`.")
@click.option("--consistent-dropout", type=int, metavar="SEED", help="As for `trace record`.")
@click.option("--expect", multiple=True, metavar="RULE|FILE", help="Differences that are meant; repeatable.")
@click.option("--allow-missing", multiple=True, metavar="GLOB", help="Names that one may lack; repeatable.")
@delivery_options
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    base: str, feature: str, *, snapshot: bool, output: Path, matrix: tuple[str, ...],
    copied: tuple[Path, ...],
    reuse_base: Path | None, base_runs: int, steps: str, kinds: str, level: tuple[str, ...],
    consistent_init: int | None, consistent_dropout: int | None, expect: tuple[str, ...],
    allow_missing: tuple[str, ...], form: Form, json_path: str | None, force: bool, detail: Detail | None,
    command: tuple[str, ...],
) -> int:  # fmt: skip
    """Run COMMAND at the commit --base twice and at --feature once, recorded, and compare.

    Each runs in a checkout of its own: yours is not touched.
    """
    from tensortrace.cli.formats.validated import of_validation  # what --help does not need
    from tensortrace.diff.engine import CompareOptions
    from tensortrace.replay.validate import engine
    from tensortrace.tracer.options import parse_start, resolve

    if snapshot and _given("feature"):
        raise click.UsageError("--snapshot is the feature: leave --feature out")
    asked = requested(form, json_path, detail, force=force)
    if reuse_base is not None and not reuse_base.is_dir():
        raise BadRequest(f"--reuse-base {reuse_base}: no such folder", remedy=meant(sibling(reuse_base)))
    start = parse_start(
        init_from=None, init_seed=consistent_init, dropout_seed=consistent_dropout, adversarial=False,
        eager_attention=False, pad_id=None,
    )  # fmt: skip
    request = engine.Request(
        command=command, base=base, feature=None if snapshot else feature, folder=output,
        settings=resolve(output, steps=steps, kinds=kinds, level=level, start=start),
        options=CompareOptions(expect=expect, allow_missing=allow_missing, jobs=cores()),
        matrix=matrix, copied=copied, reuse_base=reuse_base and reuse_base.absolute(), base_runs=base_runs,
    )  # fmt: skip
    live = Live(hang_after_s=300.0)
    try:
        result = engine.validate(
            request, here=Path.cwd(), environ=os.environ, tell=lambda text: say(f"trace: {text}", err=True),
            observe=live.show,
        )  # fmt: skip
    except (engine.Interrupted, KeyboardInterrupt) as stop:  # the latter between two runs
        live.end()
        say("trace: interrupted; run the same command again to go on", err=True)
        return 128 + (stop.signal if isinstance(stop, engine.Interrupted) else signal.SIGINT)
    live.end()
    deliver(result, asked, render, of_validation, hints)
    return 0 if result else 2 if result.verdict == "trouble" else 1


def _given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE
