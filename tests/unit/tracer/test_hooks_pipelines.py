"""Windows and microbatches where a schedule runs the chunks: forwards and backwards of several interleave."""

from __future__ import annotations

import torch

from tensortrace.tracer.hooks.clock import Clock, Moment


def run(clock: Clock, *chunks: int) -> list[Moment]:
    """Run a schedule: all forwards, then all backwards, of these chunks."""
    clock.schedule_began(trains=True)
    found = []
    for chunk in chunks:
        clock.chunk_began(chunk)
        clock.root_began(inside_optimizer=False)
        found.append(clock.forward_moment())
        clock.root_ended()
    for chunk in chunks:
        clock.chunk_began(chunk)
        clock.backward_began(inside_optimizer=False)
        found.append(clock.backward_moment())
        clock.backward_ended()
    clock.schedule_ended()
    return found


def test_a_chunk_is_a_microbatch_in_its_forward_and_its_backward() -> None:
    clock = Clock()
    assert run(clock, 0, 1, 2) == 2 * [Moment(0, 0), Moment(0, 1), Moment(0, 2)]
    assert clock.backward_moment() == Moment(0, 2)


def test_another_run_in_the_window_goes_on_counting_and_one_after_an_update_begins_anew() -> None:
    clock = Clock()
    run(clock, 1, 0)
    assert run(clock, 1, 0)[:2] == [Moment(0, 3), Moment(0, 2)]
    clock.optimizer_began(0, has_closure=False)
    clock.optimizer_ended()
    assert run(clock, 0) == 2 * [Moment(1, 0)]


def test_forwards_outside_of_a_schedule_go_on_after_its_chunks() -> None:
    clock = Clock()
    run(clock, 0, 1)
    clock.root_began(inside_optimizer=False)
    assert clock.forward_moment() == Moment(0, 2)


def test_a_schedule_that_only_evaluates_opens_nothing() -> None:
    clock = Clock()
    run(clock, 0)
    clock.optimizer_began(0, has_closure=False)
    clock.optimizer_ended()
    clock.schedule_began(trains=False)
    clock.chunk_began(3)
    clock.root_began(inside_optimizer=False)
    assert torch.is_grad_enabled()
    assert clock.forward_moment() == Moment(0, None)
    clock.root_ended()
    clock.schedule_ended()
    assert clock.forward_moment() == Moment(0, 0)
