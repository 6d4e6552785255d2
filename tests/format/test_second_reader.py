"""A second reader, written from docs/format.md alone, reads the golden trace."""

from __future__ import annotations

import base64
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


def mixed(number: int) -> int:
    """Section 8: one output of splitmix64."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def sign(dim: int, index: int, bit: int) -> int:
    return 1 - 2 * (mixed((mixed(mixed(0) ^ dim) + index * 0x9E3779B97F4A7C15) % 2**64) >> bit & 1)


def sketch_of(elements: dict[tuple[int, ...], float]) -> np.ndarray:
    """Section 8: the sum over elements under their logical indices."""
    last = max(len(index) for index in elements) - 1
    words: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place in {place for index in elements for place in enumerate(index)}:
        words[place] = [(sign(*place, t), sign(*place, 32 + t)) for t in range(16)]
    total = np.zeros((16, 16))
    for index, value in elements.items():
        rows = np.prod([[r for r, _ in words[place]] for place in enumerate(index[:last])], axis=0)
        total += value * np.outer(rows, [c for _, c in words[last, index[last]]])
    return total


def numbers(line: dict) -> np.ndarray:
    sketch = line["sketch"]
    dtype = {"float32": "<f4", "float64": "<f8"}[sketch.get("dtype", "float32")]
    return np.frombuffer(base64.b64decode(sketch["values"]), dtype).reshape(sketch.get("size", [16, 16]))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_page_is_enough_to_make_every_sketch(rank: int) -> None:
    folder = GOLDEN.parent / "v3" / "levels" / f"rank0000{rank}"
    lines = [json.loads(line.split(b"\t")[0]) for line in (folder / "index.jsonl").read_bytes().splitlines()]
    weight, flat, bias, tokens, made, flattened, rounded, alike, grad = lines
    columns = range(17 * rank, 17 + 16 * rank)
    values = {(i, j): float(np.float32(np.cos(33 * i + j))) for i in range(21) for j in columns}
    np.testing.assert_allclose(numbers(weight), sketch_of(values), rtol=2**-24, atol=1e-12)
    values = {divmod(300 * rank + i, 23): i / 8 for i in range(300 + 67 * rank)}
    np.testing.assert_allclose(numbers(flat), sketch_of(values), rtol=1e-14, atol=1e-9)
    values = {divmod(i, 64): float(i) for i in range(300) if i != 7}
    np.testing.assert_allclose(numbers(bias), sketch_of(values), rtol=2**-24, atol=1e-12)
    assert "blob" in tokens
    rows = [xxhash.xxh3_64(np.arange(3 * i, 3 * i + 3).astype("<i8")).intdigest() for i in range(7)]
    sines = np.sin(np.arange(7 * 3 * 16, dtype="f4")).reshape(7, 3, 16)
    values = {(rows[i], *place): float(x) for (i, *place), x in np.ndenumerate(sines)}
    np.testing.assert_allclose(numbers(made), sketch_of(values), rtol=2**-24, atol=1e-12)
    np.testing.assert_allclose(numbers(flattened), 2 * sketch_of(values), rtol=2**-24, atol=1e-12)
    assert (made["sketch"]["rows"], flattened["sketch"]["positions"]) == (0, 3)
    assert np.linalg.norm(numbers(rounded) - sketch_of(values)) < 2**-8 * np.linalg.norm(numbers(rounded))
    assert (alike["sketch_ref"], alike["digest"]) == (made["event"], made["digest"])
    assert not {"sketch", "sketch_ref", "blob", "same_as"} & set(grad)
