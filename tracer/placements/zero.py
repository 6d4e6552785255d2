"""Knows ZeroRedundancyOptimizer: an optimizer of all parameters around one of those that this rank owns."""

from __future__ import annotations

import sys
from types import ModuleType

from torch.optim import Optimizer

MODULE = "torch.distributed.optim.zero_redundancy_optimizer"
CLASS = "ZeroRedundancyOptimizer"
CONSTRUCTS_INNER = "_init_local_optimizer"


def zero_class(module: ModuleType | None) -> type | None:
    """Return the class, None in a torch that has none we know or where the program hasn't imported it."""
    found = getattr(module, CLASS, None)
    return found if isinstance(found, type) and CONSTRUCTS_INNER in vars(found) else None


def stepping(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds the state and makes the update: the inner one, or the optimizer itself.

    On each rank the inner one knows only the parameters that the rank owns; the others arrive by broadcast
    before the outer step returns.
    """
    owner = zero_class(sys.modules.get(MODULE))
    inner = getattr(optimizer, "optim", None) if owner is not None and isinstance(optimizer, owner) else None
    return inner if isinstance(inner, Optimizer) else optimizer
