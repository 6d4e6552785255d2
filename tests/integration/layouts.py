"""Many trainings of ``tests/training/parallel.py`` in one launch, and what a diff of two of them compared."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tensortrace.diff import engine
from tensortrace.diff.execute import Execution
from tensortrace.diff.result import Result
from tests import harness

LAYOUTS = harness.TRAINING / "layouts"
SUITE = harness.TRAINING / "parallel_suite.py"


@dataclass(frozen=True)
class Case:
    """One training: the model, which one rank trains just so, and how it is spread, by parallel.py's options.

    ``ranks`` 1 is the reference, which ``spread`` says nothing about. ``layout`` is the layout file that a
    diff needs, where ranks are spread by hand.
    """

    name: str
    ranks: int
    model: str = ""
    spread: str = ""
    plant: str = ""
    layout: str = ""

    def arguments(self, *others: str) -> list[str]:
        """Return the options of ``parallel.py``."""
        plant = ["--plant", self.plant] if self.plant else []
        return [*self.model.split(), *self.spread.split(), *plant, *others]

    def reference(self) -> Case:
        """Return the training of the same model on one rank."""
        return Case("single" + self.model.replace(" ", ""), 1, self.model)


@dataclass(frozen=True)
class Ran:
    """What the cases of one launch left."""

    folder: Path
    ranks: int

    def trace(self, case: Case) -> Path:
        """Return the trace of a recorded case."""
        self.told(case)
        return self.folder / f"{case.name}.trace"

    def told(self, case: Case) -> list[dict[str, object]]:
        """Return what each rank computed; fails where one of them told an error, or nothing."""
        told = []
        for rank in range(self.ranks):
            path = self.folder / f"{case.name}.rank{rank}.json"
            assert path.exists(), f"{case.name} did not end on rank {rank}: {self._errors()}"
            told.append(json.loads(path.read_text()))
            assert "error" not in told[-1], f"{case.name} on rank {rank}:\n{told[-1]['error']}"
        return told

    def _errors(self) -> str:
        return (self.folder / "errors.txt").read_text()[-3000:]


def launch(
    folder: Path, ranks: int, cases: Iterable[Case], *others: str, recorded: bool = True,
    start: Mapping[str, object] | None = None,
) -> Ran:  # fmt: skip
    """Run the cases one after the other in one launch; ``others`` are further options of all of them.

    ``start`` are the fields of the recorder's Start: where all of them begin. What is begun so is recorded
    with its layout file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    listed = [
        {
            "name": case.name,
            "arguments": case.arguments(*others),
            "trace": str(folder / f"{case.name}.trace") if recorded else None,
            "start": dict(start or {}),
            "layout": str(options_of(case, folder).layout_b) if start and case.layout else None,
        }
        for case in cases
    ]
    (folder / "cases.json").write_text(json.dumps(listed))
    done = harness.run(harness.on_ranks(ranks, SUITE, folder / "cases.json"))
    (folder / "errors.txt").write_text(done.output + done.errors)
    return Ran(folder, ranks)


def references(cases: Iterable[Case]) -> list[Case]:
    """Return the trainings on one rank that these cases are compared with, each once."""
    return list({case.reference().name: case.reference() for case in cases}.values())


@dataclass(frozen=True)
class Compared:
    """The outcome of a diff, and the (kind, name) of all that it compared."""

    result: Result
    names: frozenset[tuple[str, str]]

    def summary(self) -> str:
        """Return what a failed assertion should show."""
        return harness.Diffed(0 if self.result else 1, self.result).summary()


def options_of(case: Case, folder: Path) -> engine.CompareOptions:
    """Return the options that a diff of the case needs; its layout file, for its ranks, is in ``folder``."""
    if not case.layout:
        return engine.CompareOptions()
    text = (LAYOUTS / f"{case.layout}.toml").read_text()
    path = folder / f"{case.name}.toml"
    path.write_text(re.sub(r"(?m)^(\w+) = 2$", rf"\1 = {case.ranks}", text))
    return engine.CompareOptions(layout_b=path)


def diffed(a: Path, b: Path, options: engine.CompareOptions | None = None) -> Compared:
    """Diff two traces and look at what was compared on the way."""
    seen: list[Execution] = []
    state = engine.state_result

    def watch(execution: Execution, *rest: object) -> Result:
        seen.append(execution)
        return state(execution, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "state_result", watch)
        result = engine.compare(a, b, options=options)
    left_out = {node for node, _ in seen[0].gaps} | {node for node, _ in seen[0].not_comparable}
    names = {(str(n.slot.kind), n.slot.name) for n in seen[0].errors if n not in left_out}
    return Compared(result, frozenset(names))


class Launched:
    """Records cases and their references, each number of ranks in one launch, when first asked for."""

    def __init__(self, folder: Path, cases: Sequence[Case]) -> None:
        self.folder = folder
        self.cases = cases
        self.ran: dict[int, tuple[Ran, Ran]] = {}

    def diff(self, case: Case) -> Compared:
        """Diff the reference and the case."""
        if case.ranks not in self.ran:
            mine = [other for other in self.cases if other.ranks == case.ranks]
            alone = launch(self.folder / f"{case.ranks}.alone", 1, references(mine))
            self.ran[case.ranks] = alone, launch(self.folder / str(case.ranks), case.ranks, mine)
        alone, ran = self.ran[case.ranks]
        return diffed(alone.trace(case.reference()), ran.trace(case), options_of(case, self.folder))
