"""How a command gives its result: which format on stdout, JSON in a file, hints on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import click

from tensortrace.cli.render.document import STDOUT, refuse_existing, write_document
from tensortrace.cli.render.page import look_of
from tensortrace.cli.render.say import say
from tensortrace.cli.render.text import Detail

if TYPE_CHECKING:
    from tensortrace.cli.formats.summary import Summary

Form = Literal["text", "json", "markdown", "junit", "github"]

_OPTIONS = (
    click.option(
        "--format", "form", type=click.Choice(get_args(Form)), default="text",
        help="Of stdout; json stands alone there, as with --json -.",
    ),
    click.option("--json", "json_path", metavar="FILE", help="Write the result as JSON; - for stdout."),
    click.option("--force", is_flag=True, help="Replace FILE if it exists."),
    click.option("-q", "--quiet", "detail", flag_value="quiet", type=str, help="Print the headline alone."),
    click.option("-v", "--verbose", "detail", flag_value="verbose", type=str, help="Leave nothing out."),
)  # fmt: skip


def delivery_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command's function, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


class Delivery(NamedTuple):
    """What was asked for. ``json_path`` is ``-`` where JSON stands on stdout, alone."""

    form: Form
    json_path: str | None
    detail: Detail


class _Outcome(Protocol):
    def to_json(self) -> bytes: ...


R = TypeVar("R", bound=_Outcome)
R_contra = TypeVar("R_contra", contravariant=True)


class Render(Protocol[R_contra]):
    """Draws a result as text."""

    def __call__(self, result: R_contra, /, *, look: Any, detail: Detail) -> str:
        """Return the page."""


def requested(form: Form, json_path: str | None, detail: Detail | None, *, force: bool) -> Delivery:
    """Return what the options ask for, before the work starts.

    Raises UsageError where two results would stand on stdout, BadRequest where FILE exists.
    """
    if form == "json" and json_path is not None:
        raise click.UsageError("--format json writes to stdout, --json to a file: give one of them")
    if form not in ("text", "json") and json_path == STDOUT:
        raise click.UsageError(f"--format {form} and --json - both write to stdout: give one of them")
    json_path = STDOUT if form == "json" else json_path
    refuse_existing(json_path, force=force)
    return Delivery(form, json_path, detail or "normal")


def deliver(
    result: R, asked: Delivery, render: Render[R], summarize: Callable[[R], Summary],
    hints: Callable[[R], Iterable[str]] = lambda _: (),
) -> None:  # fmt: skip
    """Print the result on stdout and hints on stderr; write the JSON document."""
    if asked.json_path is not None:
        write_document(result, asked.json_path)
    if asked.form not in ("text", "json"):
        _draw(summarize(result), asked.form)
        return
    if asked.json_path != STDOUT:
        look = look_of(sys.stdout)
        say(render(result, look=look, detail=asked.detail), nl=False, color=look.color)
    for hint in () if asked.detail == "quiet" else hints(result):
        say(hint, err=True)


def _draw(summary: Summary, form: Form) -> None:
    """Print a format that other programs read: it holds the next command itself."""
    if form == "junit":
        from tensortrace.cli.formats.junit import junit

        click.echo(junit(summary).encode(), nl=False)  # what it says of its encoding must be true
        return
    from tensortrace.cli.formats.markdown import markdown

    if form == "markdown":
        say(markdown(summary), nl=False)
        return
    from tensortrace.cli.formats import github, source_files

    folder = Path.cwd()
    root = Path(os.environ.get("GITHUB_WORKSPACE") or folder)
    inside = root if folder.is_relative_to(root) else folder
    say(github.github(summary, source_files.finder(folder, inside)), nl=False)
    target = os.environ.get("GITHUB_STEP_SUMMARY")
    if target and not github.append_summary(markdown(summary), Path(target)):
        say("trace: warning: GITHUB_STEP_SUMMARY is full or cannot be written", err=True)
