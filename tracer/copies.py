"""Copies a tensor's bytes into host memory before the training can overwrite them.

Callers enter ``unobserved`` around everything they do with a tensor, its attributes included.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import numpy as np
import torch
from torch.utils import _python_dispatch

_PLAIN = (torch.Tensor, torch.nn.Parameter)

Wait = Callable[[], object]
"""Returns once the bytes have arrived; called on the writer thread."""

_hold_lock = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""``memmove`` called with the interpreter lock held."""

_READ = 0x100  # PyBUF_READ: what is in training must not be written to
_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)

SMALL = 64 << 10
"""Bytes up to which a copy keeps the interpreter lock: to get it back can take longer than the copy."""

_side_streams: dict[int, torch.cuda.Stream] = {}


def unsupported(tensor: torch.Tensor) -> str | None:
    """Return why the bytes of this tensor cannot be taken, or None where they can."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return "not a strided tensor"
    if tensor.is_quantized:
        return "a quantized tensor"
    if tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor without memory of its own"
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return "inside a CUDA graph capture"
    return None


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as traces have it."""
    return str(dtype).removeprefix("torch.")


def host_memory(size: int, *, like: torch.Tensor) -> torch.Tensor:
    """Return ``size`` bytes (uint8) of uninitialised host memory, pinned where ``like`` is on CUDA.

    CPU memory comes from numpy: torch would fill it under deterministic algorithms, which faults every
    page in.
    """
    if like.is_cuda:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.from_numpy(np.empty(size, dtype=np.uint8))


def copy_bytes(tensor: torch.Tensor, target: torch.Tensor) -> Wait | None:
    """Copy a tensor's elements, row-major, into ``target`` (uint8, on the host, as many bytes).

    On CPU the copy is complete on return (None). On CUDA it runs on a side stream and the returned
    function waits for it; the current stream waits for the copy too (on the device, the host runs on),
    because the next kernel may overwrite the tensor in place. Nothing is allocated on the device for
    contiguous tensors, so recording cannot make a training run out of device memory.
    """
    if is_plain(tensor):
        copy_plain(tensor, target.data_ptr(), target.numel())
        return None
    source = tensor.detach()
    view = target.view(source.dtype).reshape(source.shape)
    if not source.is_cuda:
        view.copy_(source)
        return None
    return _copy_from_cuda(source, view)


def bytes_of_plain(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a plain tensor where they lie; to be used while the tensor is held only."""
    size = tensor.nbytes
    return _view(tensor.data_ptr(), size, _READ) if size else memoryview(b"")


def copy_plain(tensor: torch.Tensor, address: int, size: int) -> None:
    """Copy the bytes of a plain tensor, ``size`` of them, to an address in host memory."""
    (_hold_lock if size <= SMALL else ctypes.memmove)(address, tensor.data_ptr(), size)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether the memory holds the elements as they are wanted; a dispatcher call costs ten copies."""
    return (
        type(tensor) in _PLAIN
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _copy_from_cuda(source: torch.Tensor, view: torch.Tensor) -> Wait:
    current = torch.cuda.current_stream(source.device)
    side = _side_stream(source.device)
    side.wait_stream(current)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
    with torch.cuda.stream(side):
        view.copy_(source, non_blocking=True)
        done.record(side)
    source.record_stream(side)
    current.wait_event(done)
    return done.synchronize


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index not in _side_streams:
        _side_streams[index] = torch.cuda.Stream(device=index)  # type: ignore[no-untyped-call]
    return _side_streams[index]


def unobserved() -> AbstractContextManager[object]:
    """Return a context in which our own tensor operations are hidden from modes that the program has on."""
    hidden = torch._C.DisableTorchFunction()
    if not torch._C._len_torch_dispatch_stack():
        return hidden
    stack = ExitStack()
    stack.enter_context(hidden)
    stack.enter_context(_python_dispatch._disable_current_modes())
    return stack
