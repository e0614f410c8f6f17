"""The folder of real traces that CI names, and figures of them."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from cclsearch.plugins import METRICS
from cclsearch.trace.metric import MetricResult
from cclsearch.trace.read import read_traces
from cclsearch.trace.view import TraceView

FOLDER = os.environ.get("CCL_CONFORMANCE_TRACES", "")
needs_traces = pytest.mark.skipif(
    not FOLDER, reason="CCL_CONFORMANCE_TRACES names no folder of real traces (CI sets it, and there this must run)"
)


@cache
def view_of(name: str) -> TraceView:
    """Return the traces of that name, read once for all tests."""
    folder = Path(FOLDER) / name
    assert folder.is_dir(), f"CCL_CONFORMANCE_TRACES is set, but {folder} does not exist"
    return TraceView(read_traces(folder, use_cache=False))


def measure(name: str, metric: str) -> MetricResult:
    """Return this metric of the traces of that name."""
    result: MetricResult = METRICS.get(metric)(view_of(name))
    return result
