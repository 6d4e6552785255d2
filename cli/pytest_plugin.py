"""The pytest plugin: run commands recorded, and hold what they computed against each other.

Loaded in every test session of an environment: nothing is imported before a fixture is used.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from tensortrace.diff.engine import CompareOptions
    from tensortrace.diff.result import Result

PACK_SECONDS = 15.0
"""How long a failing test may spend on making its case small."""

_TAIL_BYTES = 2000


class TraceRun(Protocol):
    """What the fixture ``trace_run`` is."""

    def __call__(
        self, command: Sequence[str | os.PathLike[str]], *, name: str = "", steps: str = "", kinds: str = "",
        level: Iterable[str] = (), cwd: Path | None = None, env: Mapping[str, str] | None = None,
    ) -> Path:  # fmt: skip
        """Run a command recorded and return its trace; the test fails where the command does."""


class AssertEquivalent(Protocol):
    """What the fixture ``assert_equivalent`` is."""

    def __call__(
        self, a: str | os.PathLike[str], b: str | os.PathLike[str], *,
        layout: Path | None = None, layout_a: Path | None = None,
        floor: Sequence[str | os.PathLike[str]] = (), expect: Sequence[str] = (),
        allow_missing: Sequence[str] = (), exact: bool = False,
    ) -> Result:  # fmt: skip
        """Compare trace ``b`` with the reference ``a``; the test fails unless they are equivalent."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("tensortrace")
    group.addoption(
        "--trace-update", action="store_true",
        help="write traces that tests compare with anew, where these are no product of the test itself",
    )  # fmt: skip
    group.addoption(
        "--trace-artifacts", metavar="DIR",
        help="where failing tests leave their packed cases (default: pytest's cache)",
    )  # fmt: skip


@pytest.fixture
def trace_run(tmp_path: Path) -> TraceRun:
    """Return what runs a command recorded: ``trace_run(["torchrun", …])`` is the path of its trace.

    ``name`` is the trace's folder in ``tmp_path``; ``steps``, ``kinds`` and ``level`` are as for ``trace
    record``; ``env`` adds variables.
    """

    def run(
        command: Sequence[str | os.PathLike[str]], *, name: str = "", steps: str = "", kinds: str = "",
        level: Iterable[str] = (), cwd: Path | None = None, env: Mapping[str, str] | None = None,
    ) -> Path:  # fmt: skip
        from tensortrace.tracer import launch
        from tensortrace.tracer.options import resolve

        trace = tmp_path / (name or f"trace{sum(1 for _ in tmp_path.glob('trace*.log'))}")
        settings = resolve(trace, steps=steps, kinds=kinds, level=level)
        words = [os.fspath(word) for word in command]
        log = trace.with_name(trace.name + ".log")
        with log.open("wb") as output:
            outcome = launch.run(
                words, settings, environ=os.environ | dict(env or {}), observe=lambda _: None, folder=cwd,
                output=output,
            )  # fmt: skip
        if code := launch.exit_code(outcome, settings):
            said = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip().splitlines()[-6:]
            nothing = "" if outcome.ranks else "it trained nothing that could be recorded"
            lines = [f"{shlex.join(words)} ended with exit code {code}", *said, nothing, f"log: {log}"]
            pytest.fail("\n".join(line for line in lines if line), pytrace=False)
        return trace

    return run


@pytest.fixture
def assert_equivalent(request: pytest.FixtureRequest, tmp_path: Path) -> AssertEquivalent:
    """Return what compares two traces: ``assert_equivalent(reference, trace_run([…]))``.

    A failure says what ``trace diff -q`` does, with the cause, and leaves the packed case behind. A reference
    that is no product of this test is written anew under ``--trace-update``.
    """

    def check(
        a: str | os.PathLike[str], b: str | os.PathLike[str], *,
        layout: Path | None = None, layout_a: Path | None = None,
        floor: Sequence[str | os.PathLike[str]] = (), expect: Sequence[str] = (),
        allow_missing: Sequence[str] = (), exact: bool = False,
    ) -> Result:  # fmt: skip
        from tensortrace.diff.engine import CompareOptions, compare

        reference, candidate = Path(a), Path(b)
        stored = not reference.absolute().is_relative_to(tmp_path)
        if stored and request.config.getoption("--trace-update"):
            _update(reference, candidate)
        if not reference.exists():
            remedy = "; make it with --trace-update" if stored else ""
            pytest.fail(f"there is no trace {reference}{remedy}", pytrace=False)
        options = CompareOptions(
            policy="exact" if exact else "error-model", floor=tuple(map(Path, floor)), layout_a=layout_a,
            layout_b=layout, expect=tuple(expect), allow_missing=tuple(allow_missing),
        )  # fmt: skip
        result = compare(reference, candidate, options=options)
        if not result:
            pytest.fail(_message(request, result, reference, candidate, options), pytrace=False)
        return result

    return check


def _update(reference: Path, candidate: Path) -> None:
    from tensortrace.tracer import launch
    from tensortrace.tracer.compact import compact

    launch.clear(reference)
    shutil.copytree(candidate, reference, dirs_exist_ok=True)
    compact(reference)


def _message(
    request: pytest.FixtureRequest, result: Result, a: Path, b: Path, options: CompareOptions
) -> str:
    """Return headline, causes and where the case is: fewer than fifteen lines."""
    from tensortrace.cli.render.safe import safe

    lines = [safe(result.headline, limit=600)]
    for cause in result.causes[:2]:
        told = "" if cause.text in result.headline else safe(cause.text, limit=400)
        lines.append(f"cause: [{cause.code}] {told}".rstrip())
    lines += [
        f"missing: {safe(m.reason, limit=300)}" for m in result.coverage.missing if m.counts_as_incomplete
    ][:2]
    lines.append(_packed(request, a, b, options))
    lines.append(f"next: trace diff {shlex.quote(str(a))} {shlex.quote(str(b))}")
    return "\n".join(lines)


def _packed(request: pytest.FixtureRequest, a: Path, b: Path, options: CompareOptions) -> str:
    """Pack the case and return the line that says where it is, or why it is not."""
    from tensortrace.replay.case import Asked
    from tensortrace.replay.packing import PackOptions, pack
    from tensortrace.tracer.errors import TraceError

    if options.floor:
        return f"traces: {a} {b} (a case with a floor is not packed)"
    target = _folder(request) / (re.sub(r"[^A-Za-z0-9._-]+", "_", request.node.nodeid).strip("_") + ".zip")
    try:
        asked = Asked(policy=options.policy, allow_missing=options.allow_missing)
        pack(
            [a, b], target,
            options=PackOptions(
                asked=asked, expect=options.expect, layouts=(options.layout_a, options.layout_b),
                seconds=PACK_SECONDS,
            ),
            replace_target=True,
        )  # fmt: skip
    except (TraceError, OSError) as error:
        return f"traces: {a} {b} (not packed: {error})"
    return f"case: {target} (trace replay shows it again)"


def _folder(request: pytest.FixtureRequest) -> Path:
    asked = request.config.getoption("--trace-artifacts")
    if asked:
        folder = Path(asked)
    elif (cache := getattr(request.config, "cache", None)) is not None:
        folder = cache.mkdir("tensortrace")
    else:
        folder = Path(request.config.rootpath) / ".tensortrace"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
