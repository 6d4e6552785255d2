"""Runs another program with a fault in rank 1's recorder only: FAULT PROGRAM ARGUMENTS…."""

from __future__ import annotations

import os
import runpy
import sys

if os.environ["RANK"] == "1":
    os.environ["TENSORTRACE_FAULT"] = sys.argv[1]
sys.argv = sys.argv[2:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
