"""A subcommand of ``trace``: its help ends with examples and exit codes, pyproject.toml sets its options."""

from __future__ import annotations

from pathlib import Path

import click

from tensortrace.cli import manual, settings
from tensortrace.cli.render.say import say


class Command(click.Command):
    """What every subcommand is: a click command that ends its help and begins its options alike."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take what pyproject.toml sets as defaults; raises BadRequest where it sets what does not exist."""
        if not ctx.resilient_parsing:  # a completion must not fail
            ctx.default_map = settings.defaults(self, ctx, Path(settings.FILE))
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command, having said which options pyproject.toml set: they may narrow a verdict."""
        quiet = ctx.params.get("quiet") or ctx.params.get("detail") == "quiet"
        if not quiet and (options := settings.used(self, ctx)):
            say(f"trace: {settings.FILE} sets {options}", err=True)
        return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples and exit codes."""
        assert self.name is not None
        manual.write(formatter, self.name)
