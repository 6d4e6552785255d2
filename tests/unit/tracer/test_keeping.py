"""What is kept of a tensor is the same whether it is made where the tensor lies or of a copy, later."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tensortrace.tracer import layout
from tensortrace.tracer.codec_values import digest
from tensortrace.tracer.reader import Trace
from tensortrace.tracer.staging import Stage
from tensortrace.tracer.types import Boundary, Entry, Kind, Promise
from tensortrace.tracer.writer import RankWriter
from tests.synthetic import boundary_of, write_trace

ROWS, POSITIONS, WIDTH = 3, 5, 70


def tensors() -> Iterator[tuple[torch.Tensor, dict[str, object]]]:
    """Two steps of a program whose activations follow samples, in some order."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(WIDTH, 40, generator=generator)
    for step in (0, 1):
        tokens = torch.randint(100, (ROWS, POSITIONS), generator=generator)
        x = torch.randn(ROWS, POSITIONS, WIDTH, generator=generator)
        yield tokens, {"step": step, "kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}
        for name, value in (("a", x), ("b", x), ("c", x.transpose(0, 1)), ("d", x.flatten(0, 1))):
            yield value, {"step": step, "name": name}
        yield x[..., 0].contiguous(), {"step": step, "name": "small"}
        yield x * float("inf"), {"step": step, "name": "nothing finite"}
        for name in ("mask", "mask again"):
            yield torch.full((WIDTH, WIDTH), -float("inf")).triu(1), {"step": step, "name": name}
        for kind in (Kind.LOCAL_GRAD, Kind.REDUCED_GRAD, Kind.PARAM):
            yield weight, {"step": step, "kind": kind, "name": "w", "slot": kind.value}
        weight = weight + 1


def boundaries() -> Iterator[tuple[torch.Tensor, Boundary]]:
    for event, (tensor, fields) in enumerate(tensors()):
        yield tensor, boundary_of(event, tensor.numpy(), **fields)


def lines(folder: Path) -> list[Entry]:
    (rank,) = Trace.open(folder).ranks
    return [msgspec.structs.replace(entry, blob=None) for entry in rank.entries]


@pytest.mark.parametrize("level", ["sketch", "sketch:4x8", "stats"])
def test_what_is_kept_of_a_tensor_is_what_a_copy_of_it_gives(tmp_path: Path, level: str) -> None:
    promise = Promise(level=level)
    early, late = tmp_path / "early", tmp_path / "late"
    for folder in (early, late):
        write_trace(folder, [], promise=promise)
    errors: list[BaseException] = []
    with RankWriter(early, 0, promise=promise) as writer:
        stage = Stage(writer, capacity=1 << 16, pressure="block", on_error=errors.append, on_end=lambda: None)
        for tensor, boundary in boundaries():
            taken = stage.take(tensor, boundary)
            assert taken is not None
            stage.queue(boundary, taken)
        assert stage.close()
    assert errors == []
    with RankWriter(late, 0, promise=promise) as writer:
        for tensor, boundary in boundaries():
            writer.append(boundary, tensor.contiguous().numpy())
    assert lines(early) == lines(late)
    kept = {entry.name: entry for entry in lines(early) if entry.step == 1}
    if level != "stats":
        sketch = kept["a"].sketch
        assert sketch is not None
        assert sketch.rows == 0, "it goes by samples"
        assert kept["b"].sketch == sketch
        index = (early / layout.rank_folder(early, 0).name / layout.INDEX).read_text()
        assert index.count(f'"sketch_ref":{kept["a"].event}') == 1, "b's line refers to a's"
        turned, flat = kept["c"].sketch, kept["d"].sketch
        assert (turned and turned.rows, flat and flat.positions) == (1, POSITIONS)
    assert kept["small"].sketch is None


def test_a_repeat_of_what_can_have_no_sketch_refers_to_its_bytes(tmp_path: Path) -> None:
    promise = Promise(level="sketch")
    write_trace(tmp_path / "a", [], promise=promise)
    huge = np.full((WIDTH, WIDTH), 1e308)  # sums of its elements are beyond float64
    content = digest("float64", huge.shape, huge.view("u1").reshape(-1))
    with RankWriter(tmp_path / "a", 0, promise=promise) as writer:
        first, again = (boundary_of(event, huge, name=f"m{event}") for event in (0, 1))
        assert writer.append(first, huge).blob is not None
        held = writer.keeping.held(again)
        assert held.startswith("sketch "), "its place is one that sketches are made at"
        entry = writer.append_known(again, content, None, held=held)
    assert (entry.same_as, entry.sketch, entry.sketch_ref) == (0, None, None)
