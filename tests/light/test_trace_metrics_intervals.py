"""Laws of interval arithmetic, against a brute-force version that marks every nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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
PAIRS = st.lists(st.tuples(st.integers(0, END - 10), st.integers(0, 9)), max_size=40)
WINDOWS = st.lists(st.tuples(st.integers(-5, END + 5), st.integers(-5, END + 5)), max_size=8)


def merge(pairs: list[tuple[int, int]]) -> Int64s:
    """Return the union of spans given as start and length."""
    spans_N2 = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return merge_spans(spans_N2[:, 0], spans_N2.sum(axis=1))


SPANS = PAIRS.map(merge)


def mark(spans: Int64s) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    marked = np.zeros(END, dtype=bool)
    for start, end in spans:
        marked[start:end] = True
    return marked


@given(SPANS, SPANS, st.integers(0, END), st.integers(0, END))
def test_set_operations_agree_with_marked_nanoseconds(a, b, one, other):
    low, high = sorted((one, other))
    inside = np.zeros(END, dtype=bool)
    inside[low:high] = True
    assert (mark(unite_spans(a, b)) == (mark(a) | mark(b))).all()
    assert (mark(intersect_spans(a, b)) == (mark(a) & mark(b))).all()
    assert (mark(subtract_spans(a, b)) == (mark(a) & ~mark(b))).all()
    assert (mark(clip_spans(a, low, high)) == (mark(a) & inside)).all()
    assert (mark(invert_spans(a, low, high)) == (~mark(a) & inside)).all()
    assert total_ns(a) == mark(a).sum()


@given(PAIRS.filter(len), st.lists(st.integers(1, 2), min_size=40, max_size=40))
def test_merged_and_united_spans_are_exact_sorted_disjoint_and_not_empty(few, lengths):
    """Few spans and many take different ways through `unite_spans`."""
    many = merge_spans(np.arange(0, 118, 3), np.arange(0, 118, 3) + lengths)
    united = unite_spans(merge(few[:3]), many)
    assert (mark(united) == (mark(merge(few[:3])) | mark(many))).all()
    for spans in (united, merge(few)):
        assert (spans[:, 1] > spans[:, 0]).all()
        assert (spans[1:, 0] > spans[:-1, 1]).all()


@given(SPANS, WINDOWS)
def test_windows_have_the_covered_time_and_the_gaps_of_each_alone(spans, windows):
    windows_W2 = np.sort(np.array(windows, dtype=np.int64).reshape(-1, 2), axis=1)
    covered = [mark(spans)[max(a, 0) : max(b, 0)].sum() for a, b in windows_W2.tolist()]
    assert covered_ns(spans, windows_W2).tolist() == covered
    gaps_G2, window_G = gaps_in_windows(spans, windows_W2)
    for window, (start, end) in enumerate(windows_W2.tolist()):
        assert gaps_G2[window_G == window].tolist() == invert_spans(spans, start, end).tolist()
    assert (np.diff(window_G) >= 0).all()


def test_times_above_two_to_the_fifty_keep_every_nanosecond():
    base = 1_712_195_495_505_582_988
    merged = merge_spans(np.array([base, base + 3]), np.array([base + 2, base + 4]))
    assert merged.tolist() == [[base, base + 2], [base + 3, base + 4]]
    assert total_ns(merged) == 3


def test_outermost_marks_spans_that_are_not_inside_another():
    start, end = np.array([0, 1, 2, 10, 10]), np.array([9, 5, 3, 20, 12])
    assert outermost(start, end).tolist() == [True, False, False, True, False]
