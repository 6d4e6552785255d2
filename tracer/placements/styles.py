"""Reads how a parallel style of torch declares the plain tensors that a module is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tensortrace.tracer.placements.dtensor import spec_from_local
from tensortrace.tracer.placements.lineage import Place, gradient_of

PREPARES_ONE = "_prepare_input_fn"


def declared_inputs(module: nn.Module, given: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Place]:
    """Return the place of each plain input that a style's hook is about to make a DTensor of, by slot.

    Styles leave their layouts in the hooks that they register on the module, and nowhere else.
    """
    found: dict[str, Place] = {}
    tensors = dict(given)
    for hook in module._forward_pre_hooks.values():
        held = _held(hook)
        mesh = held.get("device_mesh")
        if mesh is None:
            continue
        for slot, layout in _layouts(held):
            tensor = tensors.get(slot)
            spec = (
                spec_from_local(tensor, mesh, layout) if tensor is not None and layout is not None else None
            )
            if spec is not None:
                found.setdefault(slot, Place(spec, gradient_of(spec)))
    return found


def _held(hook: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables that a hook's closure holds."""
    code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _layouts(held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (slot, placements): ColwiseParallel and its like declare the first input, others each."""
    prepares = held.get("input_fn")
    if isinstance(prepares, partial) and getattr(prepares.func, "__name__", "") == PREPARES_ONE:
        yield "in.0", prepares.args[0]
    style = held.get("self")
    for index, layout in enumerate(getattr(style, "input_layouts", None) or ()):
        yield f"in.{index}", layout
    for name, layout in (getattr(style, "input_kwarg_layouts", None) or {}).items():
        yield f"in.kw.{name}", layout
