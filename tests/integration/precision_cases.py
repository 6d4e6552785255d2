"""The trainings of the matrix of precisions and ways to save memory by layouts; a reference has the same."""

from __future__ import annotations

from tests.integration.layouts import Case

BF16 = "--precision amp-bf16"
FP16 = "--precision amp-fp16 --steps 4"  # of which the first is skipped
PURE = "--precision bf16"
MIXED = "--precision mixed"
DEEP = "--depth 3"
REPLICAS = ("ddp", "fsdp2", "fsdp1", "fsdp1-flat", "hsdp", "zero1")
EVERY = (*REPLICAS, "tp", "tp-sp", "pp")


def model(layout: str, settings: str = "") -> str:
    """Return the options of a model that the layout can hold, trained by the settings."""
    return f"{DEEP} {settings}".strip() if layout == "pp" else settings


PRECISE = [
    *(Case(f"{at}-amp-bf16", 2, model(at, BF16), f"--layout {at}") for at in EVERY),
    *(Case(f"{at}-amp-fp16", 2, model(at, FP16), f"--layout {at}") for at in EVERY),
    *(Case(f"{at}-bf16", 2, model(at, PURE), f"--layout {at}") for at in EVERY if at[-4:] != "flat"),
    *(Case(f"{at}-mixed", 2, "", f"--layout {at} {MIXED}") for at in REPLICAS if "sdp" in at),
    *(
        Case(f"{at}-{kind}", 2, model(at), f"--layout {at} --checkpoint {kind}")
        for kind in ("reentrant", "non-reentrant")
        for at in ("ddp", "fsdp2", "fsdp1", "tp", "tp-sp", "zero1", "pp")
        if (kind, at)
        != ("reentrant", "pp")  # a stage's backward asks for gradients, which torch refuses there
    ),
    *(Case(f"{at}-kept", 2, "", f"--layout {at} --keep-activations cpu") for at in ("fsdp2", "fsdp1", "tp")),
    Case("fsdp2-offload", 2, "", "--layout fsdp2 --offload"),  # FSDP1's pins memory, which takes a GPU
    *(
        Case(f"{at}-{kind}", 2, f"--optimizer {kind}", f"--layout {at}")
        for kind in ("own", "sgd", "foreach", "fused")
        for at in ("ddp", "fsdp2", "fsdp1", "tp")
    ),
    *(Case(f"{at}-average", 2, "--average", f"--layout {at}") for at in ("ddp", "tp")),
]

FOUR = [
    Case(f"{at}-{name}.4", 4, settings, f"--layout {at}")
    for at in ("fsdp2-tp", "hsdp")
    for name, settings in (("amp-bf16", BF16), ("amp-fp16", FP16), ("bf16", PURE))
]

ANEW = "--dropout 0.1"
PLANTS = [
    Case("ddp-scaled-when-clipped", 2, FP16, "--layout ddp", plant="scaled-when-clipped"),
    Case("fsdp2-scaled-when-clipped", 2, FP16, "--layout fsdp2", plant="scaled-when-clipped"),
    Case("tp-skips-alone", 2, FP16, "--layout tp", plant="skips-alone"),
    Case("ddp-reduced-in-fp16", 2, "", "--layout ddp", plant="reduced-in-fp16"),
    Case("fsdp2-reduced-in-bf16", 2, "", f"--layout fsdp2 {MIXED}", plant="reduced-in-bf16"),
    Case(
        "fsdp1-recomputed-anew", 2, ANEW, "--layout fsdp1 --checkpoint non-reentrant", plant="recomputed-anew"
    ),
]
"""The last two are compared with their own layout without the mistake: see ``WITHOUT``."""

WITHOUT = {
    "fsdp2-reduced-in-bf16": Case("fsdp2-mixed", 2, "", f"--layout fsdp2 {MIXED}"),
    "fsdp1-recomputed-anew": Case("fsdp1-dropout", 2, ANEW, "--layout fsdp1 --checkpoint non-reentrant"),
}
