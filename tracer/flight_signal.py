"""SIGUSR1 as a trigger: noticed beside whatever the program does with it, never instead of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from tensortrace.tracer.types import Triggered

SIGNAL = "SIGUSR1"


class Listener:
    """Notices SIGUSR1 in this process; ``asked`` is the first that came.

    ``step`` returns the step in which the training is. The handler only sets an attribute and calls the
    program's own handler, if there is one. Where the program had none, the signal ends nothing any more.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self.asked: Triggered | None = None
        self._step = step
        self._pid = os.getpid()
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._ours = self._handle
        self._installed = False

    def install(self) -> str | None:
        """Begin to listen; return why this is not possible, or None. On the thread that trains first."""
        if threading.current_thread() is not threading.main_thread():
            return f"{SIGNAL} is no trigger: the training does not run in the main thread"
        before = signal.getsignal(signal.SIGUSR1)
        if before is None:
            return f"{SIGNAL} is no trigger: a handler that is not Python's is installed for it"
        self._before = before
        signal.signal(signal.SIGUSR1, self._ours)
        if not callable(before):
            signal.siginterrupt(signal.SIGUSR1, False)  # nothing of the program expects to be interrupted
        self._installed = True
        return None

    def replaced(self) -> str | None:
        """Return that the program has set a handler after ours, or None; on any thread."""
        if not self._installed or signal.getsignal(signal.SIGUSR1) == self._ours:
            return None
        self._installed = False
        return f"{SIGNAL} is no trigger any more: the program has set a handler of its own"

    def remove(self) -> None:
        """Stop listening and leave the handler as it was, unless the program has set another."""
        on_main = threading.current_thread() is threading.main_thread()
        if self._installed and on_main and self.replaced() is None and self._before is not None:
            signal.signal(signal.SIGUSR1, self._before)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        own = os.getpid() == self._pid
        if own and self.asked is None:
            self.asked = Triggered(trigger=SIGNAL, step=self._step(), at=time.time())
        before = self._before
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and not own:  # a forked child, which would have ended
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
