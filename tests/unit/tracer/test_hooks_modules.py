"""What is recorded of module calls: names, slots, values at the time, gradients, producers."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tensortrace.tracer.hooks.modules import _couples_rows
from tests.memory_sink import MemorySink, recording
from tests.unit.tracer.programs import Tied


def producers_of(sink: MemorySink, name: str, slot: str) -> list[tuple[str, str]]:
    """Return (name, slot) of what the only boundary of this name and slot came from."""
    (kept,) = sink.find("activation", name, slot)
    found = [sink.kept[event].boundary for event in kept.boundary.producers]
    return [(boundary.name, boundary.slot) for boundary in found]


def test_an_output_that_is_overwritten_in_place_is_recorded_as_it_was() -> None:
    with recording() as sink:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
        with torch.no_grad():
            model[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
            model[0].bias.zero_()
        model(torch.tensor([[-3.0, 4.0]])).sum().backward()
    assert sink.one("activation", "0", "out").tolist() == [[-3.0, 4.0]]
    assert sink.one("activation", "1", "out").tolist() == [[0.0, 4.0]]
    # The sum's gradient is 1; before the ReLU it is 0 where the input was negative.
    assert sink.one("activation_grad", "1", "out").tolist() == [[1.0, 1.0]]
    assert sink.one("activation_grad", "0", "out").tolist() == [[0.0, 1.0]]
    assert producers_of(sink, "1", "in.0") == [("0", "out")]


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclass
class Record:
    hidden: torch.Tensor
    note: str = "x"


class Maker(nn.Module):
    def __init__(self, made: object) -> None:
        super().__init__()
        self.made = made
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.made


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("made", "slots"),
    [
        (ONE, ["out"]),
        ((ONE, 3, ONE), ["out.0", "out.2"]),
        ({"logits": ONE, "more": [ONE, None]}, ["out.logits", "out.more.0"]),
        (OrderedDict(a=(ONE, (ONE,))), ["out.a.0", "out.a.1.0"]),
        (Pair(ONE, ONE), ["out.left", "out.right"]),
        (Record(ONE), ["out.hidden"]),
        ("nothing", []),
    ],
)
def test_tensors_in_containers_have_the_path_to_them_as_slot(made: object, slots: list[str]) -> None:
    with recording() as sink:
        Maker(made)()
    assert [k.boundary.slot for k in sink.find("activation", "(root)") if k.boundary.slot[0] == "o"] == slots


def test_inputs_are_named_by_position_and_keyword() -> None:
    with recording() as sink:
        Maker(ONE)(ONE, [ONE, {"x": ONE}], mask=ONE, batch={"ids": torch.tensor([1])})
    expected = ["in.0", "in.1.0", "in.1.1.x", "in.kw.mask", "in.kw.batch.ids"]
    assert [kept.boundary.slot for kept in sink.find("input", "(root)")] == expected
    assert sink.one("input", "(root)", "in.kw.batch.ids").dtype == torch.int64


def test_gradients_of_inputs_are_totals_over_all_consumers() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.root, self.twice, self.thrice = nn.Identity(), nn.Identity(), nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.root(x * 1)
            return 2 * self.twice(x * 1).sum() + 3 * self.thrice(x).sum()

    with recording() as sink:
        Fork()(torch.ones(2, requires_grad=True)).backward()
    assert sink.one("activation_grad", "twice", "in.0").tolist() == [2.0, 2.0]
    assert sink.one("activation_grad", "thrice", "in.0").tolist() == [5.0, 5.0]
    assert sink.one("activation_grad", "root", "out").tolist() == [5.0, 5.0]
    assert sink.find("activation_grad", "thrice", "in.0")[0].boundary.meta.total
    assert not sink.find("activation_grad", "root", "out")[0].boundary.meta.total


def test_two_backwards_through_one_graph_are_two_calls() -> None:
    with recording() as sink:
        model = nn.Linear(2, 2)
        output = model(torch.ones(1, 2))
        output.sum().backward(retain_graph=True)
        (3 * output.sum()).backward()
    grads = sink.find("activation_grad", "(root)", "out")
    assert [(kept.boundary.call, kept.value[0, 0].item()) for kept in grads] == [(0, 1.0), (1, 3.0)]


def test_a_side_computation_brings_no_gradients() -> None:
    with recording() as sink:
        model = nn.Linear(2, 1)
        x = torch.ones(3, 2, requires_grad=True)
        output = model(x).sum()
        (slope,) = torch.autograd.grad(output, x, create_graph=True)
        (output + slope.sum()).backward()
    assert len(sink.find("activation_grad", "(root)", "out", call=0)) == 1
    assert len(sink.find("local_grad", "weight", "grad", microbatch=0)) == 1
    assert len(sink.find("loss", "backward")) == 1


def test_producers_are_found_through_views_arithmetic_and_chunks() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).transpose(0, 1)
            return x + self.out(mixed)

    with recording() as sink:
        model = nn.Sequential(nn.Linear(4, 4), Attention())
        model(torch.randn(2, 3, 4)).sum().backward()
    assert producers_of(sink, "1.qkv", "in.0") == [("1.norm", "out")]
    assert producers_of(sink, "1.out", "in.0") == [("1.qkv", "out")]
    assert producers_of(sink, "1", "out") == [("0", "out"), ("1.out", "out")]
    assert producers_of(sink, "0", "out") == [("0", "in.0")]
    assert producers_of(sink, "(root)", "in.0") == [("(root)", "in.0")]


def test_without_a_graph_producers_are_assumed_and_marked() -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) / 2)

    with recording() as sink:
        model = Halved()
        model(torch.ones(1, 2)).sum().backward()  # what is computed before any step is not recorded
        del sink.kept[:]
        with torch.no_grad():
            model(torch.ones(1, 2))
    (kept,) = sink.find("activation", "second", "in.0")
    assert kept.boundary.meta.assumed
    # What the parent had been given or computed by then: a superset, so that no edge is missing.
    name = sink.names("activation")[0]
    assert producers_of(sink, "second", "in.0") == [(name, "in.0"), ("first", "out")]


def test_memory_that_is_reused_is_not_taken_for_its_former_tensor() -> None:
    class Reuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first(x)
            return self.second(torch.ones(1, 64))

    with recording() as sink:
        model = Reuses()
        model(torch.ones(1, 64)).sum().backward()
        del sink.kept[:]
        with torch.no_grad():
            model(torch.ones(1, 64))
    (kept,) = sink.find("activation", "second", "in.0")
    assert kept.boundary.meta.assumed


def test_a_tied_parameter_has_one_name_and_a_gradient_per_use() -> None:
    with recording() as sink:
        model = Tied()
        batch = {"ids": torch.tensor([[1, 2]]), "mask": torch.ones(1, 2)}
        model(batch=batch).logits.square().sum().backward()
    assert "head.weight" not in sink.names("param")
    assert sink.find("param", "embed.weight")[0].boundary.meta.aliases == ("head.weight",)
    whole = sink.one("local_grad", "embed.weight", "grad", microbatch=0)
    parts = [sink.one("local_grad", "embed.weight", f"use.{use}") for use in ("embed", "head")]
    assert torch.allclose(whole, parts[0] + parts[1], atol=1e-6)
    assert all(part.abs().sum() > 0 for part in parts)


def test_a_tied_parameter_under_autocast_has_a_gradient_per_use() -> None:
    with recording() as sink:
        model = Tied()
        batch = {"ids": torch.tensor([[1, 2]]), "mask": torch.ones(1, 2)}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch=batch).logits
        logits.float().square().sum().backward()
    whole = sink.one("local_grad", "embed.weight", "grad", microbatch=0)
    embed = sink.one("local_grad", "embed.weight", "use.embed")
    head = sink.one("local_grad", "embed.weight", "use.head")
    assert head.dtype == torch.bfloat16
    assert torch.allclose(whole, embed + head.float(), atol=1e-2)
    assert sink.find("activation", "head", "out")[0].boundary.meta.autocast == "bfloat16"


def test_the_module_call_says_where_it_is_and_in_which_mode() -> None:
    with recording() as sink:
        model = nn.Sequential(nn.Linear(2, 2)).eval()
        model(torch.ones(1, 2))
    (kept,) = sink.find("activation", "0", "out")
    meta = kept.boundary.meta
    assert (meta.module, meta.training, meta.autocast) == ("Linear", False, None)
    assert meta.source is not None
    assert meta.source.startswith("test_hooks_modules.py:")


def test_a_copied_or_replaced_layer_is_named_by_where_it_stands_now() -> None:
    with recording() as sink:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        model[1] = copy.deepcopy(model[0])
        model(torch.ones(1, 2)).sum().backward()
    assert len(sink.find("local_grad", "1.weight", "grad", microbatch=1)) == 1
    assert {kept.boundary.name for kept in sink.find("activation")} == {"(root)", "0", "1"}


class Chain(nn.Sequential):
    """A module of the program's own: torch.compile leaves the frames of torch's files alone."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for part in self:
            rows = part(rows)
        return rows


@pytest.mark.parametrize("how", ["call", "in place"])
def test_a_compiled_module_is_seen_from_outside_without_a_graph_break(how: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Chain(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    x = torch.ones(4, 2)
    expected = model(x).detach()
    with recording() as sink:
        outer = nn.Sequential(model)
        if how == "call":
            outer[0] = torch.compile(model, backend="aot_eager", fullgraph=True)
        else:
            outer[0].compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            F.mse_loss(outer(x), torch.zeros(4, 1)).backward()
    assert torch.allclose(sink.find("activation", "0", "out")[0].value, expected)
    assert [kept.boundary.microbatch for kept in sink.find("activation", "0", "out")] == [0, 1]
    assert sink.find("activation", "0.0") == []
    assert len(sink.find("activation_grad", "0", "out")) == 2
    assert len(sink.find("local_grad", "0.0.weight", "grad", microbatch=1)) == 1


def test_a_module_of_which_torch_compiles_nothing_stays_so() -> None:
    torch._dynamo.reset()
    graphs: list[object] = []
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with recording() as sink:
        outer = Chain(model)
        outer[0].compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
        outer(torch.ones(4, 2)).sum().backward()
    assert graphs == []
    assert len(sink.find("activation", "0", "out")) == 1


class Two(nn.Module):
    """Returns what is trained on and what is not, as a model with its loss and its scores does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.linear(rows)
        return scores.sum(), scores * 2


def test_an_output_of_a_compiled_module_that_gets_no_gradient_is_none_to_record() -> None:
    with recording() as sink:
        torch.compile(Two(), backend="aot_eager")(torch.ones(4, 2))[0].backward()
    assert [kept.boundary.slot for kept in sink.find("activation_grad", "(root)")] == ["out.0"]


def test_a_compiled_step_function_compiles_whole_while_recording() -> None:
    torch._dynamo.reset()
    model = nn.Linear(2, 1)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), torch.zeros(4, dtype=torch.int64))

    with recording() as sink:
        explained = torch._dynamo.explain(loss_of)(torch.ones(4, 2))
        torch.compile(loss_of, backend="aot_eager", fullgraph=True)(torch.ones(4, 2)).backward()
    assert explained.graph_break_count == 0
    assert len(sink.find("loss", "backward", "value")) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traced_scripted_and_saved_models_work_as_without_us() -> None:
    with recording() as sink:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        x = torch.ones(1, 2)
        expected = model(x)
        expected.sum().backward()
        for other in (torch.jit.trace(model, x), torch.jit.script(model), torch.fx.symbolic_trace(model)):
            assert torch.equal(other(x), expected)
        with io.BytesIO() as file:
            torch.save(model, file)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        assert torch.equal(torch.export.export(model, (x,)).module()(x), expected)
    assert len(sink.find("activation", "0", "out", recompute=False)) >= 1


class Whitening(nn.Module):
    """A normalisation of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.register_buffer("running_var", torch.ones(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows - rows.mean(0)


def test_modules_with_statistics_over_the_batch_are_marked_unless_they_are_synchronised() -> None:
    still = nn.BatchNorm1d(2).eval()
    with recording() as sink:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), still, Whitening(), nn.LayerNorm(2))
        model(torch.randn(4, 2)).sum().backward()
    marked = [kept.boundary.name for kept in sink.find("activation", slot="out") if kept.boundary.meta.op]
    assert marked == ["1", "3"]
    assert _couples_rows(nn.BatchNorm2d(2))
    assert not _couples_rows(nn.SyncBatchNorm(2))
    assert _couples_rows(nn.BatchNorm2d(2, track_running_stats=False).eval())


def test_a_root_that_is_given_what_another_was_given_has_inputs_of_its_own() -> None:
    chunks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with recording() as sink:
        batch = torch.ones(3, 4)
        first = chunks[0](batch[:, :2])
        chunks[1](batch[:, :2]).sum().backward()
        chunks[1](first)
    given = [kept.boundary for kept in sink.kept if kept.boundary.kind == "input"]
    assert [(boundary.name, boundary.call) for boundary in given] == [("(root)", 0), ("Linear", 0)]
