"""Reads from a trace what identifies its run in a log."""

from __future__ import annotations

from pathlib import Path

from tensortrace.replay.validate.result import Tags
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.types import Kind

_SHOWN = (
    "python",
    "torch",
    "torch.cuda",
    "numpy",
    "transformers",
    "deepspeed",
    "megatron-core",
    "torchtitan",
)


def tags_of(path: Path) -> Tags:
    """Return the tags of a trace; raise a TraceError where it cannot be read."""
    with Trace.open(path) as trace:
        rank = trace.ranks[0] if trace.ranks else None
        manifest = rank.manifest if rank else None
        called = [entry for entry in rank.entries if entry.kind is Kind.ACTIVATION] if rank else []
        given = [entry for entry in rank.entries if entry.kind is Kind.INPUT] if rank else []
        first = [e for e in given if (e.step, e.microbatch) == (given[0].step, given[0].microbatch)]
        versions = manifest.environment.versions if manifest else {}
        computed = {
            entry.meta.autocast or entry.dtype for each in trace.ranks for entry in each.entries
            if entry.kind is Kind.ACTIVATION and entry.slot.startswith("out")
        }  # fmt: skip
        return Tags(
            model=next((entry.meta.module for entry in called if entry.meta.module), None),
            world_size=manifest.world_size if manifest else len(trace.ranks),
            meshes=tuple(
                "×".join(f"{axis} {size}" for axis, size in zip(mesh.axes, mesh.shape, strict=True))
                for mesh in (manifest.meshes.values() if manifest else ())
            ),
            dtypes=tuple(sorted(computed)),
            inputs=tuple(
                f"{e.slot} {'×'.join(map(str, e.local_shape)) or 'scalar'} {e.dtype}" for e in first
            ),
            steps=len({e.step for e in rank.entries if e.step >= 0}) if rank else 0,
            device=manifest.device if manifest else None,
            host=manifest.host if manifest else None,
            versions={name: versions[name] for name in _SHOWN if name in versions},
        )
