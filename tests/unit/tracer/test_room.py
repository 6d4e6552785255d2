"""Tests of the arithmetic of staging memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tensortrace.tracer.room import ALIGNMENT, Room


def test_the_front_is_used_again_as_soon_as_it_is_free() -> None:
    room = Room(1024)
    for _ in range(10):
        offset = room.reserve(300)
        assert offset == 0
        room.release(offset)


def test_memory_is_touched_no_further_than_it_was_needed_at_once() -> None:
    room = Room(1 << 20)
    out = [room.reserve(64) for _ in range(4)]
    assert out == [0, 64, 128, 192]
    for _ in range(100):
        room.release(out.pop(0))
        out.append(room.reserve(64))
    assert max(out) == 192


def test_a_full_room_gives_what_came_back() -> None:
    room = Room(256)
    assert [room.reserve(64) for _ in range(4)] == [0, 64, 128, 192]
    assert room.reserve(1) is None
    room.release(64)
    assert room.reserve(65) is None
    room.release(0)
    assert room.reserve(100) == 0


def test_more_than_the_capacity_is_never_given() -> None:
    assert Room(128).reserve(129) is None


def test_a_tensor_without_elements_has_a_place_of_its_own() -> None:
    room = Room(128)
    assert (room.reserve(0), room.reserve(0), room.reserve(0)) == (0, ALIGNMENT, None)


@given(
    st.integers(64, 4096), st.lists(st.tuples(st.integers(0, 1500), st.booleans()), max_size=60), st.data()
)
def test_stretches_lie_inside_are_aligned_and_never_overlap(
    capacity: int, wishes: list[tuple[int, bool]], data: st.DataObject
) -> None:
    room = Room(capacity)
    out: dict[int, int] = {}
    for size, give_back in wishes:
        offset = room.reserve(size)
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
            room.release(chosen)
    for offset in list(out):
        room.release(offset)
    assert room.empty
