"""The boundaries of the ladder in plain words."""

from __future__ import annotations

from tensortrace.cli.render.safe import safe
from tensortrace.diff.result import StepLabel, Where

NAME_LIMIT = 120

_LOSS = {
    "value": "value of {name}",
    "sum": "sum of the token losses in {name}",
    "count": "number of valid tokens in {name}",
    "target": "targets given to {name}",
    "weight": "token weights in {name}",
}

_PARAMETER = {
    ("local_grad", "grad"): "local gradient of {name}{of_part}, before any reduction",
    ("local_grad", "hooked"): "local gradient of {name}{of_part} as the program's tensor hooks left it",
    ("local_grad", "start"): "gradient of {name} left over when the window began",
    ("reduced_grad", "grad"): "gradient of {name} after reduction {call}",
    ("unscaled_grad", "grad"): "gradient of {name} after the loss scale was divided out",
    ("clipped_grad", "before"): "gradient of {name} before clip {call}",
    ("param", "model"): "{name} {when}",
    ("param", "master"): "master copy of {name} {when}",
    ("param", "start"): "{name} when the window began",
    ("buffer", "model"): "buffer {name}",
    ("rng", "state"): "state of the random generator {name}",
}

_CLIP = {
    "total_norm": "total gradient norm of clip {call}",
    "max_norm": "greatest norm allowed by clip {call}",
    "norm_type": "type of norm of clip {call}",
    "coefficient": "coefficient of clip {call}",
}


def step(label: StepLabel) -> str:
    """Return a step in words: ``step 3``, or ``init``."""
    return "init" if label == "init" else f"step {label}"


def moment(where: Where) -> str:
    """Return when a boundary is: ``step 3, microbatch 0``."""
    part = "" if where.microbatch is None else f", microbatch {where.microbatch}"
    return step(where.step) + part


def key(where: Where) -> str:
    """Return the key within its step as one token each: ``clipped_grad fc.weight grad``, ``[1]`` a call."""
    call = f" [{where.call}]" if where.call else ""
    kind, slot = safe(where.kind, limit=20), safe(where.slot, limit=60)
    return f"{kind} {safe(where.name, limit=NAME_LIMIT)} {slot}{call}"


def boundary(where: Where) -> str:
    """Return what a boundary is in plain words: ``gradient of fc.weight before clip 1``."""
    name, slot = safe(where.name, limit=NAME_LIMIT), safe(where.slot, limit=60)
    names = {
        "name": name,
        "slot": slot,
        "call": str(where.call),
        "when": "at init" if where.step == "init" else "after the update",
        "of_part": " summed over the window" if where.microbatch is None else "",
    }
    template = _template(where, slot)
    words = template.format_map(names)
    repeated = where.call and "{call}" not in template
    return f"{words}, call {where.call}" if repeated else words


def _template(where: Where, slot: str) -> str:
    if where.kind == "clipped_grad":
        return _clip(where, slot)
    if where.kind == "loss":
        root = slot == "value" and where.name == "backward"
        return "loss that backward starts from" if root else _LOSS.get(slot, "{slot} of {name}")
    if where.kind in ("activation", "activation_grad", "input"):
        return _tensor_of_a_call(where.kind, slot)
    if where.kind == "local_grad" and slot.startswith("use."):
        return "local gradient of {name} from one of its uses ({slot})"
    if where.kind == "optimizer_state":
        return "optimizer's {slot} of {name} {when}"
    if where.kind == "collective":
        return {"in": "input", "out": "output"}.get(slot, "{slot}") + " of the collective {name}"
    return _PARAMETER.get((where.kind, slot), "{slot} of {name}")


def _clip(where: Where, slot: str) -> str:
    if where.name == "(clip)":
        return _CLIP.get(slot, "{slot} of clip {call}")
    if slot == "grad" and where.microbatch is None:
        return "gradient of {name} that the optimizer consumes"
    return "gradient of {name} after clip {call}" if slot == "grad" else _PARAMETER["clipped_grad", "before"]


def _tensor_of_a_call(kind: str, slot: str) -> str:
    tensor, _, again = slot.partition(" ")  # "out (recomputed)"
    side = "output" if tensor.split(".")[0] == "out" else "input"
    part = f" {again}" if again else "" if slot in ("out", "in") else " ({slot})"
    if kind == "input":
        return "input given to the model" + part
    return f"{'gradient at the ' if kind == 'activation_grad' else ''}{side} of {{name}}{part}"
