"""Whether two runs were asked to begin or to draw masks in different ways (``docs/start.md``)."""

from __future__ import annotations

from tensortrace.tracer.environment import START
from tensortrace.tracer.reader import Trace


def start_notes(a: Trace, b: Trace) -> list[str]:
    """Return a sentence where the options of the two runs differ, nothing where they don't."""
    left, right = _options(a), _options(b)
    if left == right:
        return []
    return [f"the runs were not started alike: a {_shown(left)}, b {_shown(right)}"]


def _options(trace: Trace) -> dict[str, str]:
    """Return the options by name; every rank has the same, and the launcher too."""
    manifests = [trace.manifest, *(rank.manifest for rank in trace.ranks)]
    flags = [manifest.environment.flags for manifest in manifests if manifest is not None]
    found = {name: value for held in flags for name, value in held.items()}
    return {name.removeprefix(START): value for name, value in found.items() if name.startswith(START)}


def _shown(options: dict[str, str]) -> str:
    if not options:
        return "as its program says"
    return "with " + " ".join(f"--{name} {value}".removesuffix(" True") for name, value in options.items())
