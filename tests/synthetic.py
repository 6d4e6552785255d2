"""Make small traces from numpy arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tensortrace.tracer import layout
from tensortrace.tracer.codec import Compress
from tensortrace.tracer.codec_dtypes import dtype_of
from tensortrace.tracer.manifest import finish_manifest, write_manifest_new
from tensortrace.tracer.types import Boundary, Kind, Manifest, Mesh, Promise, RankManifest
from tensortrace.tracer.writer import RankWriter

Tensor = tuple[Mapping[str, Any], Any]


def boundary_of(event: int, array: np.ndarray, **fields: Any) -> Boundary:
    """Return a boundary for an array; what isn't given is step 0, microbatch 0, activation ``m``/``out``."""
    base: dict[str, Any] = {"event": event, "step": 0, "microbatch": 0, "kind": Kind.ACTIVATION, "name": "m"}
    base |= {"slot": "out", "dtype": array.dtype.name, "local_shape": array.shape}
    return Boundary(**(base | fields))


def logical_bytes(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return the bytes of an array stored as ``dtype``; float32 is rounded to bfloat16 where asked.

    Otherwise the array must have the dtype's storage form (raw codes for 8-bit floats).
    """
    if dtype == "bfloat16" and array.dtype.name == "float32":
        bits = np.ascontiguousarray(array).reshape(-1).view("<u4").astype("<u8")
        array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    stored = np.ascontiguousarray(array).reshape(-1)
    assert stored.itemsize == dtype_of(dtype).itemsize, f"{array.dtype} is no storage form of {dtype}"
    return stored.astype(stored.dtype.newbyteorder("<")).view(np.uint8)


def write_trace(
    root: Path,
    ranks: Iterable[Iterable[Tensor]],
    *,
    meshes: Mapping[str, Mesh] | None = None,
    ended: str | None = "finished",
    finish: bool = True,
    exit_code: int = 0,
    command: tuple[str, ...] = ("test",),
    compress: Compress = "auto",
    **rank_fields: Any,
) -> Path:
    """Write a trace whose rank r holds ``ranks[r]``, pairs of Boundary fields and array; return ``root``.

    Events count from 0. ``rank_fields`` go into every ``rank.json`` (``absent={...}``). With ``finish``
    False the segments and indexes stay ``.part`` and there is no ``rank.json``, as after ``kill -9``.
    """
    all_ranks = [list(rank) for rank in ranks]
    root.mkdir(parents=True, exist_ok=True)
    promise: Promise = rank_fields.get("promise", Promise())
    version = layout.version_of(promise)
    manifest = Manifest(format=version, run_id="synthetic", command=command, started_at=0.0, promise=promise)
    write_manifest_new(root / layout.MANIFEST, manifest)
    for rank, tensors in enumerate(all_ranks):
        writer = RankWriter(root, rank, promise=promise, compress=compress)
        steps = len({fields.get("step", 0) for fields, _ in tensors} - {-1})
        own = {"format": version, "rank": rank, "world_size": len(all_ranks), "meshes": dict(meshes or {})}
        if finish:  # sketches need the meshes first
            writer.write_manifest(RankManifest(**(own | rank_fields)))
        for event, (fields, array) in enumerate(tensors):
            array = np.asarray(array)
            boundary = boundary_of(event, array, **fields)
            writer.append(boundary, logical_bytes(array, boundary.dtype))
        if finish:
            own |= {"steps": steps, "ended": ended}
            writer.write_manifest(RankManifest(**(own | rank_fields)))
            writer.close()
    if finish:
        folders = tuple(layout.rank_folder(root, rank).name for rank in range(len(all_ranks)))
        fields = {"ranks": folders, "exit_code": exit_code, "ended_at": 1.0}
        finish_manifest(root / layout.MANIFEST, _with(manifest, fields))
    return root


def _with(manifest: Manifest, fields: Mapping[str, Any]) -> Manifest:
    own = {name: getattr(manifest, name) for name in Manifest.__struct_fields__}
    return Manifest(**(own | dict(fields)))
