"""Dimensions are read from their sizes in every part, and never cut where that is ambiguous."""

from __future__ import annotations

from tensortrace.diff.dimensions import label_dims
from tensortrace.diff.extent import Extent


def test_rows_then_positions_then_features() -> None:
    assert label_dims([((8, 64, 32), Extent(8, 64)), ((4, 50, 32), Extent(4, 50))]) == (
        "rows",
        "positions",
        "",
    )


def test_sequence_first_is_read_as_positions_then_rows() -> None:
    assert label_dims([((64, 8, 32), Extent(8, 64))]) == ("positions", "rows", "")


def test_flattened_rows_and_positions() -> None:
    assert label_dims([((512, 32), Extent(8, 64)), ((200, 32), Extent(4, 50))]) == ("flat", "")


def test_features_as_many_as_positions_are_not_cut_away() -> None:
    assert label_dims([((8, 64, 64), Extent(8, 64))]) == ("rows", "", "")


def test_a_padded_length_that_varies_tells_positions_from_features() -> None:
    cases = [((8, 64, 64), Extent(8, 64)), ((8, 50, 64), Extent(8, 50))]
    assert label_dims(cases) == ("rows", "positions", "")


def test_an_attention_map_has_positions_twice() -> None:
    cases = [((8, 2, 64, 64), Extent(8, 64)), ((8, 2, 50, 50), Extent(8, 50))]
    assert label_dims(cases) == ("rows", "", "positions", "positions")


def test_a_size_that_follows_nothing_has_no_reading() -> None:
    assert label_dims([((8, 3), Extent(8, 64)), ((8, 5), Extent(8, 50))]) is None


def test_targets_shifted_by_one_are_read_with_one_position_fewer() -> None:
    assert label_dims([((32,), Extent(4, 9)), ((72,), Extent(8, 10))]) is None
    assert label_dims([((32,), Extent(4, 8)), ((72,), Extent(8, 9))]) == ("flat",)


def test_rows_flattened_with_something_else_are_grouped() -> None:
    assert label_dims([((12,), Extent(2, None)), ((48,), Extent(8, None))]) == ("grouped",)
    assert label_dims([((48,), Extent(8, None))], row_bound=True) == ("grouped",)


def test_features_are_not_taken_for_groups_of_rows() -> None:
    assert label_dims([((64,), Extent(8, 10)), ((64,), Extent(4, 10))]) == ("",)
    assert label_dims([((64,), Extent(8, None))]) == ("",)


def test_maps_between_two_sequences_follow_both() -> None:
    cases = [((8, 2, 9, 64), Extent(8, 64, answers=9)), ((4, 2, 7, 50), Extent(4, 50, answers=7))]
    assert label_dims(cases) == ("rows", "", "others", "positions")


def test_what_follows_the_other_sequence_alone_is_not_read_by_the_first() -> None:
    cases = [((8, 9, 32), Extent(8, 64, answers=9)), ((4, 7, 32), Extent(4, 50, answers=7))]
    assert label_dims(cases) is None
    assert label_dims([(s, e.of_answers()) for s, e in cases]) == ("rows", "positions", "")
