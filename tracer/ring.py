"""Where in a fixed stretch of memory the next bytes go: pure arithmetic on offsets."""

from __future__ import annotations

from collections import deque

ALIGNMENT = 64
"""Every offset is a multiple of this, so that any dtype may view the bytes."""


class Ring:
    """Hands out stretches of ``capacity`` bytes, first in, first out.

    Releases may come out of order; a stretch is reused once all older ones are released. An empty ring
    starts again at 0, so that a consumer that keeps up touches the same warm pages over and over (a copy
    into fresh memory is twenty times slower). Not safe for threads: the owner holds a lock.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: deque[tuple[int, int]] = deque()
        self._released: set[int] = set()

    @property
    def empty(self) -> bool:
        """Tell whether nothing is handed out."""
        return not self._taken

    def reserve(self, size: int) -> int | None:
        """Return the offset of ``size`` free bytes, or None where there is no such stretch now."""
        length = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        offset = self._find(length)
        if offset is not None:
            self._taken.append((offset, length))
        return offset

    def release(self, offset: int) -> None:
        """Take back the stretch that was handed out at this offset."""
        self._released.add(offset)
        while self._taken and self._taken[0][0] in self._released:
            self._released.remove(self._taken.popleft()[0])

    def _find(self, length: int) -> int | None:
        if not self._taken:
            return 0 if length <= self.capacity else None
        oldest, (newest, newest_length) = self._taken[0][0], self._taken[-1]
        head = newest + newest_length
        if newest < oldest:
            return head if head + length <= oldest else None
        if head + length <= self.capacity:
            return head
        return 0 if length <= oldest else None
