"""Re-execute what a trace recorded: one run, judged by what its own inputs should have become."""

from tensortrace.replay.engine import ReplayOptions, replay
from tensortrace.replay.result import Replay

__all__ = ["Replay", "ReplayOptions", "replay"]
