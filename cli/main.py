"""The command ``trace``: its list of subcommands and their exit codes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence

import click

from tensortrace.cli import manual
from tensortrace.cli.command import Command
from tensortrace.cli.machine import settle
from tensortrace.tracer.errors import TraceError
from tensortrace.tracer.nearest import meant, nearest

COMMANDS: dict[str, str] = {
    "record": "Record every boundary of a training run.",
    "watch": "Say how a recording gets on, and which rank the others wait for.",
    "diff": "Compare two traces and name the first boundary where they part.",
    "report": "Write an HTML report of a comparison, or of one trace.",
    "replay": "Hold one trace against what its own inputs give, or replay a packed case.",
    "pack": "Put what fails into one small file that replays anywhere.",
    "validate": "Hold a feature's commit against its base, with the base's noise as the floor.",
    "layout": "Find where the ranks of a run hold parts of whole tensors, or check a layout.",
    "show": "Say what is in a trace.",
    "export": "Write tensors, boundaries or numbers over steps for other tools.",
    "check": "Verify every digest and every index line of a trace.",
    "compact": "Compress a finished trace.",
    "env": "Print the environment that a recording would note.",
    "completion": "Print the script that lets a shell complete these commands.",
}
"""Every subcommand with its one line of help; its code is ``command`` in the module of that name."""

COMPUTING = ("diff", "report", "replay", "pack", "layout", "show", "export", "check")
"""Those that compute in this process alone; `record` starts one that must have its own settings."""

TROUBLE = 2
"""The exit code of every command that could not do its work."""


class LazyGroup(click.Group):
    """A group that imports a subcommand only when it runs, since imports cost more than most commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands that are installed, in the order of ``COMMANDS``."""
        return [name for name in COMMANDS if importlib.util.find_spec(_module(name))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand, or None where there is no such name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        if cmd_name in COMPUTING:
            settle()
        command = importlib.import_module(_module(cmd_name)).command
        assert isinstance(command, Command), cmd_name
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the subcommand that comes first; of one that does not exist say what was meant."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None and not ctx.resilient_parsing:
            likely = meant(nearest(name, self.list_commands(ctx))) or "`trace --help` lists them"
            raise click.UsageError(f"no command {name!r}; {likely}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands from their one-line help, without importing them."""
        if rows := [(name, COMMANDS[name]) for name in self.list_commands(ctx)]:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples and exit codes."""
        manual.write(formatter, "trace")


@click.command("trace", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tensortrace", prog_name="trace")
def group() -> None:
    """Record PyTorch training runs and name the first boundary where two of them part."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; the only place that turns errors into codes.

    A ``TraceError`` and a wrong option are one line on stderr and 2. An interrupt is 130, as in a shell.
    A reader of our output that closes its pipe early is not an error of ours: 141, as in a shell.
    """
    try:
        outcome = group.main(args=arguments, prog_name="trace", standalone_mode=False)
    except TraceError as error:
        return _trouble(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return TROUBLE
    except click.NoSuchOption as error:
        likely = nearest(error.option_name, error.possibilities or ())
        return _trouble(f"no option {error.option_name}; {meant(likely) or '--help lists them'}")
    except click.ClickException as error:
        return _trouble(error.format_message())
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        sys.stdout = None
        return 141
    except Exception:  # a defect of ours must not exit with 1, which would read as a verdict
        traceback.print_exc()
        return _trouble("this is a defect of tensortrace; please report the lines above")
    return outcome if isinstance(outcome, int) else 0


def main() -> None:
    """Run the console command and exit with its code."""
    sys.exit(run())


def _module(name: str) -> str:
    return f"tensortrace.cli.{name}"


def _trouble(text: str) -> int:
    click.echo("trace: error: " + " ".join(text.split()), err=True)
    return TROUBLE
