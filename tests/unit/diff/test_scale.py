"""Gradient scale accounting, against weights worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tensortrace.diff.catalog import Part
from tensortrace.diff.effective import Stages, TermWeights, effective_terms, effective_weights
from tensortrace.diff.extent import Extent
from tensortrace.diff.factors import Factors, rank_factors, scalar_factor
from tensortrace.diff.pairing import Pairing, pair
from tensortrace.diff.rows import Batch, Row
from tensortrace.diff.scale import TokenWeights, row_scale
from tensortrace.diff.stream import Whole

ONE = Part(0, "train", 0)
R0, R1 = Part(0, "train", 0), Part(1, "train", 0)


def _batch(*parts: tuple[Part, int]) -> Batch:
    """One batch whose rows are named a, b, c … over the given (part, number of rows)."""
    rows, name = [], ord("a")
    for part, count in parts:
        for number in range(count):
            rows.append(Row(part, number, 0, 1, bytes([name])))
            name += 1
    return Batch(tuple(rows), {part: Extent(count, 1) for part, count in parts})


def fitted(samples: list[tuple[dict[int, np.ndarray], np.ndarray]]) -> Factors | None:
    return rank_factors(({r: Whole(v) for r, v in local.items()}, Whole(g)) for local, g in samples)


def test_a_factor_of_one_half_per_rank_is_measured_from_the_tensors() -> None:
    rng = np.random.default_rng(0)
    local = {0: rng.normal(size=50), 1: rng.normal(size=50)}
    factors = fitted([(local, 0.5 * local[0] + 0.5 * local[1])])
    assert factors is not None
    assert factors.by_rank == pytest.approx({0: 0.5, 1: 0.5})
    assert factors.residual < 1e-7


def test_one_broken_parameter_does_not_move_the_factor_of_its_class() -> None:
    rng = np.random.default_rng(1)
    samples = []
    for number in range(5):
        local = {0: rng.normal(size=30), 1: rng.normal(size=30)}
        reduced = local[0] if number == 2 else 0.5 * (local[0] + local[1])
        samples.append((local, reduced))
    factors = fitted(samples)
    assert factors is not None
    assert factors.by_rank == pytest.approx({0: 0.5, 1: 0.5})


def test_equal_local_gradients_share_the_factor() -> None:
    local = np.arange(1.0, 9.0)
    factors = fitted([({0: local, 1: local}, local)])
    assert factors is not None
    assert factors.by_rank == pytest.approx({0: 0.5, 1: 0.5})


def test_a_loss_scale_is_measured_as_one_factor() -> None:
    gradient = np.arange(1.0, 5.0)
    assert scalar_factor([(Whole(gradient * 1024), Whole(gradient))]) == pytest.approx(1 / 1024)


def test_nothing_finite_gives_no_factor() -> None:
    assert scalar_factor([(Whole(np.array([np.inf, 1.0])), Whole(np.array([1.0, 1.0])))]) is None


def test_a_correct_two_rank_program_weighs_every_token_as_one_rank_does() -> None:
    # 3 tokens in all: one rank weighs each 1/3; DDP halves, so each rank multiplies its sum by 2/3
    pairing = pair(_batch((ONE, 3)), _batch((R0, 2), (R1, 1)))
    a, b = TokenWeights({ONE: 1 / 3}, {}), TokenWeights({R0: 2 / 3, R1: 2 / 3}, {})
    stages = Stages(Factors({0: 1.0}, 0.0), Factors({0: 0.5, 1: 0.5}, 0.0), same_scheme=False)
    weights = effective_weights(pairing, a, b, stages)
    assert weights is not None
    np.testing.assert_allclose(weights[0], [1 / 3] * 3)
    np.testing.assert_allclose(weights[1], [1 / 3] * 3)


def test_local_means_weigh_a_quarter_and_a_half_where_the_reference_weighs_a_third() -> None:
    # rank 0 averages 2 tokens, rank 1 one token, DDP halves: 1/4, 1/4, 1/2 instead of 1/3 each
    pairing = pair(_batch((ONE, 3)), _batch((R0, 2), (R1, 1)))
    a, b = TokenWeights({ONE: 1 / 3}, {}), TokenWeights({R0: 1 / 2, R1: 1.0}, {})
    stages = Stages(Factors({0: 1.0}, 0.0), Factors({0: 0.5, 1: 0.5}, 0.0), same_scheme=False)
    weights = effective_weights(pairing, a, b, stages)
    assert weights is not None
    np.testing.assert_allclose(weights[1], [1 / 4, 1 / 4, 1 / 2])


def test_a_common_factor_is_the_loss_s_fault_only_within_one_scheme() -> None:
    pairing = pair(_batch((ONE, 2)), _batch((ONE, 2)))
    a, b = TokenWeights({ONE: 0.5}, {}), TokenWeights({ONE: 0.52}, {})
    factors = Factors({0: 1.0}, 0.0)
    same = effective_weights(pairing, a, b, Stages(factors, factors, same_scheme=True))
    other = effective_weights(pairing, a, b, Stages(factors, factors, same_scheme=False))
    assert same is not None
    assert other is not None
    np.testing.assert_allclose(same[1] / same[0], 1.04)
    np.testing.assert_allclose(other[1] / other[0], 1.0)


def test_a_row_s_scale_is_its_weight_in_b_over_its_weight_in_a() -> None:
    pairing = pair(_batch((ONE, 3)), _batch((R0, 2), (R1, 1)))
    scale = row_scale(pairing, TokenWeights({ONE: 0.25}, {}), TokenWeights({R0: 0.5, R1: 1.0}, {}))
    assert scale.observed
    assert scale.by_part == {R0: 2.0, R1: 4.0}
    assert [scale.of(y) for _, y in pairing.pairs] == [2.0, 2.0, 4.0]


def test_an_unobserved_weight_leaves_the_scale_at_one() -> None:
    pairing = pair(_batch((ONE, 1)), _batch((R0, 1)))
    scale = row_scale(pairing, TokenWeights({ONE: None}, {}), TokenWeights({R0: 0.5}, {}))
    assert not scale.observed
    assert scale.of(pairing.pairs[0][1]) == 1.0


def two_terms(b_of_second: float) -> TermWeights:
    """Return weights of two rows on one rank against two, whose losses are doubled for the average."""
    a0 = Part(0, "train", 0)
    parts = [Part(0, "train", 0), Part(1, "train", 0)]
    pairing = Pairing(
        tuple((Row(a0, n, 0, 3, b"%d" % n), Row(part, 0, 0, 3, b"%d" % n)) for n, part in enumerate(parts))
    )
    terms = {
        ("cross_entropy", 0): (TokenWeights({a0: 0.25}, {}), TokenWeights(dict.fromkeys(parts, 0.5), {})),
        ("mse_loss", 0): (TokenWeights({a0: 0.1}, {}), TokenWeights(dict.fromkeys(parts, b_of_second), {})),
    }
    stages = Stages(Factors({0: 1.0}, 0.0), Factors({0: 0.5, 1: 0.5}, 0.0), same_scheme=False)
    found = effective_terms(pairing, terms, stages)
    assert found is not None
    return found


def test_terms_of_an_objective_have_weights_of_their_own() -> None:
    for left, right in two_terms(0.2).values():  # 0.5 · 0.5 and 0.2 · 0.5
        np.testing.assert_allclose(np.concatenate(left), np.concatenate(right))


def test_a_coefficient_of_one_term_is_no_common_factor() -> None:
    found = two_terms(0.3)
    right = {term: float(b[0][0] / a[0][0]) for term, (a, b) in found.items()}
    assert right == {("cross_entropy", 0): pytest.approx(1.0), ("mse_loss", 0): pytest.approx(1.5)}
