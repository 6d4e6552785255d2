"""Write the outputs that README.md and the pages of docs/ show, from real runs.

    python -m docs.generate                    record what the pages need and rewrite their outputs
    python -m docs.generate --check            change nothing; exit 1 where one is out of date
    python -m docs.generate --only 'value.*'   some outputs: globs on commands, cases and causes
    python -m docs.generate --jobs 2           two at a time; by default as many as there are cores

A page marks an output with what makes it, ``<!-- output of: trace diff runs/one runs/two -->``, above a
block of text; the traces are recorded with the page's own ``trace record`` commands. ``<!-- output of: zoo
NAME -->`` stands for the headline and the cause that the diff of a planted mistake of tests/zoo says. What
several pages show is made once. Numbers vary a little between machines: ``--check`` compares the words.
Run it from the repository's folder, where tensortrace is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from tensortrace.cli.render.text import render
from tests import harness
from tests.zoo import collection
from tests.zoo.case import Draw
from tests.zoo.judging import diffed
from tests.zoo.recording import Broken, Recordings

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = re.compile(r"<!-- output of: (?P<command>.+?) -->\n```text\n(?P<shown>.*?)```\n", re.DOTALL)
SECTION = re.compile(r"^### (\S+)$", re.MULTILINE)
CASE = "zoo "
NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?")
DRAWN = re.compile(r"^  [▁-█]+\n.*\n.*\n|^nearest to its limit:.*\n(?:  .*\n)*", re.MULTILINE)
"""What numbers alone decide: the line of errors with its mark and kinds, and what is nearest to its limit."""


class Stale(Exception):
    """An output that could not be made as the page claims."""


@dataclass(frozen=True)
class Shown:
    """An output as a page shows it, under the cause that the section is about."""

    path: Path
    command: str
    section: str
    text: str

    @property
    def made_by(self) -> tuple[str, str]:
        """What equal outputs have in common: a case must also name the cause of its section."""
        return self.command, self.section if self.command.startswith(CASE) else ""


@dataclass(frozen=True)
class Made:
    """An output as it is now, or why there is none."""

    text: str
    problem: str


class Runs:
    """Records and diffs in one folder; what is recorded there already is used again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.zoo = Recordings(folder, fork=True)
        for programs in ("examples", "tests"):
            with contextlib.suppress(FileExistsError):  # another job was quicker
                (folder / programs).symlink_to(ROOT / programs)

    def output(self, shown: Shown) -> str:
        """Return what a command or a case of the zoo says."""
        if shown.command.startswith(CASE):
            return self._of_case(shown.command.removeprefix(CASE), shown.section)
        for trace in (word for word in shlex.split(shown.command) if word.startswith("runs/")):
            if not (self.folder / trace).exists():
                self._run(_recording(shown.path.read_text(encoding="utf-8"), trace))
        return self._run(shown.command)

    def _run(self, command: str) -> str:
        variables = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        variables["PATH"] = f"{harness.BIN}{os.pathsep}{variables.get('PATH', os.defpath)}"
        done = subprocess.run(
            shlex.split(command), cwd=self.folder, env=variables, capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 1):
            raise Stale(f"{command}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _of_case(self, name: str, section: str) -> str:
        case = next(iter(collection.bugs([name])), None)
        if case is None:
            raise Stale(f"{section}: tests/zoo has no case {name}")
        try:
            _, result = diffed(case.make(Draw(0)).pair, self.zoo)
        except Broken as error:
            raise Stale(f"{section}: {name}: {error}") from error
        found = [cause.code for cause in result.causes]
        if found[:1] != [section]:
            raise Stale(f"{section}: the diff of {name} says {', '.join(found) or result.headline}")
        return in_brief(render(result))


def in_brief(text: str) -> str:
    """Return the headline and the first cause of a diff's output."""
    lines = text.splitlines()
    headline = lines[: lines.index("")]
    start = next(n for n, line in enumerate(lines) if line.startswith("cause "))
    end = next(n for n in range(start + 1, len(lines)) if not lines[n].startswith(" "))
    return "\n".join([*headline, "", *lines[start:end]]) + "\n"


def _recording(page: str, trace: str) -> str:
    """Return the page's command that records a trace, without the folder of its environment."""
    blocks = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    whole = "\n".join(blocks).replace("\\\n", " ")  # continued lines
    commands = [part.strip() for part in re.split(r"&&|\n", whole)]
    for command in commands:
        if "trace record" in command and f"-o {trace} " in command:
            return command.replace(".venv/bin/", "")
    raise Stale(f"the page records no {trace}")


def words(text: str) -> str:
    """Return what does not vary between machines: no numbers, nothing that they decide, no line breaks."""
    return " ".join(NUMBER.sub("#", DRAWN.sub("", text)).split())


def outputs_of(path: Path) -> list[Shown]:
    """Return the outputs that a page shows, in their order."""
    page = path.read_text(encoding="utf-8")
    return [
        Shown(path, match["command"], (SECTION.findall(page[: match.start()]) or [""])[-1], match["shown"])
        for match in OUTPUT.finditer(page)
    ]


def selected(shown: Shown, options: argparse.Namespace) -> bool:
    """Tell whether the options ask for an output."""
    named = any(fnmatchcase(name, glob) for name in (shown.command, shown.section) for glob in options.only)
    return (named or not options.only) and not (options.missing and shown.text)


def make(folder: Path, wanted: Sequence[Shown]) -> list[Made]:
    """Make some outputs one after the other; runs in a process of its own."""
    runs, made = Runs(folder), []
    for shown in wanted:
        print(f"{shown.path.name}: {shown.section} {shown.command}", file=sys.stderr, flush=True)
        try:
            made.append(Made(runs.output(shown), ""))
        except Stale as error:
            made.append(Made("", f"{shown.path.name}: {error}"))
    return made


def make_all(folder: Path, wanted: Sequence[Shown], jobs: int) -> Iterator[tuple[Shown, Made]]:
    """Yield each output as it is now, ``jobs`` at a time; commands share recordings, so they are one job."""
    cases = [shown for shown in wanted if shown.command.startswith(CASE)]
    commands = [shown for shown in wanted if shown not in cases]
    work = [group for group in (commands, *([case] for case in cases)) if group]
    if cases:
        from tests.zoo import forking  # noqa: F401 - imports torch once, before the processes part
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        for group, made in zip(work, pool.map(partial(make, folder), work), strict=True):
            yield from zip(group, made, strict=True)


def write(shown: Shown, now: str) -> None:
    """Put an output in its place; the page may have been edited meanwhile."""
    block = f"<!-- output of: {shown.command} -->\n```text\n"
    text = shown.path.read_text(encoding="utf-8").replace(block + shown.text, block + now)
    shown.path.write_text(text, encoding="utf-8")


def rewrite(folder: Path, options: argparse.Namespace) -> list[str]:
    """Write the pages' outputs as they are now, each as it comes; return what is wrong or has changed."""
    pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    everywhere = [shown for page in pages for shown in outputs_of(page) if selected(shown, options)]
    once: dict[tuple[str, str], Shown] = {}
    for shown in everywhere:
        once.setdefault(shown.made_by, shown)
    problems = []
    for made_for, now in make_all(folder, list(once.values()), options.jobs):
        if now.problem:
            problems.append(now.problem)
            continue
        for shown in (shown for shown in everywhere if shown.made_by == made_for.made_by):
            if words(now.text) != words(shown.text):
                problems.append(f"{shown.path.name}: the output of {shown.command} has changed")
            if not options.check and now.text != shown.text:
                write(shown, now.text)
    return problems


def main() -> int:
    """Rewrite or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description="Write the pages' outputs.")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 where one is out of date"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="some outputs; repeatable"
    )
    parser.add_argument("--missing", action="store_true", help="only outputs of which a page shows nothing")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="how many at a time"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep traces, and use those kept there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep.resolve() if options.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        problems = rewrite(folder, options)
    for problem in problems:
        print(problem)
    changed = [problem for problem in problems if problem.endswith("has changed")]
    return 1 if problems and (options.check or len(problems) > len(changed)) else 0


if __name__ == "__main__":
    sys.exit(main())
