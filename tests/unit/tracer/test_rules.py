"""Layout files put every local tensor where the unpartitioned program has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensortrace.tracer.rules import RunLayout
from tensortrace.tracer.rules.document import LayoutFileError
from tensortrace.tracer.types import Kind, Shard

TP2 = "format = 1\n[axes]\ntp = 2\n"


def layout_of(folder: Path, text: str) -> RunLayout:
    path = folder / "layout.toml"
    path.write_text(text)
    return RunLayout.load(path)


def rule(name: str, dims: str, more: str = "") -> str:
    return f'[[rule]]\nname = "{name}"\ndims = "{dims}"\n{more}\n'


def gather(
    layout: RunLayout, locals_: list[np.ndarray], kind: Kind = Kind.PARAM, name: str = "w"
) -> dict[str, np.ndarray]:
    """Put all ranks' parts where the layout says; what no rank holds stays -1."""
    found: dict[str, np.ndarray] = {}
    for rank, value in enumerate(locals_):
        for view in layout.views(kind, "model", name, rank, value.shape):
            part = view.take(value)
            assert part.shape == view.local_shape
            assert view.whole == np.array_equal(part, value) or part.size == 0
            assert view.shard.global_shape is not None
            whole = found.setdefault(view.name, np.full(view.shard.global_shape, -1.0))
            whole[np.ix_(*positions(view.shard))] = part
    return found


def positions(shard: Shard) -> list[list[int]]:
    """Return the global positions per dimension: boxes are the product of runs per dimension."""
    assert shard.global_shape is not None
    if not shard.boxes:
        return [list(range(n)) for n in shard.global_shape]
    runs = [
        dict.fromkeys((b.offset[d], b.shape[d]) for b in shard.boxes) for d in range(len(shard.global_shape))
    ]
    return [[start + i for start, length in dim for i in range(length)] for dim in runs]


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape)


def test_a_column_split_is_contiguous_blocks(tmp_path: Path) -> None:
    w = numbered(6, 4)
    layout = layout_of(tmp_path, TP2 + rule("w", "o[tp] i"))
    assert np.array_equal(gather(layout, [w[:3], w[3:]])["w"], w)


def test_a_row_split_is_along_the_second_dimension(tmp_path: Path) -> None:
    w = numbered(6, 4)
    layout = layout_of(tmp_path, TP2 + rule("w", "o i[tp]"))
    assert np.array_equal(gather(layout, [w[:, :2], w[:, 2:]])["w"], w)
    shard = layout.shard(Kind.PARAM, "model", "w", 1, (6, 2))
    assert shard is not None
    assert shard.boxes[0].offset == (0, 2)


def test_blocks_are_each_split_over_the_axis(tmp_path: Path) -> None:
    q, k, v = numbered(8, 3), 100 + numbered(4, 3), 200 + numbered(4, 3)
    sizes = "sizes = { q = 8, k = 4, v = 4 }"
    layout = layout_of(tmp_path, TP2 + rule("w", "(q|k|v)[tp] i", sizes))
    ranks = [np.concatenate([q[4 * r :][:4], k[2 * r :][:2], v[2 * r :][:2]]) for r in range(2)]
    assert np.array_equal(gather(layout, ranks)["w"], np.concatenate([q, k, v]))


def test_of_blocks_that_every_rank_has_beside_split_ones_the_first_ranks_count(tmp_path: Path) -> None:
    q, k = numbered(4, 3), 100 + numbered(2, 3)
    layout = layout_of(tmp_path, TP2 + rule("w", "(q[tp]|k) i", "sizes = { q = 4 }"))
    ranks = [np.concatenate([q[:2], k]), np.concatenate([q[2:], k])]
    assert np.array_equal(gather(layout, ranks)["w"], np.concatenate([q, k]))
    [view] = layout.views(Kind.PARAM, "model", "w", 1, (4, 3))
    assert view.local_shape == (2, 3)
    shared = [layout.views(Kind.PARAM, "model", "w", r, (4, 3), copies="shared") for r in (0, 1)]
    for [view], value in zip(shared, ranks, strict=True):
        assert np.array_equal(view.take(value), k)
        assert positions(view.shard) == [[4, 5], [0, 1, 2]]


def test_blocks_that_are_sums_beside_split_ones_are_added(tmp_path: Path) -> None:
    q, k = numbered(4, 3), 100 + numbered(2, 3)
    layout = layout_of(tmp_path, TP2 + rule("w", "(q[tp]|k) i partial:tp", "sizes = { q = 4 }"))
    ranks = [np.concatenate([q[:2], k * 0.25]), np.concatenate([q[2:], k * 0.75])]
    views = [layout.views(Kind.PARAM, "model", "w", rank, (4, 3))[0] for rank in (0, 1)]
    total = sum(view.take(value) for view, value in zip(views, ranks, strict=True))
    assert np.array_equal(total, np.concatenate([q, k]))
    assert [view.shard.placements[0].kind for view in views] == ["partial", "partial"]
    assert views[1].local_shape == views[1].shard.global_shape == (6, 3)


def test_a_fused_interleaved_tensor_is_split_into_the_other_frameworks_three(tmp_path: Path) -> None:
    groups, per_group, d, i = 4, 2, 3, 5
    q, k, v = (
        numbered(groups * per_group * d, i),
        500 + numbered(groups * d, i),
        900 + numbered(groups * d, i),
    )
    fused = np.concatenate(
        [q.reshape(groups, -1, i), k.reshape(groups, -1, i), v.reshape(groups, -1, i)], axis=1
    )
    ranks = [fused[:2].reshape(-1, i), fused[2:].reshape(-1, i)]
    text = rule(
        "l.*.qkv.w", "(g[tp] (q|k|v)) i",
        f'sizes = {{ g = 4, q = {per_group * d}, k = {d} }}\n'
        'to = { "l.*.q.w" = "(g q) i", "l.*.k.w" = "(g k) i", "l.*.v.w" = "(g v) i" }',
    )  # fmt: skip
    found = gather(layout_of(tmp_path, TP2 + text), ranks, name="l.7.qkv.w")
    assert list(found) == ["l.7.q.w", "l.7.k.w", "l.7.v.w"]
    for name, value in (("q", q), ("k", k), ("v", v)):
        assert np.array_equal(found[f"l.7.{name}.w"], value)


def test_a_fused_interleaved_tensor_becomes_blocks_behind_one_another(tmp_path: Path) -> None:
    q, k = numbered(4, 3, 2), 100 + numbered(4, 3, 2)
    fused = np.stack([q, k], axis=1)
    text = rule("w", "(g[tp] (x|y)) i", 'sizes = {x = 3, g = 4}\nto = { "w" = "((g x)|(g y)) i" }')
    ranks = [fused[:2].reshape(-1, 2), fused[2:].reshape(-1, 2)]
    wanted = np.concatenate([q.reshape(-1, 2), k.reshape(-1, 2)])
    assert np.array_equal(gather(layout_of(tmp_path, TP2 + text), ranks)["w"], wanted)


def test_a_transposed_weight_is_turned(tmp_path: Path) -> None:
    w = numbered(6, 4)
    layout = layout_of(tmp_path, TP2 + rule("w", "i o[tp]", 'to = { "w" = "o i" }'))
    assert np.array_equal(gather(layout, [w[:3].T, w[3:].T])["w"], w)


def test_heads_may_be_the_inner_factor(tmp_path: Path) -> None:
    w = numbered(3, 4, 2)  # 3 x 4 heads, heads varying fastest
    layout = layout_of(tmp_path, TP2 + rule("w", "(d heads[tp]) i", "sizes = { heads = 4 }"))
    ranks = [w[:, :2].reshape(-1, 2), w[:, 2:].reshape(-1, 2)]
    assert np.array_equal(gather(layout, ranks)["w"], w.reshape(-1, 2))


def test_padding_is_cut_off_even_where_a_rank_holds_nothing_else(tmp_path: Path) -> None:
    w = numbered(5, 2)
    padded = np.concatenate([w, np.full((7, 2), 77.0)])
    layout = layout_of(
        tmp_path,
        "format = 1\n[axes]\ntp = 4\n" + rule("w", "v[tp] h", "sizes = { v = 12 }\nvalid = { v = 5 }"),
    )
    assert np.array_equal(gather(layout, np.split(padded, 4))["w"], w)


def test_zigzag_gives_a_rank_a_block_from_the_front_and_one_from_the_back(tmp_path: Path) -> None:
    x = numbered(2, 8, 3)
    cut = np.split(x, 4, axis=1)
    layout = layout_of(tmp_path, "format = 1\n[axes]\ncp = 2\n" + rule("w", "b s[cp:zigzag] h"))
    ranks = [np.concatenate([cut[0], cut[3]], 1), np.concatenate([cut[1], cut[2]], 1)]
    assert np.array_equal(gather(layout, ranks, Kind.ACTIVATION)["w"], x)


def test_uneven_parts_need_the_size_and_follow_it(tmp_path: Path) -> None:
    w = numbered(13, 2)
    layout = layout_of(tmp_path, "format = 1\n[axes]\ntp = 4\n" + rule("w", "o[tp] i", "sizes = { o = 13 }"))
    assert np.array_equal(gather(layout, [w[:4], w[4:8], w[8:12], w[12:]])["w"], w)


def test_two_axes_split_one_dimension_from_left_to_right(tmp_path: Path) -> None:
    w = numbered(8, 2)
    layout = layout_of(
        tmp_path, 'format = 1\ndata = ["dp"]\n[axes]\ndp = 2\ntp = 2\n' + rule("w", "o[tp,dp] i")
    )
    ranks = [w[0:2], w[4:6], w[2:4], w[6:8]]  # rank = dp * 2 + tp
    assert np.array_equal(gather(layout, ranks)["w"], w)


def test_data_axes_hold_different_rows_and_partial_gradients(tmp_path: Path) -> None:
    text = 'format = 1\ndata = ["dp"]\n[axes]\ndp = 2\ntp = 2\n'
    layout = layout_of(tmp_path, text + rule("w", "o[tp] i") + rule("x", "... h same:tp"))

    def kinds(kind: Kind, name: str, shape: tuple[int, ...]) -> list[str]:
        shard = layout.shard(kind, "out", name, 3, shape)
        assert shard is not None
        return [p.kind for p in shard.placements]

    assert kinds(Kind.PARAM, "w", (2, 2)) == ["replicate", "shard"]
    assert kinds(Kind.LOCAL_GRAD, "w", (2, 2)) == ["partial", "shard"]
    assert kinds(Kind.ACTIVATION, "x", (2, 3, 4)) == ["data", "replicate"]


def test_a_gradient_may_lie_differently_from_its_value(tmp_path: Path) -> None:
    layout = layout_of(tmp_path, TP2 + rule("n", "h same:tp", 'grad = "h partial:tp"'))
    value = layout.shard(Kind.CLIPPED_GRAD, "grad", "n", 0, (4,))
    grad = layout.shard(Kind.LOCAL_GRAD, "grad", "n", 0, (4,))
    assert value is not None
    assert grad is not None
    assert (value.placements[0].kind, grad.placements[0].op) == ("replicate", "sum")


def test_the_step_counter_of_an_optimizer_is_whole_on_every_rank(tmp_path: Path) -> None:
    layout = layout_of(tmp_path, TP2 + rule("w", "o[tp] i"))
    [view] = layout.views(Kind.OPTIMIZER_STATE, "step", "w", 1, ())
    assert view.whole
    assert view.shard.placements[0].kind == "replicate"


def test_local_layers_become_global_ones_by_stage_and_chunk(tmp_path: Path) -> None:
    text = """
    format = 1
    stages = ["pp"]
    [axes]
    pp = 2
    [[rename]]
    from = "chunks.{c}.layers.{n}*"
    to = "layers.{n}*"
    add = { n = { pp = [0, 2], c = [0, 4] } }
    """
    layout = layout_of(tmp_path, text)
    names = [layout.canonical(f"chunks.{c}.layers.1.mlp", rank) for rank in (0, 1) for c in (0, 1)]
    assert names == ["layers.1.mlp", "layers.5.mlp", "layers.3.mlp", "layers.7.mlp"]
    assert layout.canonical("embed.weight", 1) == "embed.weight"


def test_renames_follow_one_another_and_may_concern_some_ranks_only(tmp_path: Path) -> None:
    text = """
    format = 1
    stages = ["pp"]
    [axes]
    pp = 2
    [[rename]]
    from = "layers.{n}.*"
    to = "layers.{n}.*"
    at = { pp = 1 }
    add = { n = { pp = [0, 3] } }
    [[rename]]
    from = "layers.{n}.attn.*"
    to = "h.{n}.self_attention.*"
    """
    layout = layout_of(tmp_path, text)
    assert layout.canonical("layers.0.attn.weight", 0) == "h.0.self_attention.weight"
    assert layout.canonical("layers.0.attn.weight", 1) == "h.3.self_attention.weight"
    assert layout.canonical("layers.0.attn", 1) == "h.3.self_attention", "the module itself goes with them"
    assert layout.canonical("layers.0", 1) == "layers.3"


def test_the_first_rule_that_fits_counts(tmp_path: Path) -> None:
    text = TP2 + rule("a.*", "x same:tp", 'kind = ["param"]') + rule("*", "x[tp]", 'slot = "exp_*"')
    layout = layout_of(tmp_path, text)
    assert layout.rule(Kind.PARAM, "model", "a.b").number == 1  # type: ignore[union-attr]
    assert layout.rule(Kind.OPTIMIZER_STATE, "exp_avg", "a.b").number == 2  # type: ignore[union-attr]
    assert layout.views(Kind.OPTIMIZER_STATE, "other", "a.b", 0, (2,)) == ()


COMPLAINTS = [
    ('format = 2\n[axes]\ntp = 2\n', "format, found 2, expected 1"),
    ('format = 1\n[axes]\ntp = "two"\n', "$.axes"),
    ('format = 1\n[axes]\ntp = 0\n', "axes: tp, found 0, expected at least 1"),
    ('format = 1\ndata = ["dp"]\n[axes]\ntp = 2\n', "data: unknown axis dp, expected one of tp; declare it"),
    (TP2 + rule("w", "o[cp] i same:tp"), "rule 1 (w): dims: unknown axis cp"),
    (TP2 + rule("w", "o i"), "rule 1 (w): dims: axis tp of 2 ranks is not mentioned; split a"),
    (TP2 + rule("w", "o[tp] i", 'grad = "o i"'), "rule 1 (w): grad: axis tp of 2 ranks is not mentioned"),
    (TP2 + rule("w", "(o[tp] i"), "rule 1 (w): dims: '(o[tp] i': found 'the end'"),
    (TP2 + rule("w", "o[tp:zigzig] i"), "expected 'zigzag'"),
    (TP2 + rule("w", "o[tp] i same:tp"), "axis tp is mentioned in two ways"),
    (TP2 + rule("w", "o[tp] i", "sizes = { x = 3 }"), "rule 1 (w): sizes, found x, expected of i, o"),
    (TP2 + rule("w", "o[tp] i", 'to = { "v.*" = "o i" }'), "rule 1 (w): found 'v.*'"),
    (TP2 + rule("w", "o[tp] i", 'to = { "v" = "o[tp] i" }'), "rule 1 (w): to: v: 'o[tp] i', found an axis"),
    (TP2 + rule("w", "o[tp] i", 'shape = "x"'), "unknown field `shape` - at `rule 1`"),
    (TP2 + '[[rename]]\nfrom = "a.*"\nto = "b.{n}"\n', "rename 1 (a.*): found {n}, which 'a.*' does"),
    (TP2 + '[[rename]]\nfrom = "a.{n}"\nto = "a.{n}"\nadd = { n = { tp = [1] } }\n', "1 numbers, expected 2"),
    ("format = ", "not TOML"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "complaint"), COMPLAINTS)
def test_a_wrong_file_is_refused_with_file_rule_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(LayoutFileError) as caught:
        layout_of(tmp_path, text)
    assert str(tmp_path / "layout.toml") in str(caught.value)
    assert complaint in str(caught.value)


def test_a_shape_that_cannot_be_is_refused_with_rule_tensor_and_rank(tmp_path: Path) -> None:
    layout = layout_of(tmp_path, TP2 + rule("w", "o[tp] i", "sizes = { o = 6 }"))
    with pytest.raises(
        LayoutFileError, match=r"rule 1 \(w\).*param w of shape \(4, 2\) on rank 1.*expected 3 on"
    ):
        layout.shard(Kind.PARAM, "model", "w", 1, (4, 2))
    with pytest.raises(LayoutFileError, match="found 1 dimensions, expected 2"):
        layout.shard(Kind.PARAM, "model", "w", 1, (4,))


def test_axes_that_do_not_make_the_world_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutFileError, match="tp 2 make 2 ranks, expected 4; correct the sizes"):
        layout_of(tmp_path, TP2).check_world(4)
