"""What a tensor came from, where views of it do not keep the recorded tensor alive."""

from __future__ import annotations

import gc

import torch

from tensortrace.tracer.hooks.producers import Producers

EVENT = 7


def test_views_of_an_inference_tensor_that_is_gone_are_known() -> None:
    producers = Producers()
    with torch.inference_mode():
        whole = torch.randn(4, 3)
        producers.add(whole, EVENT, is_output=True)
        first, second = whole.chunk(2)
        del whole
        gc.collect()
        assert producers.find(first) == producers.find(second) == (EVENT,)


def test_memory_that_was_given_away_is_no_longer_a_recorded_tensors() -> None:
    producers = Producers()
    with torch.inference_mode():
        whole = torch.randn(4, 3)
        producers.add(whole, EVENT, is_output=True)
        del whole
        gc.collect()
        assert all(producers.find(torch.randn(4, 3)) == () for _ in range(4))
