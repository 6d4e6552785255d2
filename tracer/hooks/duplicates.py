"""Records copies of the model that a program keeps beside it: moving averages, target networks, teachers."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tensortrace.tracer.hooks.clock import Moment
from tensortrace.tracer.hooks.digests import Digests
from tensortrace.tracer.hooks.guard import guard
from tensortrace.tracer.hooks.names import class_of, tensors_of
from tensortrace.tracer.hooks.session import Session
from tensortrace.tracer.hooks.walk import is_plain
from tensortrace.tracer.placements import split
from tensortrace.tracer.types import INIT_STEP, Kind, Meta

IN_DICT = "(copy)"
"""The prefix of a copy that is a mapping from the model's names to tensors."""

_OURS = 2
"""References to an object that a mapping alone holds, while they are counted."""


class Duplicates:
    """The copies known so far; each is recorded as ``buffer`` in the windows that change it.

    They are held weakly until a window changes one: an average that a function keeps is gone when the
    function returns, before its last window closes. From then on each is held until a window closes in which
    nobody else does. A mapping has its number from the first window that changes it: others lie about in one
    run only.

    They are looked for among all living objects when the first window opens and when it closes (copies may be
    made after the first step), which takes hundredths of a second; an AveragedModel also when it is updated.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._digests = Digests()
        self._modules: dict[str, weakref.ref[nn.Module]] = {}
        self._tensors: dict[tuple[int, str], weakref.ref[torch.Tensor]] = {}
        self._dicts = 0
        self._numbers: dict[int, int] = {}
        self._held: dict[int, object] = {}
        self._looked_after_a_step = False
        session.clock.before_first.append(self._look)
        session.clock.before_close.append(self.record)
        session.patches.on_undo(self._held.clear)

    def install(self) -> None:
        """Watch torch's own averages."""
        duplicates, original = self, AveragedModel.update_parameters

        @functools.wraps(original)
        def update_parameters(self: AveragedModel, *args: Any, **kwargs: Any) -> None:
            duplicates._meet(self)
            original(self, *args, **kwargs)

        self._session.patches.attribute(AveragedModel, "update_parameters", update_parameters)

    def record(self) -> None:
        """Record what changed in the window that is about to close."""
        at = self._session.clock.window()
        if at.step == INIT_STEP:
            return
        if not self._session.quiet:
            self._record_changes(at)
        self._let_go()
        if not self._looked_after_a_step:
            self._looked_after_a_step = True
            self._look()

    @guard("averaged model")
    def _meet(self, model: AveragedModel) -> None:
        if all(known() is not model for known in self._modules.values()):
            self._add_module(model)

    def _record_changes(self, at: Moment) -> None:
        """Record what changed, and hold it from now on."""
        for prefix, reference in list(self._modules.items()):
            module = reference()
            for name, tensor in tensors_of(module) if module is not None else ():
                if self._record(f"{prefix}.{name}", tensor, at):
                    self._held[id(module)] = module
        for (which, name), held in list(self._tensors.items()):
            value = held()
            if value is not None and self._record(f"{self._prefix(which)}.{name}", value, at):
                self._numbers.setdefault(which, len(self._numbers))
                self._held[id(value)] = value

    def _record(self, name: str, tensor: torch.Tensor, at: Moment) -> bool:
        """Record a tensor of a copy if the window changed it; tell whether it did."""
        if not self._session.wants(Kind.BUFFER, name, at) or not self._digests.changed(tensor):
            return False
        self._session.emit(tensor, at, Kind.BUFFER, name, "model", meta=Meta(text="copy"))
        return True

    def _prefix(self, which: int) -> str:
        number = self._numbers.get(which, len(self._numbers))
        return f"{IN_DICT}.{number}" if number else IN_DICT

    def _let_go(self) -> None:
        """Hold no longer what nobody else holds: its last value is recorded."""
        for key in list(self._held):
            if sys.getrefcount(self._held[key]) <= _OURS:
                del self._held[key]

    def _look(self) -> None:
        model = _Model(self._session)
        if not model.shapes:
            return
        met = {id(known()) for known in self._modules.values()}
        modules: list[nn.Module] = []
        for generation in (2, 1, 0):
            for found in gc.get_objects(generation):
                kind = type(found)  # objects may lie about their __class__
                if issubclass(kind, nn.Module):
                    if "_modules" in vars(found) and id(found) not in met and model.is_copied_by(found):
                        modules.append(found)
                elif kind in (dict, OrderedDict) and model.is_copied_in(found):
                    self._add_dict(found)
        inside = {id(part) for module in modules for part in list(module.modules())[1:]}
        for module in modules:
            if id(module) not in inside:
                self._add_module(module)

    def _add_module(self, module: nn.Module) -> None:
        name, number = class_of(module), 0
        while (prefix := f"{name}.{number}" if number else name) in self._modules:
            number += 1
        self._modules[prefix] = weakref.ref(module)
        self._note(tensor for _, tensor in tensors_of(module))

    def _add_dict(self, held: Mapping[str, torch.Tensor]) -> None:
        if any(known() is tensor for tensor in held.values() for known in self._tensors.values()):
            return
        for name, tensor in held.items():
            self._tensors[self._dicts, name.removeprefix("module.")] = weakref.ref(tensor)
        self._dicts += 1
        self._note(held.values())

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the tensors as they are for known: a copy that never changes isn't an average."""
        for tensor in tensors:
            self._digests.note(tensor)


class _Model:
    """The names, shapes and memory of what is trained, for others to be compared with."""

    def __init__(self, session: Session) -> None:
        parameters = [(name.name, tensor) for tensor, name in session.names.parameters()]
        self.shapes = {name: tensor.shape for name, tensor in parameters}
        self._buffers = {name.name for _, name in session.names.buffers()}
        self._memory = {_memory(tensor) for _, tensor in parameters}

    def is_copied_by(self, module: nn.Module) -> bool:
        """Tell whether a module is an average, or has all parameters of the model, and none of its memory."""
        if isinstance(module, AveragedModel):
            return "module" in module._modules
        if not module._modules and not module._parameters:
            return False
        found = {name: tensor for name, tensor in tensors_of(module) if isinstance(tensor, nn.Parameter)}
        return found.keys() == self.shapes.keys() and self._have_own_memory(found)

    def is_copied_in(self, held: dict[object, object]) -> bool:
        """Tell whether a mapping from names to tensors has all parameters of the model."""
        if not len(self.shapes) <= len(held) <= len(self.shapes) + len(self._buffers):
            return False
        found: dict[str, torch.Tensor] = {}
        for key, value in list(held.items()):
            if type(key) is not str or not isinstance(value, torch.Tensor):
                return False
            found[key.removeprefix("module.")] = value
        named = self.shapes.keys() <= found.keys() <= self.shapes.keys() | self._buffers
        return named and self._have_own_memory({name: found[name] for name in self.shapes})

    def _have_own_memory(self, found: Mapping[str, torch.Tensor]) -> bool:
        return all(
            is_plain(tensor) and tensor.shape == self.shapes[name] and _memory(tensor) not in self._memory
            for name, tensor in found.items()
        )


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, its identity where it has none."""
    try:
        return split(tensor)[0].untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
