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
MAX_FRAMES = 64


class UserPlace(NamedTuple):
    """Where in the user's program something happened: ``file.py:12``, and the function that it lies in."""

    line: str
    function: str


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
            line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return UserPlace(line, frame.f_code.co_name)
        frame = frame.f_back
    return None


def calls_in_progress(*codes: CodeType) -> int:
    """Count the frames of this thread that run any of these: true even after exceptions, unlike a counter."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None:
        count += frame.f_code in codes
        frame = frame.f_back
    return count


@lru_cache(maxsize=8192)
def _is_users(code: CodeType) -> bool:
    name = code.co_filename
    return not name.startswith((_TORCH, _OURS, "<frozen", "<string>")) and "contextlib.py" not in name
