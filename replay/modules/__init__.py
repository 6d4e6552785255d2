"""Modules of torch.nn executed again in float64 from what was recorded of their calls."""

from tensortrace.replay.modules.hold import ModuleWork, hold_modules
from tensortrace.replay.modules.known import Modules

__all__ = ["ModuleWork", "Modules", "hold_modules"]
