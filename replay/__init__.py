"""Re-execute what a trace recorded: one run, judged by what its own inputs should have become.

Or pack what fails into one file, which replays anywhere.
"""

from tensortrace.replay.engine import ReplayOptions, replay
from tensortrace.replay.packed import CaseReplay, replay_case
from tensortrace.replay.packing import PackOptions, pack
from tensortrace.replay.result import Replay

__all__ = ["CaseReplay", "PackOptions", "Replay", "ReplayOptions", "pack", "replay", "replay_case"]
