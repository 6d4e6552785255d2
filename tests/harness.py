"""Starts programs as a user would: one process or several ranks, recorded or not, and diffs their traces."""

from __future__ import annotations

import io
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tensortrace.cli.main import run as trace
from tensortrace.diff.result import Result, Where

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_gpt.py"
TRAINING = ROOT / "tests" / "training"
BIN = Path(sys.executable).parent
"""Where ``trace`` and ``torchrun`` of this environment lie."""

TIMEOUT_S = 300

REQUIRED = {"allowed", "error", "ratio", "residual_before", "residual_after", "floor"}
"""The numbers that a judgement or a cause always has."""


@dataclass(frozen=True)
class Finished:
    """A program that has ended."""

    exit_code: int
    output: str
    errors: str


def python(script: Path, *arguments: object) -> list[str]:
    """Return the command that runs a script in one process."""
    return [sys.executable, str(script), *map(str, arguments)]


def torchrun(ranks: int, script: Path, *arguments: object) -> list[str]:
    """Return the command that runs a script on several ranks of this machine, on a free port."""
    launcher = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(script), *map(str, arguments)]


def on_ranks(ranks: int, script: Path, *arguments: object) -> list[str]:
    """Return the command that runs a script on one rank without a launcher, on more with torchrun."""
    return python(script, *arguments) if ranks == 1 else torchrun(ranks, script, *arguments)


def run(
    command: Sequence[str], *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> Finished:
    """Run a command to its end, in ``folder``, with one thread of arithmetic a process."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    search = os.pathsep.join([str(BIN), inherited.get("PATH", os.defpath)])
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "NO_COLOR": "1", "PATH": search}
    done = subprocess.run(
        command,
        cwd=folder,
        env=inherited | settings | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def recording(trace: Path, command: Sequence[str], *options: str) -> list[str]:
    """Return the command that records another command."""
    return [str(BIN / "trace"), "record", "-o", str(trace), *options, "--", *command]


def record(trace: Path, command: Sequence[str], *options: str) -> Path:
    """Record a command that must succeed and return its trace."""
    done = run(recording(trace, command, *options), folder=trace.parent)
    assert done.exit_code == 0, f"{command}\n{done.output}\n{done.errors}"
    return trace


@dataclass(frozen=True)
class Diffed:
    """The outcome of ``trace diff --json -``: exit code and typed result."""

    exit_code: int
    result: Result

    def summary(self) -> str:
        """Return what a failed assertion should show."""
        lines = [f"exit {self.exit_code}, {self.result.verdict}: {self.result.headline}"]
        lines += [f"cause {c.code} number={c.number} equals={c.equals}: {c.text}" for c in self.result.causes]
        lines += [f"origin {o.where} ranks={o.ranks}: {o.text}" for o in self.result.origins[:8]]
        lines += [
            f"missing on {m.side}: {m.kind} x{m.count}: {m.reason} {m.examples[:1]}"
            for m in self.result.coverage.missing
            if m.counts_as_incomplete
        ]
        return "\n".join(lines)


def diff(a: Path, b: Path, *options: str) -> Diffed:
    """Diff two traces with the command line, in this process; ``a`` is the reference."""
    output, errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = trace(["diff", str(a), str(b), "--json", "-", *options])
    output.seek(0)
    assert code in {0, 1}, errors.getvalue()
    return Diffed(code, read_result(output.read()))


def read_result(text: str) -> Result:
    """Return the result that a JSON document of ``trace diff`` holds."""
    return _typed(msgspec.json.decode(text, type=dict[str, object]))


def _typed(document: dict[str, object]) -> Result:
    """Return a result as Python has it: JSON holds a finding's key flat, and null for infinity and NaN."""

    def finding(fields: dict[str, object]) -> dict[str, object]:
        key = {name: fields.pop(name) for name in Where.__struct_fields__}
        fields.pop("rel_l2")
        return {**fields, "where": key, "judgement": _finite(fields["judgement"])}

    findings = list[dict[str, object]]
    for part in ("origins", "receivers"):
        document[part] = [finding(fields) for fields in msgspec.convert(document[part], findings)]
    if isinstance(declared := document.get("declared"), dict):
        declared["findings"] = [finding(fields) for fields in declared["findings"]]
    if document["first_divergent"] is not None:
        [document["first_divergent"]] = map(finding, msgspec.convert([document["first_divergent"]], findings))
    document["boundaries"] = [
        judged | {"judgement": _finite(judged["judgement"])}
        for judged in msgspec.convert(document["boundaries"], findings)
    ]
    if isinstance(operation := document["operation"], dict) and operation["judgement"]:
        operation["judgement"] = _finite(operation["judgement"])
    document["causes"] = [_finite(cause) for cause in msgspec.convert(document["causes"], findings)]
    return msgspec.convert(document, Result)


def _finite(record: object) -> object:
    """Return a judgement or a cause with infinity where a number that it must have is null."""
    if not isinstance(record, dict):
        return record
    return record | {name: math.inf for name in REQUIRED & record.keys() if record[name] is None}


def have(program: str) -> bool:
    """Tell whether a program is installed on this machine."""
    return shutil.which(program) is not None
