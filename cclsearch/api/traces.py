"""Profiler traces, as users of the Python API read and score them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cclsearch.api.inputs import CardSource, load_card
from cclsearch.trace.read import open_trace
from cclsearch.trace.score import TraceScore, score_view
from cclsearch.trace.view import TraceView


def read_traces(path: str | os.PathLike[str], *, card: CardSource | None = None, workers: int = 1) -> TraceView:
    """Return the traces at a path: a file, a folder, or a trial's folder. With a card, metrics such as MFU are
    available.

    Raises UserError if the path cannot be read; faults inside a trace are in the view's `trace_set`.
    """
    return open_trace(Path(path).expanduser(), card=None if card is None else load_card(card), workers=workers)


def score(
    traces: TraceView | str | os.PathLike[str],
    metrics: Iterable[str] | None = None,
    *,
    card: CardSource | None = None,
) -> TraceScore:
    """Return the named metrics of traces (default: all) and the diagnosis of a step; raises UserError for a name."""
    view = traces if isinstance(traces, TraceView) else read_traces(traces, card=card)
    return score_view(view, metrics)
