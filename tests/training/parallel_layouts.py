"""The list of layouts, by the names that ``--layout`` takes."""

from __future__ import annotations

from parallel_context import CP, CPRing, CPRingZigzag, CPZigzag
from parallel_experts import EP
from parallel_parts import Layout
from parallel_pipeline import DPTPPP, PP, Interleaved
from parallel_replicas import DDP, FSDP1, FSDP2, HSDP, FSDP1Flat, ZeRO
from parallel_tensor import FSDP2TP, TP, TPSP

LAYOUTS: dict[str, type[Layout]] = {
    "single": Layout,
    "ddp": DDP,
    "fsdp2": FSDP2,
    "fsdp1": FSDP1,
    "fsdp1-flat": FSDP1Flat,
    "hsdp": HSDP,
    "tp": TP,
    "tp-sp": TPSP,
    "fsdp2-tp": FSDP2TP,
    "pp": PP,
    "pp-interleaved": Interleaved,
    "dp-tp-pp": DPTPPP,
    "cp": CP,
    "cp-zigzag": CPZigzag,
    "cp-ring": CPRing,
    "cp-ring-zigzag": CPRingZigzag,
    "ep": EP,
    "zero1": ZeRO,
}
