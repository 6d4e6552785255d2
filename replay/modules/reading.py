"""Reads one call as its formula does: what it was given, which gradients are wanted, what came back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tensortrace.diff.catalog import Item, Slot
from tensortrace.diff.catalog import Part as BatchPart
from tensortrace.diff.compare import EPS, is_exact
from tensortrace.replay.contract import Step
from tensortrace.replay.modules.calls import Call, Owned
from tensortrace.replay.modules.execute import Made, execute
from tensortrace.replay.modules.formulas import FORMULAS
from tensortrace.replay.modules.given import Form, Given, NoFormula, Settings
from tensortrace.replay.modules.known import Modules
from tensortrace.replay.modules.versions import Versions
from tensortrace.tracer.types import COMPILED, Kind, Module

LARGEST = 1 << 23
"""Elements that one call may have to do with: a dozen arrays of float64 of this size are held."""

NO_CLASS = "no formula of its class is known"
CONTAINER = "it is made of the modules that it calls"
TOO_LARGE = f"its call has to do with more than {LARGEST} elements"
UNREADABLE = "what it was computed from was not stored"
NOT_FINITE = "what it was computed from is not finite"

PRODUCTS = ("Linear", "Bilinear", "Conv", "MultiheadAttention")
"""How classes begin that multiply matrices: in the format of autocast, or in one coarser than float32."""

_PRECISIONS = {"high": 2.0**-10, "medium": 2.0**-7}
"""Spacing of TF32 and of bfloat16, to which float32 may be rounded before it is multiplied."""


@dataclass(frozen=True)
class Wanted:
    """Which gradients of a call were recorded: of inputs by their slots, of own parameters by name.

    Inputs that are one tensor are each known by the first of them.
    """

    inputs: dict[str, str]
    own: list[str]


class CallReader:
    """Reads the calls of one step."""

    def __init__(self, step: Step, modules: Modules, versions: Versions) -> None:
        self._step, self._modules, self.owned = step, modules, Owned(step, versions)

    @staticmethod
    def execute_call(
        call: Call, form: Form, given: Given, gradient: torch.Tensor | None, inputs: Mapping[str, str],
        trained: Sequence[str],
    ) -> dict[str, Made]:  # fmt: skip
        """Execute a call's formula; of what is dropped where 0 came in, its gradient tells."""
        made = execute(form, given, gradient, inputs, trained)
        if form.random and given.training and "in.0" in made:  # what comes out of a 0 tells of no mask
            there = np.asarray(call.gradients["in.0"][1].read(), np.float64)
            value = made["in.0"].value
            dropped = (given.x.numpy() == 0) & (2 * np.abs(there) < np.abs(value))
            made["in.0"] = replace(made["in.0"], value=np.where(dropped, 0.0, value))
        return made

    def given(self, call: Call) -> tuple[Form, Module, dict[str, Item], Given]:
        """Return a call's formula, its module, its own values and what it was given; raise NoFormula."""
        ranks = {rank for _, item in call.values.values() for rank, _ in item.members}
        module = self._modules.module(call.name, ranks)
        form = FORMULAS.get(module.kind)
        if form is None:
            raise NoFormula(CONTAINER if self._step.view.calls(call.name) else NO_CLASS)
        if any(item.entry.meta.text == COMPILED for _, item in call.values.values()):
            raise NoFormula("it is compiled")
        _, out = call.values[result_of(call, form)]
        items = dict(call.given())
        own = self.owned.items(call, form.needs)
        every = [*items.values(), *own.values(), out]
        if any(not item.source.stored(item.entry) for item in every):
            raise NoFormula(UNREADABLE)
        if sum(math.prod(item.entry.local_shape) for item in every) > LARGEST:
            raise NoFormula(TOO_LARGE)
        if any(item.entry.dtype.startswith("complex") for item in every):
            raise NoFormula("it computes with complex numbers")
        inputs = {name: tensor_of(item) for name, item in items.items()}
        if not inputs:
            raise NoFormula("it was given no tensor")
        values = {name: tensor_of(item) for name, item in own.items()}
        for value in (*inputs.values(), *values.values()):
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise NoFormula(NOT_FINITE)
        first = next(iter(items.values()))
        given = Given(
            inputs, values, Settings(module.settings), bool(out.entry.meta.training), first.entry.dtype,
            out.entry.local_shape, tensor_of(out) if form.random else None,
            self._modules.version,
        )  # fmt: skip
        return form, module, own, given

    def gradient(self, call: Call) -> torch.Tensor | None:
        """Return the gradient of what a call returned, None where there is none that is finite."""
        form = FORMULAS[self._modules.module(call.name, call_ranks(call)).kind]
        _, item = call.gradients.get(result_of(call, form), (None, None))
        if item is None or not item.source.stored(item.entry) or is_exact(item.entry.dtype):
            return None
        value = tensor_of(item)
        return value if bool(torch.isfinite(value).all()) else None

    def wanted(self, call: Call, form: Form, given: Given) -> Wanted:
        """Return which gradients of a call were recorded."""
        inputs: dict[str, str] = {}
        known: dict[str, str] = {}
        for name in given.inputs:
            _, item = call.gradients.get(f"in.{name}", (None, None))
            if item is not None and given.inputs[name].is_floating_point():
                inputs[name] = known.setdefault(item.entry.digest, name)  # one tensor, given several times
        own = []
        for name, canonical in self.names(call, form).items():
            if name in given.own and given.own[name].is_floating_point() and self.arrived(canonical, call):
                own.append(name)
        return Wanted(inputs, own)

    def names(self, call: Call, form: Form) -> dict[str, str]:
        """Return the canonical names of the parameters that a formula reads, by their own names."""
        names = dict(self.owned.names(call.name))
        for need in form.needs:
            inner, _, own = need.rpartition(".")
            held = self.owned.names(f"{call.name}.{inner}")
            if own in held:
                names[need] = held[own]
        return names

    def arrived(self, name: str, call: Call) -> list[tuple[Slot, Item]]:
        """Return what arrived of a parameter's gradient in a call's part of the batch."""
        found = []
        for slot in self._step.view.named(Kind.LOCAL_GRAD, name):
            if slot.slot == "grad":
                found += [(slot, item) for item in self._step.view.items[slot] if _is_of(item, call.part)]
        return found

    def used(self, name: str, call: Call) -> list[tuple[Slot, Item]]:
        """Return what arrived of a tied parameter's gradient from its use in a call's module."""
        found = []
        for slot in self._step.view.named(Kind.LOCAL_GRAD, name):
            if slot.slot == f"use.{call.name}":
                found += [(slot, item) for item in self._step.view.items[slot] if _is_of(item, call.part)]
        return found

    def has_formula(self, call: Call) -> bool:
        """Tell whether the class of a call's module has a formula."""
        try:
            return self._modules.module(call.name, call_ranks(call)).kind in FORMULAS
        except NoFormula:
            return False


def _is_of(item: Item, part: BatchPart) -> bool:
    """Tell whether a gradient arrived in the backward of a part of the batch."""
    if item.part is not None:
        return item.part == part
    return part.phase == "train" and item.cell == part.rank and item.entry.microbatch == part.number


def call_ranks(call: Call) -> set[int]:
    """Return the ranks that hold any part of a call's tensors."""
    return {rank for _, item in call.values.values() for rank, _ in item.members}


def result_of(call: Call, form: Form) -> str:
    """Return the slot of the result that a formula tells; raise NoFormula where there is none."""
    found = [name for name in call.returned if not form.only or name in form.only]
    if len(found) != 1:
        raise NoFormula("it does not return one tensor")
    return found[0]


def tensor_of(item: Item) -> torch.Tensor:
    """Return a recorded tensor in float64; integers as they are, whole."""
    value = np.asarray(item.read())
    wide = {"b": np.bool_, "i": np.int64, "u": np.int64}.get(value.dtype.kind, np.float64)
    return torch.from_numpy(np.array(value, dtype=wide, order="C"))


def eps_of(items: Sequence[Item], module: Module) -> float:
    """Return the spacing of the coarsest format that a result went through."""
    found = max((EPS.get(item.entry.dtype, 0.0) for item in items), default=0.0)
    if not found or not module.kind.startswith(PRODUCTS):
        return found
    autocast = max(EPS.get(item.entry.meta.autocast or "", 0.0) for item in items)
    if found < EPS["float32"]:
        return found
    return max(found, autocast, _PRECISIONS.get(str(module.settings.get("matmul_precision")), 0.0))


def is_stored(out: Item, given: Given, own: dict[str, Item]) -> bool:
    """Tell whether a kernel computed in float32 from values of the format in which it stored the result."""
    narrow = out.entry.dtype in ("bfloat16", "float16")
    return narrow and given.dtype == out.entry.dtype and all(
        item.entry.dtype == out.entry.dtype for item in own.values()
    )  # fmt: skip
