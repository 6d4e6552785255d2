"""Canonical names of modules and parameters."""

from __future__ import annotations

import gc
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tensortrace.tracer.hooks.names import Names
from tensortrace.tracer.hooks.walk import tensors_in
from tensortrace.tracer.placements.pipelining import Stage
from tests.memory_sink import recording


@pytest.fixture(autouse=True)
def _no_leftovers() -> None:
    gc.collect()


def test_wrapper_prefixes_are_stripped_only_where_a_wrapper_put_them() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self._checkpoint_wrapped_module = nn.Linear(2, 2)

    names, holder = Names(), Holder()
    wrapped = nn.DataParallel(holder)
    assert names.module(wrapped).wraps
    assert names.module(wrapped).name == names.module(holder).name == "(root)"
    assert names.module(holder.module).name == "module"
    assert names.tensor(holder.module.weight).name == "module.weight"
    assert names.tensor(holder._checkpoint_wrapped_module.weight).name == "weight"


def test_names_come_from_the_biggest_live_module_that_contains_the_root() -> None:
    names = Names()
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 1)})
    assert names.module(model["encoder"][0]).name == "encoder.0"
    assert names.tensor(model["head"].bias).name == "head.bias"


def test_a_second_root_has_its_class_as_prefix_and_further_ones_a_number() -> None:
    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 1)

    names, model, first, second = Names(), nn.Linear(2, 2), Judge(), Judge()
    assert names.module(model).name == "(root)"
    assert names.module(first).name == "Judge"
    assert names.module(second.fc).name == "Judge.1.fc"
    assert names.tensor(first.fc.weight).name == "Judge.fc.weight"


def test_a_wrapped_second_root_has_the_class_of_what_is_wrapped() -> None:
    names, model, judge = Names(), nn.Linear(2, 2), nn.DataParallel(nn.Sequential(nn.Linear(2, 1)))
    assert names.module(model).name == "(root)"
    assert names.module(judge).name == "Sequential"
    assert names.module(judge.module[0]).name == "Sequential.0"


def test_a_root_that_cannot_be_trained_never_takes_the_main_name() -> None:
    names, transform, model = Names(), nn.Flatten(), nn.Linear(2, 2)
    assert names.module(transform).name == "Flatten"
    assert names.module(model).name == "(root)"


def test_a_criterion_made_anew_each_step_keeps_its_name() -> None:
    with recording() as sink:
        model = nn.Linear(2, 2)
        for _ in range(3):
            nn.MSELoss()(model(torch.ones(1, 2)), torch.zeros(1, 2)).backward()
    assert [n for n in sink.names("activation") if n != "(root)"] == ["MSELoss"]
    given = {(kept.boundary.name, kept.boundary.slot) for kept in sink.find("input")}
    assert given == {("(root)", "in.0"), ("MSELoss", "in.1")}, "the prediction comes from a recorded call"


def test_a_wrapper_made_later_takes_the_place_of_what_it_wraps() -> None:
    names, model = Names(), nn.Sequential(nn.Linear(2, 2))
    assert names.module(model[0]).name == "0"
    wrapped = nn.DataParallel(model)
    assert names.module(wrapped).name == "(root)"
    assert names.module(model[0]).name == "0"


def test_a_shared_module_has_its_first_name_and_its_parameters_all() -> None:
    shared = nn.Linear(2, 2)
    names, model = Names(), nn.ModuleDict({"a": shared, "b": shared})
    assert names.module(model).name == "(root)"
    assert names.module(shared).name == "a"
    known = names.tensor(shared.weight)
    assert (known.name, known.aliases) == ("a.weight", ("b.weight",))


def test_parameters_that_no_module_owns_are_numbered() -> None:
    names, loose = Names(), [torch.ones(1, requires_grad=True) for _ in range(2)]
    assert [names.tensor(tensor).name for tensor in loose] == ["param.0", "param.1"]
    assert names.tensor(loose[0]).name == "param.0"


def test_init_names_the_parameters_of_models_not_called_yet() -> None:
    class Judge(nn.Linear):
        pass

    with recording() as sink:
        model, judge = nn.Linear(2, 2), Judge(2, 1)
        optimizer = torch.optim.SGD([*model.parameters(), *judge.parameters()], lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert sink.names("param", step=-1) == ["weight", "bias", "Judge.weight", "Judge.bias"]


def stage_of(module: nn.Module, number: int) -> Stage:
    return Stage(module, number, count=3, ranks=(0,))


def test_a_stage_is_the_root_for_what_enters_the_first_and_leaves_the_last() -> None:
    names = Names()
    modules = [nn.ModuleDict({f"layer{number}": nn.Linear(2, 2)}) for number in range(3)]
    for number, module in enumerate(modules):
        names.add_stage(stage_of(module, number))
    called = [names.module(module) for module in modules]
    assert [name.name for name in called] == ["(stage 0)", "(stage 1)", "(stage 2)"]
    assert [(name.entered, name.left) for name in called] == [
        ("(root)", "(stage 0)"), ("(stage 1)", "(stage 1)"), ("(stage 2)", "(root)"),
    ]  # fmt: skip
    assert names.module(modules[1]["layer1"]).name == "layer1"
    assert names.tensor(modules[2]["layer2"].bias).name == "layer2.bias"


def test_a_wrapped_stage_is_called_like_what_it_wraps() -> None:
    names = Names()
    wrapped = nn.DataParallel(nn.ModuleDict({"layer": nn.Linear(2, 2)}))
    names.add_stage(stage_of(wrapped, 1))
    assert names.module(wrapped).wraps
    assert names.module(wrapped.module).name == "(stage 1)"
    assert names.tensor(wrapped.module["layer"].weight).name == "layer.weight"


def test_a_stage_made_of_parts_of_a_model_has_that_models_names_and_only_its_own_parameters() -> None:
    names, model = Names(), nn.Sequential(OrderedDict(embed=nn.Linear(2, 2), head=nn.Linear(2, 1)))
    stage = nn.Sequential(model.head)
    names.add_stage(stage_of(stage, 2))
    assert names.module(stage).name == "(stage 2)"
    assert names.module(model.head).name == "head"
    assert [name.name for _, name in names.parameters()] == ["head.weight", "head.bias"]
    assert names.elsewhere() == {id(model.embed.weight), id(model.embed.bias)}


def test_of_two_stages_with_other_tensors_under_one_name_the_later_has_a_prefix() -> None:
    names = Names()
    first, second = (nn.ModuleDict({"layer": nn.Linear(2, 2)}) for _ in range(2))
    names.add_stage(stage_of(first, 0))
    names.add_stage(stage_of(second, 1))
    assert names.tensor(first["layer"].bias).name == "layer.bias"
    assert names.tensor(second["layer"].bias).name == "(stage 1).layer.bias"
    assert names.module(second["layer"]).name == "(stage 1).layer"


def test_stages_that_share_a_tensor_share_its_name() -> None:
    names, embed = Names(), nn.Embedding(3, 2)
    first, last = nn.ModuleDict({"embed": embed}), nn.ModuleDict({"embed": embed})
    names.add_stage(stage_of(first, 0))
    names.add_stage(stage_of(last, 2))
    assert [name.name for _, name in names.parameters()] == ["embed.weight"]


def test_names_that_cannot_be_printed_are_escaped_everywhere_alike() -> None:
    names, model = Names(), nn.Sequential()
    model.add_module("a\x1b[31m\u202e", nn.Linear(2, 2))
    (part,) = model
    part.register_parameter("b\n", nn.Parameter(torch.ones(1)))
    assert names.module(part).name == r"a\x1b[31m\u202e"
    assert names.tensor(part.weight).name == r"a\x1b[31m\u202e.weight"
    assert names.tensor(getattr(part, "b\n")).name == r"a\x1b[31m\u202e.b\n"
    assert tensors_in({"k\x1b": torch.ones(1)}, "out")[0][0] == r"out.k\x1b"
