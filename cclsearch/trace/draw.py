"""Self-contained SVG charts of a trace: stacked bars by rank, and a timeline of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from cclsearch.core.text import one_line
from cclsearch.trace.diagnosis.causes import Cause, median_window
from cclsearch.trace.diagnosis.diagnose import Diagnosis
from cclsearch.trace.intervals import Int64s, clip_spans
from cclsearch.trace.view import TraceView

COLORS: Mapping[Cause, str] = {
    Cause.COMPUTE: "#2a78b5",
    Cause.EXPOSED_TRANSFER: "#d9822b",
    Cause.EXPOSED_WAIT: "#f2c14e",
    Cause.MEMORY_COPIES: "#7a5195",
    Cause.HOST_IDLE: "#c9ced6",
    Cause.LAUNCH_IDLE: "#dfe3e8",
    Cause.UNKNOWN_IDLE: "#b4bac4",
    Cause.BUBBLE: "#8a94a6",
    Cause.IMBALANCE: "#c0392b",
}
_LANES = (("compute", COLORS[Cause.COMPUTE]), ("communication", COLORS[Cause.EXPOSED_TRANSFER]))
_WIDTH, _LEFT, _RIGHT, _ROW = 960, 90, 20, 22
MAX_RANKS_DRAWN = 64
MAX_BLOCKS = 1500
"""Maximum number of rectangles per timeline lane: above it, gaps too thin to see are closed."""


def draw_breakdown(diagnosis: Diagnosis) -> str:
    """Return stacked bars of seconds by cause for every rank, with the worst rank marked."""
    ranks = list(diagnosis.seconds_by_rank.items())[:MAX_RANKS_DRAWN]
    longest = max((sum(seconds.values()) for _, seconds in ranks), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    body = []
    for i, (rank, seconds) in enumerate(ranks):
        top = 60 + i * _ROW
        mark = " *" if rank == diagnosis.worst_rank else ""
        body.append(_text(_LEFT - 8, top + 14, f"rank {rank}{mark}", anchor="end"))
        left = float(_LEFT)
        for cause in Cause:
            width = seconds[cause] * scale
            if width > 0:
                tip = f"rank {rank}: {cause.replace('_', ' ')} {1e3 * seconds[cause]:.3f} ms"
                body.append(_box(left, top, width, _ROW - 5, COLORS[cause], tip))
            left += width
    bottom = 60 + len(ranks) * _ROW
    body.append(_axis(bottom, longest))
    subject = "One step" if diagnosis.is_step else "The whole recording"
    title = f"{subject} by rank: {1e3 * diagnosis.window_s:.3f} ms" + (
        " (* the other ranks wait for it)" if len(ranks) > 1 else ""
    )
    legend = _legend([(cause.replace("_", " "), COLORS[cause]) for cause in Cause])
    return _page(bottom + 40, [_text(_LEFT, 20, title, size=15), legend, *body])


def draw_timeline(trace: TraceView) -> str:
    """Return the median step of every rank, from its own start: spans of compute, communication and copies."""
    views = [view for view in trace.ranks.values() if len(view.windows.spans_W2)][: MAX_RANKS_DRAWN // 4]
    windows = [median_window(view) for view in views]
    longest_ns = max((end - start for start, end in windows), default=1)
    body, top = [], 60
    for view, (start, end) in zip(views, windows, strict=True):
        body.append(_text(_LEFT - 8, top + 25, f"rank {view.rank}", anchor="end"))
        for spans, (name, color) in zip((view.compute_M2, view.comm_M2, view.copies_M2), _lanes(), strict=True):
            body += _draw_lane(
                clip_spans(spans, start, end) - start, longest_ns, top, f"rank {view.rank} {name}", color
            )
            top += 14
        top += 8
    body.append(_axis(top, longest_ns / 1e9))
    return _page(top + 40, [_text(_LEFT, 20, "One step by rank", size=15), _legend(_lanes()), *body])


def _lanes() -> list[tuple[str, str]]:
    return [*_LANES, ("copies", COLORS[Cause.MEMORY_COPIES])]


def _draw_lane(spans_M2: Int64s, longest_ns: int, top: int, name: str, color: str) -> list[str]:
    scale = (_WIDTH - _LEFT - _RIGHT) / longest_ns
    blocks = _close_thin_gaps(spans_M2, longest_ns)
    return [
        _box(_LEFT + start * scale, top, max((end - start) * scale, 0.2), 11, color, f"{name} at {start / 1e6:.3f} ms")
        for start, end in blocks.tolist()
    ]


def _close_thin_gaps(spans_M2: Int64s, longest_ns: int) -> Int64s:
    if len(spans_M2) <= MAX_BLOCKS:
        return spans_M2
    gaps = spans_M2[1:, 0] - spans_M2[:-1, 1]
    first = np.append(True, gaps > max(longest_ns // MAX_BLOCKS, int(np.sort(gaps)[-MAX_BLOCKS])))
    at = np.flatnonzero(first)
    return np.stack([spans_M2[at, 0], spans_M2[np.append(at[1:] - 1, len(spans_M2) - 1), 1]], axis=1)


def _axis(top: int, seconds: float) -> str:
    scale = (_WIDTH - _LEFT - _RIGHT) / 4
    ticks = [
        _text(_LEFT + i * scale, top + 18, f"{1e3 * seconds * i / 4:.4g} ms", anchor="middle" if i else "start")
        for i in range(5)
    ]
    return f'<path d="M{_LEFT} {top + 2}H{_WIDTH - _RIGHT}" stroke="#888"/>' + "".join(ticks)


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    parts, left = [], _LEFT
    for name, color in entries:
        parts += [_box(left, 32, 11, 11, color, name), _text(left + 15, 42, name)]
        left += 26 + 7 * len(name)
    return "".join(parts)


def _box(left: float, top: float, width: float, height: float, color: str, tip: str) -> str:
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{color}">'
        f"<title>{escape(one_line(tip))}</title></rect>"
    )


def _text(left: float, top: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{left:.1f}" y="{top}" font-size="{size}" text-anchor="{anchor}">{escape(one_line(text))}</text>'


def _page(height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
