"""Metrics of users and packages, and of traces that hold nothing to measure."""

from __future__ import annotations

import math
import re

import pytest
from paths import ROOT
from trace_measures import make_card, measure, step_timeline, two_ranks
from trace_tables import Timeline, make_set

from cclsearch.core.values import Config
from cclsearch.plugins import METRICS
from cclsearch.trace.events import (
    EventTable,
    Kind,
    Reason,
    TraceSet,
)
from cclsearch.trace.metric import Draft, NotAvailable, Status, metric
from cclsearch.trace.score import score_view
from cclsearch.trace.view import RankView, TraceView

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.fixture
def temporary_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the metrics that a test registers after the test."""
    METRICS.names()
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._entries))


def test_every_metric_has_a_reason_if_nothing_was_read():
    nothing = TraceSet({}, "not_available", (Reason.UNREADABLE,), "the file is not a trace")
    score = score_view(TraceView(nothing))
    assert set(score.metrics) == set(METRICS.names())
    for result in score.metrics.values():
        assert (result.value, result.status, result.reason) == (None, Status.NOT_AVAILABLE, Reason.UNREADABLE)
    assert score.diagnosis is None


def empty_tables() -> list[EventTable]:
    host_only = Timeline()
    host_only.add(Kind.CPU_OP, 0, 5, "aten::mm", device=-1)
    zero_length = Timeline()
    zero_length.kernel(0, 0)
    zero_length.collective(0, 0)
    zero_steps = Timeline()
    zero_steps.step(0, 0)
    zero_steps.step(0, 0)
    return [Timeline().table(), host_only.table(), zero_length.table(), zero_steps.table()]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.filterwarnings("error")
def test_degenerate_tables_give_reasons_and_no_warnings(which):
    score = score_view(TraceView(make_set([empty_tables()[which]]), card=make_card(), config=Config(pp=2)))
    for name, result in score.metrics.items():
        assert "raised" not in result.detail, f"{name}: {result.detail}"
        assert result.value is None or math.isfinite(result.value)


def test_a_truncated_trace_makes_every_value_partial():
    table = step_timeline().table(reasons=(Reason.TRACE_TRUNCATED,))
    result = measure([table], "compute_frac", set_fields={"status": "partial", "message": "rank 0 is truncated"})
    assert (result.status, result.reason, result.detail) == (
        Status.PARTIAL,
        Reason.TRACE_TRUNCATED,
        "rank 0 is truncated",
    )


@pytest.mark.usefixtures("temporary_metrics")
def test_a_user_metric_needs_ten_lines():
    @metric("longest_kernel_in_test", unit="s", summary="longest compute kernel", combine="max")
    def measure_longest_kernel(rank: RankView) -> float:
        kernels = rank.compute_kernels
        if not len(kernels):
            raise NotAvailable("no_gpu_events")
        return float(rank.table.dur_ns[kernels].max() / 1e9)

    long, none = Timeline(rank=0), Timeline(rank=1)
    long.kernel(0, 7)
    none.copy(0, 3)
    result = measure([long.table(), none.table()], "longest_kernel_in_test")
    assert result.value == pytest.approx(7e-6)
    assert result.per_rank == {0: pytest.approx(7e-6), 1: None}
    assert (result.status, result.reason) == (Status.PARTIAL, Reason.NO_GPU_EVENTS)


@pytest.mark.parametrize(
    "broken",
    [
        lambda trace: 1 / 0,
        lambda trace: 3.0,
        lambda trace: Draft(float("nan")),
    ],
)
@pytest.mark.usefixtures("temporary_metrics")
def test_a_metric_that_raises_is_not_available(broken):
    name = "broken_in_test"
    metric(name, unit="s", summary="broken", over="trace")(broken)
    result = measure([step_timeline().table()], name)
    assert (result.value, result.status) == (None, Status.NOT_AVAILABLE)


def test_a_rank_without_device_events_is_excluded_and_named():
    host_only_rank = Timeline(rank=1, world_size=2)
    host_only_rank.add(Kind.CPU_OP, 0, 5, "aten::mm", device=-1)
    result = measure([step_timeline(0, 2).table(), host_only_rank.table()], "comm_time")
    assert result.value == pytest.approx(20e-6)
    assert (result.status, result.reason, result.detail) == (
        Status.PARTIAL,
        Reason.RANKS_MISSING,
        "no device event of rank 1",
    )


@pytest.mark.usefixtures("temporary_metrics")
def test_the_examples_in_the_documentation_run():
    text = (ROOT / "docs" / "your-metric.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, {})
    tables = two_ranks()
    assert measure(tables, "longest_kernel").value == pytest.approx(35e-6)
    slowest = measure(tables, "slowest_group")
    assert slowest.value == pytest.approx(6 * (20 + 30 + 50) * 1e-6)
