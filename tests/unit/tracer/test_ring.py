"""Tests of the arithmetic of staging memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensortrace.tracer.ring import ALIGNMENT, Ring


def test_an_empty_ring_starts_again_at_its_front() -> None:
    ring = Ring(1024)
    for _ in range(10):
        offset = ring.reserve(300)
        assert offset == 0
        ring.release(offset)


def test_a_full_ring_gives_nothing_until_its_oldest_is_back() -> None:
    ring = Ring(256)
    offsets = [ring.reserve(64) for _ in range(4)]
    assert offsets == [0, 64, 128, 192]
    assert ring.reserve(1) is None
    ring.release(64)
    assert ring.reserve(1) is None, "the oldest is still out"
    ring.release(0)
    assert ring.reserve(100) == 0


def test_more_than_the_capacity_is_never_given() -> None:
    assert Ring(128).reserve(129) is None


def test_a_tensor_without_elements_has_a_place_of_its_own() -> None:
    ring = Ring(128)
    assert (ring.reserve(0), ring.reserve(0), ring.reserve(0)) == (0, ALIGNMENT, None)


@given(
    st.integers(64, 4096), st.lists(st.tuples(st.integers(0, 1500), st.booleans()), max_size=60), st.data()
)
def test_stretches_lie_inside_are_aligned_and_never_overlap(
    capacity: int, wishes: list[tuple[int, bool]], data: st.DataObject
) -> None:
    ring = Ring(capacity)
    out: dict[int, int] = {}
    for size, give_back in wishes:
        offset = ring.reserve(size)
        if offset is not None:
            assert offset % ALIGNMENT == 0
            assert 0 <= offset
            assert offset + size <= capacity
            assert all(offset + size <= start or start + length <= offset for start, length in out.items())
            assert offset not in out
            out[offset] = max(size, 1)
        if give_back and out:
            chosen = data.draw(st.sampled_from(sorted(out)))
            del out[chosen]
            ring.release(chosen)
    for offset in list(out):
        ring.release(offset)
    assert ring.empty
