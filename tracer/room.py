"""Where in a fixed stretch of memory the next bytes go: pure arithmetic on offsets."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64
"""Every offset is a multiple of this, so that any dtype may view the bytes."""


class Room:
    """Hands out stretches of ``capacity`` bytes, always the first that is long enough; ``used`` are out.

    So the same warm pages are used over and over, and no more of them than were ever needed at once: a copy
    into fresh memory is twenty times slower. Bytes come back nearly in the order in which they were handed
    out, which leaves few holes. Not safe for threads: the owner holds a lock.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self.used = 0
        self._lengths: dict[int, int] = {}
        self._free = [(0, self.capacity)] if self.capacity else []

    @property
    def empty(self) -> bool:
        """Tell whether nothing is handed out."""
        return not self._lengths

    def reserve(self, size: int) -> int | None:
        """Return the offset of ``size`` free bytes, or None where there is no such stretch now."""
        length = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        for number, (offset, free) in enumerate(self._free):
            if free >= length:
                self._lengths[offset] = length
                self.used += length
                self._free[number : number + 1] = [(offset + length, free - length)] if free > length else []
                return offset
        return None

    def release(self, offset: int) -> None:
        """Take back the stretch that was handed out at this offset."""
        length = self._lengths.pop(offset)
        self.used -= length
        after = bisect_left(self._free, (offset, 0))
        before = after
        if after < len(self._free) and self._free[after][0] == offset + length:
            length += self._free[after][1]
            after += 1
        if before and sum(self._free[before - 1]) == offset:
            before -= 1
            offset, length = self._free[before][0], self._free[before][1] + length
        self._free[before:after] = [(offset, length)]
