"""Names the line of the user's program that led to a hook."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODULE_CALL = os.path.abspath(torch.nn.modules.module.__file__)
MAX_FRAMES = 64
MAX_CALLERS = 4


class UserPlace(NamedTuple):
    """Where in the user's program something happened: ``file.py:12``, and the function that it lies in."""

    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.line} in {self.function}"


def user_line() -> str | None:
    """Return ``file.py:12`` of the innermost frame that is neither torch's nor ours."""
    place = user_place()
    return None if place is None else place.line


def user_place() -> UserPlace | None:
    """Return the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            return None
        if _is_users(frame.f_code):
            return _place(frame)
        frame = frame.f_back
    return None


def user_places() -> list[UserPlace]:
    """Return the innermost place and those that called it, up to the module call that they belong to."""
    found: list[UserPlace] = []
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None or len(found) > MAX_CALLERS:
            break
        if found and frame.f_code.co_filename == _MODULE_CALL:
            break  # what torch's own modules compute is told by the line that calls them
        if _is_users(frame.f_code):
            found.append(_place(frame))
        frame = frame.f_back
    return found


def calls_in_progress(*codes: CodeType) -> int:
    """Count the frames of this thread that run any of these: true even after exceptions, unlike a counter."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        count += frame.f_code in codes
        frame = frame.f_back
    return count


def _place(frame: FrameType) -> UserPlace:
    line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    return UserPlace(line, frame.f_code.co_name)


@lru_cache(maxsize=8192)
def _is_users(code: CodeType) -> bool:
    name = code.co_filename
    return not name.startswith((_TORCH, _OURS, "<frozen", "<string>")) and "contextlib.py" not in name
