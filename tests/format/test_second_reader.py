"""A second reader, written from docs/format.md alone, reads the golden trace."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard

from tensortrace.tracer.reader import Trace

GOLDEN = Path(__file__).parent / "golden" / "v1"
ITEMSIZE = {"bool": 1, "complex32": 4, "complex64": 8, "complex128": 16, "bfloat16": 2}


def itemsize(dtype: str) -> int:
    """Return the bytes of an element: what the name's number of bits says, or the table."""
    digits = dtype.split("_")[0].lstrip("abcdefghijklmnopqrstuvwxyz")
    return ITEMSIZE.get(dtype) or int(digits) // 8


def logical_bytes(folder: Path, line: dict) -> bytes:
    """Decompress a blob with nothing but Zstandard and undo its planes."""
    blob = line["blob"]
    sealed = folder / f"seg{blob['segment']:06d}.safetensors.zst"
    path = sealed if sealed.exists() else sealed.with_name(sealed.name + ".part")
    frames = io.BytesIO(path.read_bytes()[blob["offset"] :][: blob["length"]])
    raw = zstandard.ZstdDecompressor().stream_reader(frames, read_across_frames=True).read()
    assert len(raw) == blob["raw_length"] == itemsize(line["dtype"]) * math.prod(line["local_shape"])
    if blob["codec"] == "raw":
        return raw
    planes = np.frombuffer(raw, "u1").reshape(itemsize(line["dtype"]), -1)
    return np.moveaxis(planes, 0, -1).tobytes()


@pytest.mark.parametrize("folder", ["finished/rank00000", "finished/rank00001", "killed/rank00000"])
def test_the_page_is_enough_to_read_every_tensor(folder: str) -> None:
    index = next((GOLDEN / folder).glob("index.jsonl*"))
    lines, read = {}, {}
    for whole in index.read_bytes().split(b"\n")[:-1]:
        text, checksum = whole.split(b"\t")
        assert checksum.decode() == xxhash.xxh3_64(text).hexdigest()
        line = json.loads(text)
        lines[line["event"]] = line
        holder = lines[line["same_as"]] if "same_as" in line else line
        data = read[line["event"]] = logical_bytes(GOLDEN / folder, holder)
        head = f"{line['dtype']}[{','.join(map(str, line['local_shape']))}]\0".encode()
        assert xxhash.xxh3_128(head + data).hexdigest() == line["digest"]
    ours = next(
        rank for rank in Trace.open((GOLDEN / folder).parent).ranks if rank.folder.name == index.parent.name
    )
    assert {entry.event: ours.read_bytes(entry).tobytes() for entry in ours.entries} == read
