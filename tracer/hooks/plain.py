"""Notes what the modules of torch.nn are: their classes, and the plain settings that a formula needs."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

from tensortrace.tracer.hooks.guard import cuda_in_use
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.placements import own_class
from tensortrace.tracer.types import Module, Setting

OWN = "torch.nn.modules."
"""Where the classes are defined whose formulas are torch's."""

HOOKED = "hooks of the program may change what it is given, returns or passes back"
REPLACED = "its forward was replaced"
VARIES = "its settings changed while it was recorded"
UNWRITTEN = "its settings are not plain numbers"

MOST = 1 << 46
"""Beyond this no number is written: a reader refuses it."""

LONGEST = 64
"""Characters of a text beyond which it is no setting of torch's."""

_PLAIN = frozenset({bool, int, float, str, type(None)})
_MATRICES = ("Linear", "Bilinear", "MultiheadAttention")


class PlainModules:
    """Notes each module of a class of torch.nn when it is called, again when its settings have changed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: dict[int, tuple[weakref.ref[nn.Module], Module]] = {}

    def note(self, module: nn.Module, name: str) -> bool:
        """Note a module that is called; tell whether its class is one of torch.nn's own."""
        kind = type(module)
        if not kind.__module__.startswith(OWN):
            kind = own_class(module)
            if not kind.__module__.startswith(OWN):
                return False
        settings = plain_settings(module)
        odd = _oddity(module) if settings is not None else UNWRITTEN
        found = self._known.get(id(module))
        known = found[1] if found is not None and found[0]() is module else None
        if known is not None:
            if known.settings == (settings or {}) and known.odd in (odd, VARIES):
                return True
            odd = known.odd or odd or VARIES
            if known.odd == odd:
                return True
        noted = Module(kind.__name__, settings or {}, odd)
        self._known[id(module)] = weakref.ref(module), noted
        self._session.sink.module(name, self._with_precision(noted))
        return True

    def _with_precision(self, module: Module) -> Module:
        """Return the module with what else decides how exactly its products are computed."""
        flags = _precision(module.kind)
        return Module(module.kind, module.settings | flags, module.odd) if flags else module


def plain_settings(module: nn.Module) -> dict[str, Setting] | None:
    """Return the numbers and texts that a module was made with; None where some cannot be written."""
    found: dict[str, Setting] = {}
    held = module.__dict__
    for key in _names(own_class(module)):
        value = held.get(key)
        if type(value) in _PLAIN:
            if isinstance(value, str) and not (value.isprintable() and len(value) <= LONGEST):
                return None
            if isinstance(value, (int, float)) and not abs(value) < MOST:
                return None
            if value is not None or key in held:
                found[key] = value
        elif isinstance(value, tuple) and all(type(item) is int and abs(item) < MOST for item in value):
            found[key] = tuple(value)
    return found


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    """Return what a class of torch.nn is made with."""
    return tuple(name for name in inspect.signature(kind).parameters if name not in ("device", "dtype"))


def _oddity(module: nn.Module) -> str:
    """Say why what is recorded of a module's calls need not be what its class makes of it."""
    if "forward" in module.__dict__:
        return REPLACED
    for hooks in (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
    ):  # fmt: skip
        if hooks and not _are_of_torch(hooks.values()):
            return HOOKED
    return ""


def _are_of_torch(hooks: Iterable[Callable[..., object]]) -> bool:
    """Tell whether hooks are torch's own (parallel styles, FSDP), which leave values as they are."""
    for hook in hooks:
        inner = getattr(hook, "func", hook)  # of functools.partial
        owner = getattr(inner, "__self__", None)
        where = type(owner).__module__ if owner is not None else getattr(inner, "__module__", None)
        if not str(where).startswith("torch.distributed."):
            return False
    return True


def _precision(kind: str) -> dict[str, Setting]:
    """Return what is set of products of float32, where it is not torch's default of a processor."""
    try:
        if kind in _MATRICES:
            precision = torch.get_float32_matmul_precision()
            return {} if precision == "highest" else {"matmul_precision": precision}
        if kind.startswith("Conv") and cuda_in_use() and torch.backends.cudnn.allow_tf32:
            return {"matmul_precision": "high"}
    except RuntimeError:  # torch refuses to say where its older and newer settings contradict each other
        return {"matmul_precision": "medium"}
    return {}
