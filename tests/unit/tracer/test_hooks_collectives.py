"""The program's own collectives, on a group of one rank, and the gradients they reduce."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from tests.memory_sink import MemorySink, recording


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def after_backward(bias: bool = True) -> nn.Linear:
    model = nn.Linear(2, 1, bias=bias)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    return model


def reduced(sink: MemorySink) -> list[tuple[str, int, str | None, tuple[int, ...]]]:
    return [
        (k.boundary.name, k.boundary.call, k.boundary.meta.op, k.boundary.meta.ranks)
        for k in sink.find("reduced_grad")
    ]


def test_inputs_outputs_and_operation_of_a_collective_are_recorded() -> None:
    with recording() as sink:
        tensor = torch.tensor([1.0, 2.0])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        gathered = [torch.zeros(2)]
        dist.all_gather(gathered, tensor)
    assert sink.one("collective", "all_reduce", "in").tolist() == [1.0, 2.0]
    assert sink.one("collective", "all_gather", "out.0").tolist() == [1.0, 2.0]
    meta = sink.find("collective", "all_reduce", "out")[0].boundary.meta
    assert (meta.op, meta.ranks) == ("max", (0,))
    assert meta.source is not None
    assert meta.source.startswith("test_hooks_collectives.py:")


def test_reducing_each_gradient_marks_them_reduced_in_order() -> None:
    with recording() as sink:
        model = after_backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        dist.all_reduce(model.weight.grad.data)
    expected = [
        ("weight", 0, "all_reduce", (0,)),
        ("bias", 0, "all_reduce", (0,)),
        ("weight", 1, "all_reduce", (0,)),
    ]
    assert reduced(sink) == expected
    assert "reduced_grad" not in sink.absences


def test_a_flat_buffer_that_gradients_view_marks_all_of_them() -> None:
    with recording() as sink:
        model = nn.Linear(2, 1)
        flat = torch.zeros(3)
        model.weight.grad, model.bias.grad = flat[:2].view(1, 2), flat[2:]
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        dist.all_reduce(flat)
    assert [name for name, *_ in reduced(sink)] == ["weight", "bias"]
    assert sink.one("reduced_grad", "weight", "grad").tolist() == [[3.0, 4.0]]


def test_an_asynchronous_reduction_is_recorded_when_it_was_waited_for() -> None:
    with recording() as sink:
        model = after_backward(bias=False)
        work = dist.all_reduce(model.weight.grad, async_op=True)
        assert isinstance(work, dist.Work)
        assert reduced(sink) == []
        work.wait()
        work.wait()
        assert work.is_completed()
    assert [name for name, *_ in reduced(sink)] == ["weight"]


def test_a_handle_is_torchs_own_which_its_compiled_code_takes_and_may_wait_for() -> None:
    with recording() as sink:
        model = after_backward(bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        work = dist.all_reduce(model.weight.grad, async_op=True)
        assert type(work) is dist.Work
        work.get_future().wait()
        optimizer.step()
    assert [name for name, *_ in reduced(sink)] == ["weight"]
    assert not hasattr(dist.Work.wait, "__wrapped__")


def test_coalesced_reductions_are_recorded_when_the_manager_ends() -> None:
    with recording() as sink:
        model = after_backward()
        with dist.distributed_c10d._coalescing_manager():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            assert reduced(sink) == []
        assert [name for name, *_ in reduced(sink)] == ["weight", "bias"]
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(model.weight.grad, async_op=True)
        assert len(reduced(sink)) == 2
        manager.wait()
    assert len(reduced(sink)) == 3


def test_gradients_reduced_through_a_flat_copy_are_recorded_before_the_step() -> None:
    with recording() as sink:
        model = after_backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        grads = [parameter.grad for parameter in model.parameters()]
        flat = _flatten_dense_tensors(grads)
        dist.all_reduce(flat)
        for gradient, new in zip(grads, _unflatten_dense_tensors(flat / 2, grads), strict=True):
            gradient.copy_(new)
        optimizer.step()
    assert [name for name, *_ in reduced(sink)] == ["weight", "bias"]
    assert sink.one("reduced_grad", "weight", "grad").tolist() == [[1.5, 2.0]]


def test_reductions_made_in_hooks_of_the_program_come_after_the_local_gradient() -> None:
    with recording() as sink:
        model = nn.Linear(2, 1)
        model.weight.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        model.bias.register_hook(lambda gradient: gradient / 4)
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
    assert reduced(sink) == [("weight", 0, "all_reduce", (0,))]
    assert sink.one("local_grad", "bias", "grad", microbatch=0).item() == 1.0
    (local,) = sink.find("local_grad", "weight", "grad", microbatch=0)
    assert local.boundary.event < sink.find("reduced_grad")[0].boundary.event


def test_reducing_the_loss_is_no_reduction_of_gradients() -> None:
    with recording() as sink:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.tensor([[3.0, 4.0]])).sum()
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
    assert reduced(sink) == []
    assert "reduced_grad" in sink.absences


def test_collectives_on_objects_and_barriers_are_nobodys_boundaries() -> None:
    with recording() as sink:
        found: list[object] = [None]
        dist.all_gather_object(found, {"a": 1})
        dist.broadcast_object_list(found, src=0)
        dist.barrier()
    assert found == [{"a": 1}]
    assert sink.find("collective") == []


def test_data_parallel_of_one_rank_reduces_and_says_how_it_lies() -> None:
    with recording() as sink:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
        with model.no_sync():
            model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    assert reduced(sink) == [("weight", 0, "ddp", (0,)), ("bias", 0, "ddp", (0,))]
    assert sink.find("reduced_grad", "weight")[0].boundary.microbatch == 1
    assert list(sink.meshes) == ["ddp"]
    (shard,) = {kept.boundary.shard for kept in sink.find("local_grad", "weight", microbatch=1)}
    assert shard is not None
    assert [(p.kind, p.op) for p in shard.placements] == [("partial", "sum")]
    assert {kept.boundary.name for kept in sink.find("activation")} == {"(root)"}
