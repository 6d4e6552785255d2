"""Run a program on a rank whose activations are not recorded: ``half_recorded.py odd|all PROGRAM …``.

With ``odd`` this holds for odd ranks only. What the recorder was asked to do stands in one environment
variable, read when torch is imported; it is changed here before that, as a user's wrapper could.
"""

from __future__ import annotations

import json
import os
import runpy
import sys

LEFT_OUT = ("activation", "activation_grad")

KINDS = (
    "input", "activation", "loss", "activation_grad", "local_grad", "reduced_grad", "unscaled_grad",
    "clipped_grad", "schedule", "optimizer_state", "param", "buffer", "rng", "collective",
)  # fmt: skip


def main() -> None:
    which, program, *arguments = sys.argv[1:]
    assert "torch" not in sys.modules
    if which == "all" or int(os.environ.get("RANK", "0")) % 2:
        settings = json.loads(os.environ["TENSORTRACE_RECORD"])
        promise = settings.setdefault("promise", {})
        promise["kinds"] = [kind for kind in promise.get("kinds") or KINDS if kind not in LEFT_OUT]
        os.environ["TENSORTRACE_RECORD"] = json.dumps(settings)
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
