"""Modules of torch.nn executed again in float64 from what was recorded of their calls."""

from tensortrace.replay.modules.hold import ModuleWork, hold_modules
from tensortrace.replay.modules.known import Modules
from tensortrace.replay.modules.versions import Versions

__all__ = ["ModuleWork", "Modules", "Versions", "hold_modules"]
