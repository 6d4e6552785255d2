"""Update formulas against numbers worked by hand and against torch in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch

from tensortrace.diff.update import UpdateInputs, amplification, predict_param, predict_state

START = [1.0, -2.0, 0.5, 1.5]
GRADIENTS = ([0.3, -0.1, 0.2, 0.4], [0.6, 0.2, 0.1, -0.3], [-0.2, 0.4, 0.3, 0.1])
"""Of three steps: some elements change their sign."""


def _numbers(group: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for key, value in group.items():
        if key != "params" and isinstance(value, (list, tuple)):
            yield from ((f"{key}.{n}", float(v)) for n, v in enumerate(value) if v is not None)
        elif isinstance(value, (int, float)):
            yield key, float(value)


def _run(
    optimizer: type[torch.optim.Optimizer], *, shape: tuple[int, ...] = (4,), dtype: str = "float64",
    **options: object,
) -> UpdateInputs:  # fmt: skip
    """Take three steps in double precision; return the inputs of the last, whose result is the prediction."""

    def array(value: torch.Tensor) -> np.ndarray:
        value = value.detach()
        return (torch.view_as_real(value) if value.is_complex() else value).numpy().copy()

    def tensor(values: list[float]) -> torch.Tensor:
        flat = torch.tensor(values, dtype=torch.float64)
        return torch.view_as_complex(flat.view(-1, 2)) if dtype == "complex128" else flat.reshape(shape)

    param = torch.nn.Parameter(tensor(START))
    made = optimizer([param], **options)  # type: ignore[call-arg]
    hypers = dict(_numbers(made.param_groups[0]))
    for numbers in GRADIENTS:
        before = {k: array(v) for k, v in made.state[param].items() if torch.is_tensor(v)}
        value, param.grad = array(param), tensor(numbers)
        gradient = array(param.grad)
        made.step()
    after = {k: array(v) for k, v in made.state[param].items() if torch.is_tensor(v)}
    inputs = UpdateInputs(optimizer.__name__, value, gradient, before, after, hypers, dtype)
    np.testing.assert_allclose(predict_param(inputs), array(param), rtol=1e-13)
    return inputs


OF_COMPLEX = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD,
    torch.optim.Rprop,
)  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
        (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "maximize": True}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True, "maximize": True}),
        (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3}),
        (torch.optim.Adadelta, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.Adamax, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.NAdam, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.NAdam, {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}),
        (torch.optim.RAdam, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.RAdam, {"lr": 0.1, "betas": (0.9, 0.9), "decoupled_weight_decay": True}),
        (torch.optim.RAdam, {"lr": 0.1, "betas": (0.9, 0.9), "maximize": True}),
        (torch.optim.ASGD, {"lr": 0.1, "weight_decay": 0.1, "t0": 1.0, "lambd": 0.01}),
        (torch.optim.ASGD, {"lr": 0.1, "maximize": True}),
        (torch.optim.Rprop, {"lr": 0.1}),
        (torch.optim.Rprop, {"lr": 0.1, "maximize": True, "etas": (0.4, 1.3), "step_sizes": (0.05, 0.11)}),
        (torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.Adafactor, {"lr": 0.1, "d": 1.1, "eps": (1e-3, 0.1)}),
        (torch.optim.Adafactor, {"lr": 0.1, "shape": (2, 2), "weight_decay": 0.1}),
        (torch.optim.Adafactor, {"lr": 0.1, "shape": (2, 2), "d": 1.1, "maximize": True}),
        *((kind, {"lr": 0.1, "dtype": "complex128"}) for kind in OF_COMPLEX),
    ],
)
def test_a_step_is_predicted_to_float64(
    optimizer: type[torch.optim.Optimizer], options: dict[str, object]
) -> None:
    inputs = _run(optimizer, **options)
    for slot, value in inputs.after.items():
        close = 1e-7 if value.dtype == np.float32 else 1e-13  # numbers are kept in float32
        np.testing.assert_allclose(predict_state(inputs, slot), value, rtol=close)


def test_gradient_descent_on_half_x_squared_from_2_with_rate_one_half_gives_1() -> None:
    inputs = UpdateInputs("SGD", np.array([2.0]), np.array([2.0]), {}, {}, {"lr": 0.5})
    assert predict_param(inputs) == pytest.approx(1.0)


def test_gradient_descent_on_half_x_squared_with_rate_2_5_overshoots_to_minus_3() -> None:
    inputs = UpdateInputs("SGD", np.array([2.0]), np.array([2.0]), {}, {}, {"lr": 2.5})
    assert predict_param(inputs) == pytest.approx(-3.0)


def test_two_steps_of_a_tenth_give_1_8_and_1_62_and_one_of_a_fifth_1_6() -> None:
    def step(x: float, rate: float) -> float:
        predicted = predict_param(UpdateInputs("SGD", np.array([x]), np.array([x]), {}, {}, {"lr": rate}))
        assert predicted is not None
        return float(predicted[0])

    assert step(2.0, 0.1) == pytest.approx(1.8)
    assert step(step(2.0, 0.1), 0.1) == pytest.approx(1.62)
    assert step(2.0, 0.2) == pytest.approx(1.6)


def test_lion_steps_by_the_sign_of_what_lies_ahead_and_averages_afterwards() -> None:
    before, hypers = {"exp_avg": np.array([0.2, -0.4])}, {"lr": 0.1, "betas.0": 0.9, "betas.1": 0.99}
    hypers["weight_decay"] = 0.5
    inputs = UpdateInputs("Lion", np.array([2.0, 2.0]), np.array([-1.0, -1.0]), before, {}, hypers)
    # 0.9 · 0.2 − 0.1 = 0.08 and 0.9 · −0.4 − 0.1 = −0.46: one step down, one up, from 2 · (1 − 0.05)
    np.testing.assert_allclose(predict_param(inputs), [1.8, 2.0], rtol=1e-13)
    # 0.99 · 0.2 − 0.01 = 0.188, 0.99 · −0.4 − 0.01 = −0.406
    np.testing.assert_allclose(predict_state(inputs, "exp_avg"), [0.188, -0.406], rtol=1e-13)


def test_a_sign_that_is_round_off_may_be_either() -> None:
    before, hypers = {"exp_avg": np.array([1.0, 1.0])}, {"lr": 0.1, "betas.0": 0.5, "betas.1": 0.99}
    inputs = UpdateInputs("Lion", np.zeros(2), np.array([-1.0 - 1e-9, -2.0]), before, {}, hypers)
    amplified = amplification(inputs)
    assert amplified[0] > 1e6
    assert amplified[1] == 1


def test_an_unknown_optimizer_is_not_predicted() -> None:
    inputs = UpdateInputs("Shampoo", np.zeros(1), np.zeros(1), {}, {}, {"lr": 0.5})
    assert predict_param(inputs) is None
    assert predict_state(inputs, "exp_avg") is None


def test_a_parameter_that_is_a_number_comes_in_blocks_of_one() -> None:
    one = np.ones(1)
    state = {"exp_avg": one * 0.1, "exp_avg_sq": one * 0.01, "step": one}
    hypers = {"lr": 0.5, "betas.0": 0.9, "betas.1": 0.99, "eps": 0.0}
    inputs = UpdateInputs("Adam", one * 2.0, one, {}, state, hypers)
    # both moments are unbiased to 1: the step is the whole rate
    assert predict_param(inputs) == pytest.approx(1.5)


def test_the_momentum_of_muon_is_an_average_and_its_update_no_formula() -> None:
    # 0.95 · 2 + 0.05 · (−6) = 1.6
    before, hypers = {"momentum_buffer": np.array([[2.0]])}, {"lr": 0.1, "momentum": 0.95}
    hypers["ns_coefficients.0"] = 3.4445
    inputs = UpdateInputs("Muon", np.ones((1, 1)), np.array([[-6.0]]), before, before, hypers)
    np.testing.assert_allclose(predict_state(inputs, "momentum_buffer"), [[1.6]], rtol=1e-13)
    assert predict_param(inputs) is None
