"""The formulas of torch.nn's classes, from their definitions, for float64; one list of them."""

from collections.abc import Mapping

from tensortrace.replay.modules.formulas.activations import ACTIVATIONS
from tensortrace.replay.modules.formulas.attention import ATTENTION
from tensortrace.replay.modules.formulas.convolutions import CONVOLUTIONS
from tensortrace.replay.modules.formulas.linear import LINEAR
from tensortrace.replay.modules.formulas.losses import LOSSES
from tensortrace.replay.modules.formulas.norms import NORMS
from tensortrace.replay.modules.formulas.pooling import POOLING
from tensortrace.replay.modules.given import Form

FORMULAS: Mapping[str, Form] = {
    **LINEAR, **NORMS, **ACTIVATIONS, **CONVOLUTIONS, **POOLING, **ATTENTION, **LOSSES,
}  # fmt: skip
"""By the name of the class. A new one is an entry in one of these."""

__all__ = ["FORMULAS"]
