"""Write the outputs that README.md and the pages of docs/ show, from real runs.

    python -m docs.generate                    record what the pages need and rewrite their outputs
    python -m docs.generate --check            change nothing; exit 1 where one is out of date
    python -m docs.generate --only 'value.*'   some outputs: globs on commands, cases and causes

A page marks an output with what makes it, ``<!-- output of: trace diff runs/one runs/two -->``, above a
block of text; the traces are recorded with the page's own ``trace record`` commands. ``<!-- output of: zoo
NAME -->`` stands for the headline and the cause that the diff of a planted mistake of tests/zoo says. Numbers
vary a little between machines: ``--check`` compares the words. Run it from the repository's folder, where
tensortrace is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from fnmatch import fnmatchcase
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
NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?")


class Stale(Exception):
    """An output that could not be made as the page claims."""


class Runs:
    """Records and diffs in one folder; what is recorded there already is used again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.zoo = Recordings(folder, fork=True)
        if not (folder / "examples").exists():
            (folder / "examples").symlink_to(ROOT / "examples")

    def output(self, command: str, page: str, section: str) -> str:
        """Return what a command or a case of the zoo says."""
        if command.startswith("zoo "):
            return self._of_case(command.removeprefix("zoo "), section)
        words = shlex.split(command)
        for trace in (word for word in words if word.startswith("runs/")):
            if not (self.folder / trace).exists():
                self._run(_recording(page, trace))
        return self._run(command)

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
    commands = [part.strip() for block in blocks for part in re.split(r"&&|\n", block)]
    for command in commands:
        if "trace record" in command and f"-o {trace} " in command:
            return command.replace(".venv/bin/", "")
    raise Stale(f"the page records no {trace}")


def words(text: str) -> str:
    """Return what does not vary between machines: no numbers, no line breaks."""
    return " ".join(NUMBER.sub("#", text).split())


def rewrite(path: Path, runs: Runs, options: argparse.Namespace) -> list[str]:
    """Write a page's outputs as they are now, each as it comes; return what is wrong or has changed."""
    page = path.read_text(encoding="utf-8")
    problems = []
    for match in OUTPUT.finditer(page):
        command, section = match["command"], (SECTION.findall(page[: match.start()]) or [""])[-1]
        if options.only and not any(
            fnmatchcase(n, glob) for n in (command, section) for glob in options.only
        ):
            continue
        if options.missing and match["shown"]:
            continue
        print(f"{path.name}: {section} {command}", file=sys.stderr, flush=True)
        try:
            now = runs.output(command, page, section)
        except Stale as error:
            problems.append(f"{path.name}: {error}")
            continue
        if words(now) != words(match["shown"]):
            problems.append(f"{path.name}: the output of {command} has changed")
        if not options.check and now != match["shown"]:  # the page may have been edited meanwhile
            block = f"<!-- output of: {command} -->\n```text\n"
            text = path.read_text(encoding="utf-8").replace(block + match["shown"], block + now)
            path.write_text(text, encoding="utf-8")
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
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep traces, and use those kept there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep.resolve() if options.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        runs = Runs(folder)
        pages = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        problems = [problem for page in pages for problem in rewrite(page, runs, options)]
    for problem in problems:
        print(problem)
    changed = [problem for problem in problems if problem.endswith("has changed")]
    return 1 if problems and (options.check or len(problems) > len(changed)) else 0


if __name__ == "__main__":
    sys.exit(main())
