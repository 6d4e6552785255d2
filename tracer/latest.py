"""Which contents a store still knows: by the order of what it is given, without asking it."""

from __future__ import annotations

from collections import OrderedDict


class Latest:
    """The digests among the latest ``reach`` boundaries; 0 knows none.

    The store may forget a content once it has been given that many others. We forget it at half of them, so
    that boundaries which are being added at the same time do no harm. Not safe for threads.
    """

    def __init__(self, reach: int) -> None:
        self._reach = reach // 2
        self._count = 0
        self._last: OrderedDict[str, int] = OrderedDict()  # of a dict the first key takes ever longer to find

    def holds(self, digest: str) -> bool:
        """Tell whether the store knows this content when it gets the next boundary."""
        last = self._last.get(digest)
        return last is not None and self._count - last < self._reach

    def add(self, digest: str | None) -> None:
        """Count a boundary that the store will be given, of this content if that is known."""
        self._count += 1
        if digest is None or not self._reach:
            return
        self._last[digest] = self._count
        self._last.move_to_end(digest)
        if len(self._last) > self._reach:
            self._last.popitem(last=False)
