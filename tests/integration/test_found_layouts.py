"""The layouts of context and expert parallel programs are found, and the diff then needs no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import BIN, diff, run
from tests.integration.layouts import Case, Ran, launch

pytestmark = pytest.mark.slow

CASES = {
    "cp": Case("cp", 2, spread="--layout cp"),
    "cp-zigzag": Case("cp-zigzag", 2, spread="--layout cp-zigzag"),
    "cp-ring": Case("cp-ring", 2, spread="--layout cp-ring"),
    "ep": Case("ep", 2, "--experts", "--layout ep"),
    "cp-positions": Case("cp-positions", 2, spread="--layout cp", plant="local-positions"),
    "ep-tokens": Case("ep-tokens", 2, "--experts", "--layout ep", plant="outputs-to-wrong-tokens"),
}

RIGHT = ("cp", "cp-zigzag", "cp-ring", "ep")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Ran]:
    folder = tmp_path_factory.mktemp("found")
    ones = [CASES["cp"].reference(), CASES["ep"].reference()]
    return launch(folder / "one", 1, ones), launch(folder / "two", 2, CASES.values())


def found(ran: tuple[Ran, Ran], name: str) -> tuple[Path, Path, Path, int]:
    case = CASES[name]
    a, b = ran[0].trace(case.reference()), ran[1].trace(case)
    file = b.with_suffix(".toml")
    done = run([str(BIN / "trace"), "layout", str(a), str(b), "-o", str(file), "--force"])
    assert "swap:" not in done.output
    return a, b, file, done.exit_code


@pytest.mark.parametrize("name", RIGHT)
def test_what_was_found_is_all_that_the_diff_needs(ran: tuple[Ran, Ran], name: str) -> None:
    a, b, file, code = found(ran, name)
    outcome = diff(a, b, "--layout", str(file))
    assert code == 0
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.complete


@pytest.mark.parametrize(("name", "kind", "where"), [
    ("cp-positions", "activation", "position"), ("ep-tokens", "activation", "layers.0.mlp"),
])  # fmt: skip
def test_a_mistake_is_not_taken_for_layout(ran: tuple[Ran, Ran], name: str, kind: str, where: str) -> None:
    a, b, file, _ = found(ran, name)
    first = diff(a, b, "--layout", str(file)).result.first_divergent
    assert first is not None
    assert (first.where.step, first.where.kind, first.where.name) == (0, kind, where)
