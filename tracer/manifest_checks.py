"""What a decoded record must satisfy before anything is done with its numbers and names."""

from __future__ import annotations

import binascii
import math
import re
from functools import lru_cache

from tensortrace.tracer.codec_dtypes import DTYPES, size_bytes
from tensortrace.tracer.types import (
    Blob,
    Entry,
    Manifest,
    Mesh,
    Module,
    Promise,
    RankManifest,
    Shard,
    Sketch,
    Window,
)  # fmt: skip

MAX_NAME = 4096
"""Characters in a name or slot."""

MAX_DIMS = 63
"""Dimensions of a tensor; one less than numpy's, since byte planes add one."""

MAX_NUMBER = 1 << 48
"""Events, steps, calls, dimensions, offsets and byte counts stay below this."""

MAX_RANK = 10_000_000
MAX_SEGMENTS = 1_000_000_000
MAX_AXES = 32
MAX_SKETCH = 32
_MAX_WORD = 64

_HEX = frozenset("0123456789abcdef")


LEVEL = re.compile(r"full|stats|sketch(?::([0-9]{1,2})x([0-9]{1,2}))?")
"""How much is kept, in ``Promise`` and on the command line; a sketch has a size."""


class BadField(Exception):
    """A field whose value no trace can have; the message names it."""


def check_entry(entry: Entry) -> None:
    """Raise BadField, naming the field, unless an index line can be true of some trace."""
    _number("event", entry.event)
    _number("step", entry.step, least=-1)
    _number("microbatch", entry.microbatch or 0)
    _number("call", entry.call)
    _check_named(entry.name, entry.slot, entry.dtype, entry.local_shape)
    _require(len(entry.digest) == 32 and _HEX.issuperset(entry.digest), "digest", entry.digest)
    for producer in entry.producers:
        _require(0 <= producer < entry.event, "producers", producer)
    _check_references(entry)
    if entry.blob is not None:
        _check_blob(entry.blob, entry)
    if entry.shard is not None:
        check_shard(entry.shard)
    if entry.sketch is not None:
        _check_sketch(entry.sketch, entry)


@lru_cache(maxsize=4096)
def _check_named(name: str, slot: str, dtype: str, local_shape: tuple[int, ...]) -> None:
    """Check what is the same in every step."""
    _text("name", name)
    _text("slot", slot)
    _require(dtype in DTYPES, "dtype", dtype)
    _shape("local_shape", local_shape)


def _check_references(entry: Entry) -> None:
    for name in ("same_as", "shard_ref", "sketch_ref"):
        if (event := getattr(entry, name)) is not None:
            _number(name, event)
            _require(event != entry.event, name, event)
    _require(entry.blob is None or entry.same_as is None, "same_as", "beside a blob")
    _require(entry.shard is None or entry.shard_ref is None, "shard_ref", "beside a shard")
    _require(entry.sketch is None or entry.sketch_ref is None, "sketch_ref", "beside a sketch")


def _check_blob(blob: Blob, entry: Entry) -> None:
    _number("blob.segment", blob.segment, below=MAX_SEGMENTS)
    _number("blob.offset", blob.offset)
    _number("blob.length", blob.length)
    size = size_bytes(entry.dtype, entry.local_shape)
    if blob.codec == "raw" and DTYPES[entry.dtype].safetensors is None:
        raise BadField(f"blob.codec is raw, but {entry.dtype} is always held as planes")
    if blob.raw_length != size:
        raise BadField(f"blob.raw_length is {blob.raw_length}, but dtype and shape make {size} bytes")


def _check_sketch(sketch: Sketch, entry: Entry) -> None:
    for number in sketch.size:
        _number("sketch.size", number, least=1, below=MAX_SKETCH + 1)
    size = math.prod(sketch.size) * (8 if sketch.dtype == "float64" else 4)
    try:
        found = len(binascii.a2b_base64(sketch.values.encode("ascii"), strict_mode=True))
    except ValueError as error:
        raise BadField(f"sketch.values are not base64: {error}") from error
    _require(found == size, "sketch.values", f"{found} bytes, not {size}")
    dims = entry.local_shape
    _require(sketch.rows is None or 0 <= sketch.rows < len(dims), "sketch.rows", sketch.rows)
    if sketch.positions is not None:
        _require(sketch.rows is not None and sketch.positions > 0, "sketch.positions", sketch.positions)


def check_shard(shard: Shard) -> None:
    """Raise BadField unless the numbers of a shard are consistent with each other."""
    axes = len(shard.placements)
    _text("shard.mesh", shard.mesh)
    _require(axes <= MAX_AXES, "shard.placements", axes)
    _require(len(shard.coordinate) == axes, "shard.coordinate", shard.coordinate)
    for index in shard.coordinate:
        _number("shard.coordinate", index, below=MAX_RANK)
    _shape("shard.global_shape", shard.global_shape or ())
    _shape("shard.padding", shard.padding)
    for placement in shard.placements:
        _number("shard.placements.dim", placement.dim or 0, below=MAX_DIMS)
        _number("shard.placements.split_factor", placement.split_factor or 0)
        _require(len(placement.op or "") <= _MAX_WORD, "shard.placements.op", "too long")
    for box in shard.boxes:
        _shape("shard.boxes.offset", box.offset)
        _shape("shard.boxes.shape", box.shape)
        _require(len(box.offset) == len(box.shape), "shard.boxes", "offset and shape differ in length")


def check_rank_manifest(manifest: RankManifest) -> None:
    """Raise BadField unless ``rank.json`` can be true of some rank."""
    _number("rank", manifest.rank, below=MAX_RANK)
    _number("world_size", manifest.world_size, least=1, below=MAX_RANK)
    _require(manifest.rank < manifest.world_size, "rank", f"{manifest.rank} of {manifest.world_size}")
    for name, number in (
        ("attempt", manifest.attempt),
        ("steps", manifest.steps),
        ("boundaries", manifest.boundaries),
        ("drops.count", manifest.drops.count),
        ("drops.size_bytes", manifest.drops.size_bytes),
    ):
        _number(name, number)
    _check_promise(manifest.promise)
    for key, mesh in manifest.meshes.items():
        _check_mesh(f"meshes.{key[:_MAX_WORD]}", mesh)
    for module in manifest.modules:
        _check_module(module)
    if manifest.window is not None:
        _check_window(manifest.window)


def _check_module(module: Module) -> None:
    for name in (module.kind, *module.names):
        _text("modules.names", name)
    _text("modules.odd", module.odd or "-")
    for key, value in module.settings.items():
        _text("modules.settings", key)
        if isinstance(value, str):
            _text("modules.settings", value or "-")
        for number in value if isinstance(value, tuple) else (value,):
            _require(abs(number) < MAX_NUMBER if isinstance(number, int) else True, "modules.settings", key)


def _check_window(window: Window) -> None:
    _number("window.first", window.first, least=-1)
    _number("window.last", window.last or 0, least=-1)
    for note in window.notes:
        _text("window.notes", note)
    if (found := window.triggered) is not None:
        for field in ("trigger", "name", "slot", "text"):
            _text(f"window.triggered.{field}", getattr(found, field) or "-")
        _number("window.triggered.step", found.step, least=-1)
        _number("window.triggered.event", found.event or 0)
        _number("window.triggered.microbatch", found.microbatch or 0)
        _require(0 <= found.at < MAX_NUMBER, "window.triggered.at", found.at)


def check_manifest(manifest: Manifest) -> None:
    """Raise BadField unless ``trace.json`` can be true of some run."""
    _text("run_id", manifest.run_id)
    _check_promise(manifest.promise)


def _check_promise(promise: Promise) -> None:
    for level in (promise.level, *(rule.level for rule in promise.levels)):
        match = LEVEL.fullmatch(level)
        sizes = [int(number) for number in match.groups() if number] if match else [0]
        _require(all(0 < number <= MAX_SKETCH for number in sizes), "promise.level", level)


def _check_mesh(where: str, mesh: Mesh) -> None:
    _require(len(mesh.axes) == len(mesh.shape) <= MAX_AXES, f"{where}.shape", mesh.shape)
    _require(math.prod(mesh.shape) == len(mesh.ranks), f"{where}.ranks", len(mesh.ranks))
    for size in mesh.shape:
        _number(f"{where}.shape", size, least=1, below=MAX_RANK)
    for rank in mesh.ranks:
        _number(f"{where}.ranks", rank, below=MAX_RANK)


def _shape(field: str, shape: tuple[int, ...]) -> None:
    _require(len(shape) <= MAX_DIMS, field, f"{len(shape)} dimensions")
    for size in shape:
        _number(field, size)
    _require(math.prod(shape) < MAX_NUMBER, field, shape)


def _number(field: str, number: int, *, least: int = 0, below: int = MAX_NUMBER) -> None:
    if not least <= number < below:
        raise BadField(f"{field} is {number}, not in [{least}, {below})")


def _text(field: str, text: str) -> None:
    if not 0 < len(text) <= MAX_NAME:
        raise BadField(f"{field} has {len(text)} characters, not 1 to {MAX_NAME}")
    if not text.isprintable():
        raise BadField(f"{field} holds unprintable characters")


def _require(holds: bool, field: str, found: object) -> None:
    if not holds:
        raise BadField(f"{field} is {str(found)[:80]}")
