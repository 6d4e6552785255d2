"""The layout table: each layout against the same model on one rank is equivalent, and all is compared.

``KINDS`` was written by hand from what each layout computes, before these tests first ran: a kind that is
listed must be compared, one that is not must not be there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests import harness
from tests.integration.layout_cases import CASES, QUICK, WIDE
from tests.integration.layouts import Case, Compared, Launched

EVERYWHERE = {
    "input", "activation", "loss", "activation_grad", "local_grad", "clipped_grad", "schedule",
    "optimizer_state", "param",
}  # fmt: skip
"""No layout lacks any of these, nor does a single rank."""

LADDER = (
    "input", "activation", "loss", "activation_grad", "local_grad", "reduced_grad", "clipped_grad",
    "schedule", "optimizer_state", "param",
)  # fmt: skip
"""The columns of the table in docs/layouts.md."""

REDUCED = EVERYWHERE | {"reduced_grad"}

KINDS: dict[str, set[str]] = {
    "ddp": REDUCED,
    "fsdp2": REDUCED,
    "fsdp1": REDUCED,
    "fsdp1-flat": REDUCED,
    "hsdp": REDUCED,
    "zero1": REDUCED,
    "tp": EVERYWHERE,  # autograd hands out reduced gradients: there is no rung of its own
    "tp-padded": EVERYWHERE,
    "tp-sp": EVERYWHERE,  # gradients of norms are reduced where they are read, by the clip
    "fsdp2-tp": REDUCED,
    "pp": EVERYWHERE,  # nothing is reduced ...
    "pp-interleaved": EVERYWHERE,
    "pp-tied": REDUCED,  # ... but the gradient of the weight that two stages hold
    "dp-tp-pp": REDUCED,
    "cp": REDUCED,
    "cp-zigzag": REDUCED,
    "cp-ring": REDUCED,
    "ep": REDUCED,
}
"""The kinds of each layout, by the beginning of a case's name."""

OPEN: dict[str, str] = {}
"""Cases that are not equivalent, with the reason."""


def kinds(case: Case) -> set[str]:
    """Return the kinds that a case has: those of the longest name that its own begins with."""
    return KINDS[max((name for name in KINDS if case.name.startswith(name)), key=len)]


def layers(case: Case) -> range:
    depth = re.search(r"--depth (\d+)", case.model)
    return range(int(depth[1]) if depth else 2)


def modules(case: Case) -> Iterator[str]:
    """Yield the modules that every layout calls, whose activations must be compared."""
    yield from ("(root)", "token", "position", "norm", "head")
    for n in layers(case):
        yield f"layers.{n}"
        yield from (f"layers.{n}.{part}" for part in ("attention_norm", "attention", "mlp_norm", "mlp"))
        yield from (f"layers.{n}.attention.{part}" for part in ("q", "kv", "out"))
        if "--experts" in case.model:
            yield f"layers.{n}.mlp.router"
            yield from (f"layers.{n}.mlp.experts.{e}" for e in range(4))
        else:
            yield from (f"layers.{n}.mlp.{part}" for part in ("gate", "up", "down"))


def parameters(case: Case) -> Iterator[str]:
    """Yield the parameters of the model; of tied ones the first name."""
    yield from ("token.weight", "position.weight", "norm.weight", "norm.bias")
    if "--tied" not in case.model:
        yield "head.weight"
    for n in layers(case):
        linear = ["attention_norm", "attention.q", "attention.kv", "attention.out", "mlp_norm"]
        mlps = [f"mlp.experts.{e}" for e in range(4)] if "--experts" in case.model else ["mlp"]
        linear += [f"{mlp}.{part}" for mlp in mlps for part in ("gate", "up", "down")]
        yield from (f"layers.{n}.{part}.{slot}" for part in linear for slot in ("weight", "bias"))
        if "--experts" in case.model:
            yield f"layers.{n}.mlp.router.weight"


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return Launched(tmp_path_factory.mktemp("table"), CASES)


def parametrized(cases: list[Case]) -> list[object]:
    def marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
        reason = OPEN.get(case.name)
        return (pytest.mark.xfail(strict=True, reason=reason),) if reason else ()

    return [pytest.param(case, id=case.name, marks=marks(case)) for case in cases if "batch" not in case.name]


def assert_equivalent_and_complete(case: Case, compared: Compared, expected: set[str] | None = None) -> None:
    result = compared.result
    assert result.verdict == "equivalent", compared.summary()
    assert result.coverage.complete, compared.summary()
    assert {kind for kind, count in result.coverage.by_kind.items() if count > 0} == (expected or kinds(case))
    for kind in ("activation", "activation_grad"):
        assert {name for name in modules(case) if (kind, name) not in compared.names} == set(), kind
    for kind in ("local_grad", "clipped_grad", "optimizer_state", "param"):
        assert {name for name in parameters(case) if (kind, name) not in compared.names} == set(), kind


@pytest.mark.parametrize("case", parametrized(QUICK))
def test_two_ranks_are_equivalent_to_one(launched: Launched, case: Case) -> None:
    assert_equivalent_and_complete(case, launched.diff(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", parametrized(WIDE))
def test_four_and_eight_ranks_are_equivalent_to_one(launched: Launched, case: Case) -> None:
    assert_equivalent_and_complete(case, launched.diff(case))


def test_a_batch_norm_over_other_rows_is_named_not_called_a_bug(launched: Launched) -> None:
    [case] = [case for case in QUICK if case.name == "ddp-batch-norm"]
    compared = launched.diff(case)
    first = compared.result.first_divergent
    assert first is not None
    assert (first.where.step, first.where.kind, first.where.name) == (0, "activation", "batch_norm.norm")
    assert "batch.coupled" in {cause.code for cause in compared.result.causes}, compared.summary()


def test_the_page_shows_the_table() -> None:
    page = (harness.ROOT / "docs" / "layouts.md").read_text()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    shown = {
        row[0]: {kind for kind, cell in zip(LADDER, row[1:], strict=False) if cell == "✓"}
        for row in rows
        if len(row) == len(LADDER) + 3
    }
    assert {name: kinds for name, kinds in shown.items() if name in KINDS} == KINDS
