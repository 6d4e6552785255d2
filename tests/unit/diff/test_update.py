"""Update formulas against numbers worked by hand and against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensortrace.diff.update import UpdateInputs, predict_param, predict_state


def _run(optimizer: type[torch.optim.Optimizer], steps: int = 3, **options: object) -> UpdateInputs:
    """Take ``steps`` steps in float64; return the inputs of the last one, its param result in ``after``."""
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    made = optimizer([param], **options)  # type: ignore[call-arg]
    group = made.param_groups[0]
    hypers = {
        "lr": float(group["lr"]),
        **{k: float(v) for k, v in group.items() if isinstance(v, (int, float)) and k != "lr"},
        **{f"betas.{n}": b for n, b in enumerate(group.get("betas", ()))},
    }
    for step in range(steps):
        before = {k: v.numpy().copy() for k, v in made.state[param].items() if torch.is_tensor(v)}
        value = param.detach().numpy().copy()
        param.grad = torch.tensor([0.3, -0.1, 0.2], dtype=torch.float64) * (step + 1)
        gradient = param.grad.numpy().copy()
        made.step()
    after = {k: v.numpy().copy() for k, v in made.state[param].items() if torch.is_tensor(v)}
    inputs = UpdateInputs(optimizer.__name__, value, gradient, before, after, hypers)
    np.testing.assert_allclose(predict_param(inputs), param.detach().numpy(), rtol=1e-13)
    return inputs


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
    ],
)
def test_a_step_is_predicted_to_float64(
    optimizer: type[torch.optim.Optimizer], options: dict[str, object]
) -> None:
    inputs = _run(optimizer, **options)
    for slot, value in inputs.after.items():
        np.testing.assert_allclose(predict_state(inputs, slot), value, rtol=1e-13)


def test_gradient_descent_on_half_x_squared_from_2_with_rate_one_half_gives_1() -> None:
    inputs = UpdateInputs("SGD", np.array([2.0]), np.array([2.0]), {}, {}, {"lr": 0.5})
    assert predict_param(inputs) == pytest.approx(1.0)


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
