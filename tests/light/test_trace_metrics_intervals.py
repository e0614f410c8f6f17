"""Interval arithmetic compared with a brute-force version that marks every nanosecond."""

from __future__ import annotations

import numpy as np
import pytest

from cclsearch.trace.intervals import (
    Int64s,
    clip_spans,
    covered_ns,
    gaps_in_windows,
    intersect_spans,
    invert_spans,
    merge_spans,
    outermost,
    subtract_spans,
    total_ns,
    unite_spans,
)

END = 120


def random_spans(rng: np.random.Generator, count: int) -> tuple[Int64s, Int64s]:
    start = rng.integers(0, END - 10, count)
    return start, start + rng.integers(0, 10, count)


def mark(spans: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    marked = np.zeros(END, dtype=bool)
    for start, end in spans:
        marked[start:end] = True
    return marked


@pytest.mark.parametrize("seed", range(20))
def test_set_operations_agree_with_marked_nanoseconds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (merge_spans(*random_spans(rng, int(rng.integers(0, 15)))) for _ in range(2))
    low, high = sorted(rng.integers(0, END, 2).tolist())
    inside = np.zeros(END, dtype=bool)
    inside[low:high] = True
    assert (mark(unite_spans(a, b)) == (mark(a) | mark(b))).all()
    assert (mark(intersect_spans(a, b)) == (mark(a) & mark(b))).all()
    assert (mark(subtract_spans(a, b)) == (mark(a) & ~mark(b))).all()
    assert (mark(clip_spans(a, low, high)) == (mark(a) & inside)).all()
    assert (mark(invert_spans(a, low, high)) == (~mark(a) & inside)).all()
    assert total_ns(a) == mark(a).sum()


@pytest.mark.parametrize("seed", range(40))
def test_the_union_of_few_and_many_spans_is_exact(seed: int) -> None:
    rng = np.random.default_rng(seed)
    many = np.arange(0, END - 2, 3)
    few = merge_spans(*random_spans(rng, int(rng.integers(1, 4))))
    many_M2 = merge_spans(many, many + rng.integers(1, 3, len(many)))
    united = unite_spans(few, many_M2)
    assert (mark(united) == (mark(few) | mark(many_M2))).all()
    assert (united[1:, 0] > united[:-1, 1]).all()


@pytest.mark.parametrize("seed", range(20))
def test_merged_spans_are_sorted_disjoint_and_not_empty(seed: int) -> None:
    rng = np.random.default_rng(seed)
    merged = merge_spans(*random_spans(rng, 40))
    assert (merged[:, 1] > merged[:, 0]).all()
    assert (merged[1:, 0] > merged[:-1, 1]).all()


@pytest.mark.parametrize("seed", range(20))
def test_covered_time_of_windows_agrees_with_marked_nanoseconds(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    spans = merge_spans(*random_spans(rng, int(rng.integers(0, 15))))
    windows = np.sort(rng.integers(0, END, (8, 2)), axis=1)
    assert covered_ns(spans, windows).tolist() == [mark(spans)[a:b].sum() for a, b in windows]


@pytest.mark.parametrize("seed", range(40))
def test_the_gaps_of_windows_are_those_of_each_window(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spans = merge_spans(*random_spans(rng, int(rng.integers(0, 12))))
    windows_W2 = np.sort(rng.integers(-5, END + 5, (int(rng.integers(0, 6)), 2)), axis=1)
    gaps_G2, window_G = gaps_in_windows(spans, windows_W2)
    for window, (start, end) in enumerate(windows_W2.tolist()):
        assert gaps_G2[window_G == window].tolist() == invert_spans(spans, start, end).tolist()
    assert (np.diff(window_G) >= 0).all()


def test_times_above_two_to_the_fifty_keep_every_nanosecond() -> None:
    base = 1_712_195_495_505_582_988
    merged = merge_spans(np.array([base, base + 3]), np.array([base + 2, base + 4]))
    assert merged.tolist() == [[base, base + 2], [base + 3, base + 4]]
    assert total_ns(merged) == 3


def test_outermost_marks_spans_that_are_not_inside_another() -> None:
    start, end = np.array([0, 1, 2, 10, 10]), np.array([9, 5, 3, 20, 12])
    assert outermost(start, end).tolist() == [True, False, False, True, False]
