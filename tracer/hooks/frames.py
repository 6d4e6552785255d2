"""Keeps the recorder's own functions from being compiled as if they were the program's.

Where a graph breaks inside a module call, torch.compile goes on with what the broken function calls. Files
of torch are never compiled, but a function of ours in their place would be: what a program has compiled
would fall into other graphs than without a recorder. None of this keeps a function from being traced through.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import torch


def pass_through(function: Callable[..., object]) -> None:
    """Let torch.compile compile what this function calls, never the function itself."""
    _set(function, everything=False)


def leave_out(function: Callable[..., object]) -> None:
    """Let torch.compile compile neither this function nor anything that it calls."""
    _set(function, everything=True)


def _set(function: Callable[..., object], *, everything: bool) -> None:
    compiler = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if compiler is None or not isinstance(function, FunctionType):
        return
    if hasattr(compiler, "set_code_exec_strategy"):
        skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
        strategy = compiler._FrameExecStrategy(skip, skip if everything else default)
        compiler.set_code_exec_strategy(function.__code__, strategy)
    elif hasattr(compiler, "skip_code"):  # PyTorch 2.6
        compiler.skip_code(function.__code__)
