"""Index lines and manifests: what is written is read, and what cannot be true is refused by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from tensortrace.tracer.errors import DamagedTrace, TraceError, UnsupportedFormat
from tensortrace.tracer.manifest import (
    decode_entry,
    encode_entry,
    finish_manifest,
    read_manifest,
    read_rank_manifest,
    write_manifest_new,
)
from tensortrace.tracer.manifest_safetensors import tensor_name
from tensortrace.tracer.types import (
    Blob,
    Box,
    Entry,
    Kind,
    Manifest,
    Mesh,
    Meta,
    Placement,
    RankManifest,
    Shard,
    Sketch,
    Stats,
)


def an_entry(**fields: Any) -> Entry:
    base: dict[str, Any] = {"event": 9, "step": 3, "microbatch": None, "kind": Kind.PARAM, "name": "h.0.w"}
    base |= {"slot": "model", "dtype": "float32", "local_shape": (2, 3), "digest": "0" * 32}
    base |= {"blob": Blob(0, 4096, 40, 24, "raw")}
    return Entry(**(base | fields))


def line_of(text: bytes) -> bytes:
    return text + b"\t" + xxhash.xxh3_64_hexdigest(text).encode() + b"\n"


def altered(**fields: object) -> bytes:
    """Return a line with a right checksum whose JSON has other fields."""
    found = msgspec.to_builtins(an_entry()) | fields
    return line_of(msgspec.json.encode(found))


FULL = an_entry(
    microbatch=0,
    call=2,
    recompute=True,
    shard=Shard(
        mesh="dp_tp",
        coordinate=(0, 1),
        placements=(Placement("replicate"), Placement("strided_shard", dim=0, split_factor=2)),
        global_shape=(4, 3),
        boxes=(Box((0, 0), (1, 3)), Box((2, 0), (1, 3))),
        padding=(0, 0),
    ),
    producers=(1, 7),
    meta=Meta(training=True, source="train.py:12", members=("a", "b"), total=True),
    stats=Stats(6, minimum=-1.0, maximum=2.0, mean=0.5, l2=3.25),
    sketch=Sketch("AAAAAAAAAAAAAAAAAAAAAA==", size=(2, 2)),
)


@pytest.mark.parametrize("entry", [an_entry(), FULL, an_entry(blob=None, same_as=4, shard_ref=2)])
def test_an_entry_comes_back_from_its_line(entry: Entry) -> None:
    assert decode_entry(encode_entry(entry), where="index.jsonl") == entry


def test_a_line_is_json_tab_checksum_newline() -> None:
    text, _, rest = encode_entry(an_entry()).partition(b"\t")
    assert msgspec.json.decode(text)["local_shape"] == [2, 3]
    assert rest == xxhash.xxh3_64_hexdigest(text).encode() + b"\n"


def test_every_flipped_bit_and_every_cut_of_a_line_is_refused() -> None:
    line = encode_entry(an_entry())
    for bit in range(8 * len(line)):
        flipped = bytearray(line)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedTrace, match="here"):
            decode_entry(bytes(flipped), where="here")
    for size in range(len(line)):
        with pytest.raises(DamagedTrace):
            decode_entry(line[:size], where="here")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"event": -1}, "event"),
        ({"event": 1 << 60}, "event"),
        ({"event": "9"}, "event"),
        ({"step": -2}, "step"),
        ({"microbatch": -1}, "microbatch"),
        ({"call": -1}, "call"),
        ({"kind": "gradient"}, "kind"),
        ({"name": ""}, "name"),
        ({"name": "x" * 5000}, "name"),
        ({"name": "a\x1b[2J"}, "name"),
        ({"slot": "a\nb"}, "slot"),
        ({"dtype": "float7"}, "dtype"),
        ({"local_shape": [2, -3]}, "local_shape"),
        ({"local_shape": [1] * 70}, "local_shape"),
        ({"local_shape": [1 << 40, 1 << 40]}, "local_shape"),
        ({"local_shape": [2, 4]}, "raw_length"),
        ({"local_shape": [2.0, 3]}, "local_shape"),
        ({"digest": "xyz"}, "digest"),
        ({"digest": "0" * 31 + "G"}, "digest"),
        ({"producers": [9]}, "producers"),
        ({"producers": [-1]}, "producers"),
        ({"same_as": 3}, "same_as"),
        ({"blob": None, "same_as": 9}, "same_as"),
        ({"blob": None, "same_as": -1}, "same_as"),
        ({"shard_ref": -1}, "shard_ref"),
        (
            {"blob": {"segment": "../../x", "offset": 0, "length": 9, "raw_length": 24, "codec": "raw"}},
            "segment",
        ),
        ({"blob": {"segment": -1, "offset": 0, "length": 9, "raw_length": 24, "codec": "raw"}}, "segment"),
        ({"blob": {"segment": 0, "offset": -1, "length": 9, "raw_length": 24, "codec": "raw"}}, "offset"),
        ({"blob": {"segment": 0, "offset": 0, "length": 9, "raw_length": 24, "codec": "pickle"}}, "codec"),
        ({"blob": {"segment": 0, "offset": 0, "length": 9, "raw_length": 25, "codec": "raw"}}, "raw_length"),
        ({"shard": {"mesh": "m", "coordinate": [0, 1], "placements": []}}, "coordinate"),
        ({"note": 1}, "note"),
        ({"meta": {"note": 1}}, "note"),
    ],
)
def test_a_value_that_cannot_be_true_is_refused_by_field(fields: dict[str, object], named: str) -> None:
    with pytest.raises(DamagedTrace, match=named) as caught:
        decode_entry(altered(**fields), where="rank00000/index.jsonl: offset 77")
    assert "rank00000/index.jsonl: offset 77" in str(caught.value)


@pytest.mark.parametrize(
    "text", [b'{"event":1,"event":2}', b'{"event":NaN}', b'{"event":1e999}', b"[]", b"", b"{"]
)
def test_json_that_readers_could_take_differently_is_refused(text: bytes) -> None:
    with pytest.raises(DamagedTrace):
        decode_entry(line_of(text), where="here")


def test_a_duplicate_key_is_named_though_everything_else_is_right() -> None:
    text = encode_entry(an_entry()).partition(b"\t")[0]
    with pytest.raises(DamagedTrace, match="'event' occurs twice"):
        decode_entry(line_of(text[:-1] + b',"event":9}'), where="here")


def test_deep_nesting_is_one_error() -> None:
    with pytest.raises(DamagedTrace):
        decode_entry(line_of(b'{"meta":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), where="here")


def test_unknown_keys_are_read_over_where_the_manifest_lists_them() -> None:
    line = altered(note=1, meta={"flavour": "x", "total": True})
    assert decode_entry(line, where="here", ignorable=("note", "meta.flavour")) == an_entry(
        meta=Meta(total=True)
    )
    with pytest.raises(DamagedTrace, match="flavour"):
        decode_entry(line, where="here", ignorable=("note",))


def test_a_known_key_cannot_be_made_ignorable() -> None:
    with pytest.raises(DamagedTrace, match="event"):
        decode_entry(altered(event=-1), where="here", ignorable=("event",))


def test_whitespace_and_key_order_of_another_writer_are_read() -> None:
    found = dict(reversed(msgspec.to_builtins(an_entry()).items()))
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).replace(b"\n", b" ")
    assert decode_entry(line_of(text), where="here") == an_entry()


@pytest.mark.parametrize("fields", [{"name": "a\tb"}, {"name": ""}, {"name": "\ud800"}, {"producers": (9,)}])
def test_the_writer_refuses_what_no_reader_would_accept(fields: dict[str, Any]) -> None:
    with pytest.raises(TraceError, match="event 9 cannot be written"):
        encode_entry(an_entry(**fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "3/-/param/h.0.w/model/0"),
        ({"step": -1, "microbatch": 2, "call": 4}, "init/2/param/h.0.w/model/4"),
        ({"recompute": True}, "3/-/param/h.0.w/model/0+recompute"),
        ({"name": "../a%2Fb", "slot": "in.kw.x/y"}, "3/-/param/..%2Fa%252Fb/in.kw.x%2Fy/0"),
    ],
)
def test_a_tensors_name_can_be_split_again(fields: dict[str, Any], expected: str) -> None:
    assert tensor_name(an_entry(**fields)) == expected


RANK = RankManifest(
    format=1, rank=1, world_size=2, meshes={"ddp": Mesh(("dp",), (2,), (0, 1))}, ended="finished"
)
RUN = Manifest(format=1, run_id="r", command=("python", "train.py"), started_at=1.5)


def test_manifests_come_back(tmp_path: Path) -> None:
    write_manifest_new(tmp_path / "trace.json", RUN)
    finished = msgspec.structs.replace(RUN, exit_code=0, ended_at=2.5, ranks=("rank00000",))
    assert read_manifest(tmp_path / "trace.json") == RUN
    finish_manifest(tmp_path / "trace.json", finished)
    assert read_manifest(tmp_path / "trace.json") == finished
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_is_never_written_over(tmp_path: Path) -> None:
    write_manifest_new(tmp_path / "trace.json", RUN)
    with pytest.raises(FileExistsError):
        write_manifest_new(tmp_path / "trace.json", RUN)


def rank_json(path: Path, **fields: object) -> Path:
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(RANK) | fields))
    return path


def test_a_newer_format_is_refused_before_its_other_keys_are_looked_at(tmp_path: Path) -> None:
    path = rank_json(tmp_path / "rank.json", format=5, anything={"new": 1})
    with pytest.raises(UnsupportedFormat, match=r"found format 5, expected at most 4; read it with a newer"):
        read_rank_manifest(path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"window": {"first": -2}}, "window.first"),
        ({"window": {"notes": ["a\nb"]}}, "window.notes"),
        ({"window": {"triggered": {"trigger": "x", "step": -2, "at": 0}}}, "window.triggered.step"),
        ({"window": {"triggered": {"trigger": "\x1b[2J", "step": 1, "at": 0}}}, "window.triggered.trigger"),
        ({"window": {"triggered": {"trigger": "x", "step": 1, "at": -1}}}, "window.triggered.at"),
        ({"format": "1"}, "format"),
        ({"format": True}, "format"),
        ({"format": 0}, "format"),
        ({"rank": 2}, "rank"),
        ({"rank": -1}, "rank"),
        ({"world_size": 1 << 40}, "world_size"),
        ({"meshes": {"m": {"axes": ["a"], "shape": [3], "ranks": [0]}}}, "meshes.m"),
        ({"meshes": {"m": {"axes": ["a"], "shape": [], "ranks": [0]}}}, "meshes.m"),
        ({"novel": 1}, "novel"),
        ({"drops": {"count": -1}}, "drops.count"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused_by_field(
    tmp_path: Path, fields: dict[str, object], named: str
) -> None:
    with pytest.raises(DamagedTrace, match=named) as caught:
        read_rank_manifest(rank_json(tmp_path / "rank.json", **fields))
    assert "rank.json" in str(caught.value)


def test_an_ignorable_key_of_a_manifest_is_read_over(tmp_path: Path) -> None:
    path = rank_json(tmp_path / "rank.json", novel=1, ignorable=["novel"])
    assert read_rank_manifest(path).ignorable == ("novel",)


def test_a_huge_manifest_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(DamagedTrace, match="1099511627776 bytes"):
        read_manifest(path)
