"""Says in words what an operation was given beside tensors, and which tensors those are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

MAX_ARGUMENTS = 64
MAX_TEXT = 160

RETURN = "return"
"""``meta.op`` of the entry that ends a call: its arguments say which operations the result came from."""

CALLED_AT = " < "
"""Between a function and the line that called it, in ``meta.text``."""

FLOWS = "grad"
"""Behind a tensor that requires a gradient, in ``meta.arguments``."""

_SILENT = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
"""Operations whose result is memory as it is found: it says nothing, and differs from run to run."""

_COLLECTIVE = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def name_of(func: Any) -> str:
    """Return ``aten.mul.Tensor``, or for what is no overload its own name."""
    return str(func)[:MAX_TEXT]


def short_name(func: Any) -> str:
    """Return ``mul``: the name without namespace and overload, fit for a slot."""
    text = getattr(getattr(func, "_schema", None), "name", None) or str(func)
    return str(text).rpartition("::")[2].rpartition(".")[2][:60] or "operation"


def namespace(func: Any) -> str:
    """Return ``aten``, or ``""`` for what has none."""
    return str(getattr(func, "namespace", ""))


def is_silent(func: Any) -> bool:
    """Tell whether an operation's results are not values: memory as found, or not there yet."""
    if namespace(func) == "aten":
        return short_name(func) in _SILENT
    return namespace(func) in _COLLECTIVE and short_name(func) != "wait_tensor"


def is_collective(func: Any) -> bool:
    """Tell whether an operation talks to other ranks, and may still be writing when it returns."""
    return namespace(func) in _COLLECTIVE


def is_view(func: Any) -> bool:
    """Tell whether results are the given memory, seen in another way."""
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    aliases = [r.alias_info for r in returns if r.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation changes in place, or is given to put its results into."""
    schema = getattr(func, "_schema", None)
    found: list[torch.Tensor] = []
    for place, argument in enumerate(getattr(schema, "arguments", ())):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [tensor for tensor in leaves(value) if isinstance(tensor, torch.Tensor)]
    return found


def named(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what an operation was given under the names of its schema."""
    declared = [argument.name for argument in getattr(getattr(func, "_schema", None), "arguments", ())]
    found = [(declared[i] if i < len(declared) else str(i), value) for i, value in enumerate(args)]
    return [*found, *kwargs.items()][:MAX_ARGUMENTS]


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is inside lists and tuples."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def text(value: Any, of_tensor: Callable[[torch.Tensor], str]) -> str:
    """Return a value as the trace states it: equal texts mean equal arguments, whatever the rank."""
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, (list, tuple)):
        return ("[" + ", ".join(text(item, of_tensor) for item in value[:MAX_ARGUMENTS]) + "]")[
            : 4 * MAX_TEXT
        ]
    if isinstance(value, torch.device):
        return value.type  # its number is the rank's own affair
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, str):
        return repr(value)[:MAX_TEXT]
    return type(value).__name__
