"""Interval arithmetic over int64 nanoseconds, vectorized.

`spans_N2` is an array of [start, end) rows. *Merged* means sorted by start, disjoint and non-empty, the form that
`merge_spans` returns and that every other function here expects and returns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

_NONE = np.zeros((0, 2), dtype=np.int64)
INSERT_RATIO = 8
"""Ratio of sizes from which the smaller set is inserted into the larger one, instead of sorting both."""


def merge_spans(start_ns_N: Int64s, end_ns_N: Int64s) -> Int64s:
    """Union of the intervals [start, end), merged; empty and inverted intervals are left out."""
    start_ns_N, end_ns_N = np.ascontiguousarray(start_ns_N), np.ascontiguousarray(end_ns_N)
    keep = end_ns_N > start_ns_N
    if not keep.all():
        start_ns_N, end_ns_N = start_ns_N[keep], end_ns_N[keep]
    if not len(start_ns_N):
        return _NONE
    if (start_ns_N[1:] < start_ns_N[:-1]).any():
        order = np.argsort(start_ns_N, kind="stable")
        start_ns_N, end_ns_N = start_ns_N[order], end_ns_N[order]
    gap_N = start_ns_N[1:] > end_ns_N[:-1]
    if (end_ns_N[1:] < end_ns_N[:-1]).any():
        end_ns_N = np.maximum.accumulate(end_ns_N)
        gap_N = start_ns_N[1:] > end_ns_N[:-1]
    after = np.flatnonzero(gap_N)
    merged = np.empty((len(after) + 1, 2), dtype=np.int64)
    merged[0, 0], merged[-1, 1] = start_ns_N[0], end_ns_N[-1]
    merged[1:, 0], merged[:-1, 1] = start_ns_N[after + 1], end_ns_N[after]
    return merged


def unite_spans(*parts: Int64s) -> Int64s:
    """Union of several sets of intervals, merged."""
    filled = sorted((part for part in parts if len(part)), key=len)
    if not filled:
        return _NONE
    if len(filled) == 2 and INSERT_RATIO * len(filled[0]) < len(filled[1]):
        return _insert_spans(*filled)
    both = np.concatenate(filled) if len(filled) > 1 else filled[0]
    return merge_spans(both[:, 0], both[:, 1])


def _insert_spans(few_F2: Int64s, many_M2: Int64s) -> Int64s:
    """Union of two merged sets of very different size: only the many that the few touch change."""
    low_F = np.searchsorted(many_M2[:, 1], few_F2[:, 0], side="left")
    high_F = np.searchsorted(many_M2[:, 0], few_F2[:, 1], side="right")
    meets_F = high_F > low_F
    start_F = np.where(meets_F, np.minimum(few_F2[:, 0], many_M2[np.minimum(low_F, len(many_M2) - 1), 0]), few_F2[:, 0])
    end_F = np.where(meets_F, np.maximum(few_F2[:, 1], many_M2[np.maximum(high_F - 1, 0), 1]), few_F2[:, 1])
    count_F = np.where(meets_F, high_F - low_F, 0)
    is_kept_M = np.ones(len(many_M2), dtype=bool)
    is_kept_M[np.repeat(low_F - np.cumsum(count_F) + count_F, count_F) + np.arange(int(count_F.sum()))] = False
    grown = merge_spans(start_F, end_F)
    kept = _items(many_M2)[is_kept_M]
    places = np.searchsorted(kept.view(np.int64)[::2], grown[:, 0])
    return np.insert(kept, places, _items(grown)).view(np.int64).reshape(-1, 2)


def _items(spans_M2: Int64s) -> npt.NDArray[np.complex128]:
    """Return the spans as items of 16 bytes, which numpy does not treat as numbers."""
    # numpy copies items of 16 bytes several times faster than rows of two.
    return np.ascontiguousarray(spans_M2).view(np.complex128)[:, 0]


def total_ns(spans_M2: Int64s) -> int:
    """Total length of merged intervals."""
    return int((spans_M2[:, 1] - spans_M2[:, 0]).sum())


def invert_spans(spans_M2: Int64s, start_ns: int, end_ns: int) -> Int64s:
    """The gaps between merged intervals inside [start, end), merged."""
    inner = clip_spans(spans_M2, start_ns, end_ns)
    edges = np.empty((len(inner) + 1, 2), dtype=np.int64)
    edges[0, 0], edges[-1, 1] = start_ns, end_ns
    edges[1:, 0], edges[:-1, 1] = inner[:, 1], inner[:, 0]
    return edges[edges[:, 1] > edges[:, 0]]


def gaps_in_windows(spans_M2: Int64s, windows_W2: Int64s) -> tuple[Int64s, Int64s]:
    """The gaps between merged intervals inside each window, window by window, and the index of the window of each."""
    start_W, end_W = windows_W2[:, 0], windows_W2[:, 1]
    low_W = np.searchsorted(spans_M2[:, 1], start_W, side="right")
    high_W = np.maximum(np.searchsorted(spans_M2[:, 0], end_W, side="left"), low_W)
    count_W = high_W - low_W + 1  # one gap before each interval, and one after the last
    last_W = np.cumsum(count_W) - 1
    window_G = np.repeat(np.arange(len(windows_W2)), count_W)
    after_G = np.arange(len(window_G)) + (high_W - last_W)[window_G]
    gaps_G2 = np.empty((len(window_G), 2), dtype=np.int64)
    if len(spans_M2):
        gaps_G2[:, 0] = spans_M2[after_G - 1, 1]
        gaps_G2[:, 1] = spans_M2[np.minimum(after_G, len(spans_M2) - 1), 0]
    gaps_G2[last_W - count_W + 1, 0] = start_W
    gaps_G2[last_W, 1] = end_W
    kept = gaps_G2[:, 1] > gaps_G2[:, 0]
    return (gaps_G2, window_G) if kept.all() else (gaps_G2[kept], window_G[kept])


def intersect_spans(a_M2: Int64s, b_M2: Int64s) -> Int64s:
    """Intersection of two merged sets, merged."""
    if not len(a_M2) or not len(b_M2):
        return _NONE
    low, high = int(min(a_M2[0, 0], b_M2[0, 0])), int(max(a_M2[-1, 1], b_M2[-1, 1]))
    outside = unite_spans(invert_spans(a_M2, low, high), invert_spans(b_M2, low, high))
    return invert_spans(outside, low, high)


def subtract_spans(a_M2: Int64s, b_M2: Int64s) -> Int64s:
    """First merged set minus the second, merged."""
    if not len(a_M2) or not len(b_M2):
        return a_M2
    return intersect_spans(a_M2, invert_spans(b_M2, int(a_M2[0, 0]), int(a_M2[-1, 1])))


def clip_spans(spans_M2: Int64s, start_ns: int, end_ns: int) -> Int64s:
    """The part of merged intervals inside [start, end), merged."""
    if end_ns <= start_ns or not len(spans_M2):
        return _NONE
    low = int(np.searchsorted(spans_M2[:, 1], start_ns, side="right"))
    high = int(np.searchsorted(spans_M2[:, 0], end_ns, side="left"))
    if high <= low:
        return _NONE
    clipped = spans_M2[low:high].copy()
    clipped[0, 0] = max(int(clipped[0, 0]), start_ns)
    clipped[-1, 1] = min(int(clipped[-1, 1]), end_ns)
    return clipped


def covered_ns(spans_M2: Int64s, windows_W2: Int64s) -> Int64s:
    """Nanoseconds of each window covered by merged intervals; windows may overlap and have any order."""
    if not len(spans_M2):
        return np.zeros(len(windows_W2), dtype=np.int64)
    length_M = spans_M2[:, 1] - spans_M2[:, 0]
    before_M = np.concatenate(([0], np.cumsum(length_M)))

    def covered_before(time_ns_W: Int64s) -> Int64s:
        index_W = np.searchsorted(spans_M2[:, 0], time_ns_W, side="right") - 1
        inside_W = np.minimum(time_ns_W - spans_M2[np.maximum(index_W, 0), 0], length_M[np.maximum(index_W, 0)])
        return np.where(index_W < 0, 0, before_M[np.maximum(index_W, 0)] + inside_W).astype(np.int64)

    return covered_before(windows_W2[:, 1]) - covered_before(windows_W2[:, 0])


def outermost(start_ns_N: Int64s, end_ns_N: Int64s) -> npt.NDArray[np.bool_]:
    """Mask of the nested intervals of one thread that no other interval encloses (N in any order)."""
    order = np.lexsort((-end_ns_N, start_ns_N))
    reach_N = np.maximum.accumulate(end_ns_N[order])
    top = np.ones(len(order), dtype=bool)
    top[1:] = end_ns_N[order][1:] > reach_N[:-1]
    result = np.empty(len(order), dtype=bool)
    result[order] = top
    return result
