"""The diagnosis adds up, names the right cause and rank, and its sentences agree with its figures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from trace_tables import Timeline, make_set

from cclsearch.charts.chart import render_svg
from cclsearch.charts.parts import draw_timeline
from cclsearch.core.values import Config
from cclsearch.plugins import METRICS
from cclsearch.trace.answers.text_report import format_diagnosis
from cclsearch.trace.claims import draw_breakdown, find_lanes
from cclsearch.trace.diagnosis.causes import Cause, median_causes
from cclsearch.trace.events import CollectiveKind, EventTable, Kind, Reason
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.score import Diagnosis, diagnose_trace, score_view
from cclsearch.trace.view import TraceView

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


def random_tables(seed: int, num_ranks: int = 3, num_steps: int = 5) -> list[EventTable]:
    """Random tables: overlapping streams, ranks of different speed, collectives of every kind."""
    rng = np.random.default_rng(seed)
    tables = []
    for rank in range(num_ranks):
        timeline = Timeline(rank=rank, world_size=num_ranks)
        scale = float(rng.uniform(0.8, 1.3))
        for i in range(num_steps):
            number = timeline.step(i * 1000 * scale, (i * 1000 + 900) * scale)
            for _ in range(int(rng.integers(3, 25))):
                start, length = (i * 1000 + float(rng.integers(900))) * scale, float(rng.integers(1, 120))
                which = int(rng.integers(4))
                if which == 0:
                    timeline.copy(start, length, step_id=number)
                elif which == 1:
                    kind = list(CollectiveKind)[int(rng.integers(5))]
                    timeline.collective(start, length, kind, stream=int(rng.integers(20, 23)), step_id=number)
                else:
                    timeline.kernel(start, length, launched_us=max(start - 30, 0), step_id=number)
        tables.append(timeline.table())
    return tables


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("pp", [1, 3])
def test_seconds_by_cause_add_up_to_the_mean_or_else_the_median_step(seed, pp):
    trace = TraceView(make_set(random_tables(seed)), config=Config(pp=pp))
    diagnosis = diagnose_trace(trace)
    middle = np.median if diagnosis.is_uneven else np.mean
    step = {rank: float(middle(view.parts.window_ns_W)) / 1e9 for rank, view in trace.ranks.items()}
    assert sum(diagnosis.seconds_by_cause.values()) == pytest.approx(max(step.values()), rel=1e-9)
    assert diagnosis.window_s == pytest.approx(max(step.values()), rel=1e-9)
    assert min(diagnosis.seconds_by_cause.values()) >= 0
    for rank, seconds in diagnosis.seconds_by_rank.items():
        assert sum(seconds.values()) == pytest.approx(step[rank], rel=1e-9)


def stalled(lengths_us: list[float]) -> TraceView:
    """Steps of these lengths, each with 860 us of compute, of which the host launches the last 60 at the end."""
    timeline, at = Timeline(), 0.0
    for length in [1000.0, *lengths_us, 1000.0, 1000.0]:
        number = timeline.step(at, at + length)
        timeline.kernel(at, 800, launched_us=at, step_id=number)
        timeline.kernel(at + length - 60, 60, launched_us=at + length - 70, step_id=number)
        at += length
    return TraceView(make_set([timeline.table()]))


def test_steps_of_one_length_are_described_by_their_sum():
    view = stalled([1000, 1000, 1040, 1000, 1080])
    diagnosis = diagnose_trace(view)
    assert (diagnosis.is_uneven, diagnosis.slow_steps) == (False, None)
    assert diagnosis.window_s == pytest.approx(1020e-6)  # the inner steps: these five and one more
    idle = METRICS.get("idle_frac")(view).value
    assert diagnosis.seconds_by_cause[Cause.HOST_IDLE] / diagnosis.window_s == pytest.approx(idle) == 160 / 1020


def test_stalls_at_some_steps_are_described_beside_the_median_step():
    diagnosis = diagnose_trace(stalled([1000, 6000, 1000, 6000, 1000, 6000, 1000, 1000]))
    assert diagnosis.window_s == pytest.approx(1e-3) == diagnosis.median_step_s
    assert diagnosis.mean_step_s == pytest.approx(24e-3 / 9)
    slow = diagnosis.slow_steps
    assert (slow.num_steps, slow.time_share) == (3, pytest.approx(18 / 24))
    assert slow.seconds_by_cause[Cause.HOST_IDLE] == pytest.approx(5140e-6)
    assert diagnosis.sentences[0].startswith("The median traced step takes 1 ms: compute 860 us (86%), device idle")
    assert diagnosis.sentences[1] == (
        "The steps are uneven: their mean is 2.67 ms. 3 of 9 take more than 1.5 times the median, and 75% of the time;"
        " such a slow step takes 6 ms: device idle time (waiting for the host) 5.14 ms (86%), compute 860 us (14%)."
    )
    table = format_diagnosis(diagnosis).splitlines()
    assert [line.split() for line in table if line.startswith(("host_idle", "total"))] == [
        ["host_idle", "140", "us", "14.0", "%", "5.14", "ms", "85.7", "%"],
        ["total", "1", "ms", "6", "ms"],
    ]


def test_a_median_of_slow_steps_is_said_to_be_above_the_mean():
    diagnosis = diagnose_trace(stalled([6000, 1000, 6000, 1000, 6000, 6000, 1000, 6000]))
    assert diagnosis.window_s == pytest.approx(6e-3)
    assert diagnosis.sentences[1] == (
        "The steps are uneven: their mean is 3.78 ms, and none takes more than 1.5 times the median."
    )


def simple_tables(*, compute: tuple[float, ...], transfer: float, copy: float, idle: float) -> list[EventTable]:
    """Ranks that compute for these times, then reduce together, copy, and are idle for a while."""
    tables = []
    period = max(compute) + transfer + copy + idle
    for rank, own in enumerate(compute):
        timeline = Timeline(rank=rank, world_size=len(compute))
        for i in range(6):
            number, begin = timeline.step(i * period, (i + 1) * period - 1), i * period
            timeline.kernel(begin, own, launched_us=begin - 2, step_id=number)
            timeline.collective(begin + own, max(compute) - own + transfer, step_id=number)
            timeline.copy(begin + max(compute) + transfer, copy, step_id=number)
        tables.append(timeline.table())
    return tables


def diagnose(tables: list[EventTable], **context: Any) -> Diagnosis:
    return diagnose_trace(TraceView(make_set(tables), **context))


@pytest.mark.parametrize(
    ("shape", "cause"),
    [
        ({"compute": (80, 80), "transfer": 10, "copy": 5, "idle": 5}, Cause.COMPUTE),
        ({"compute": (10, 10), "transfer": 80, "copy": 5, "idle": 5}, Cause.EXPOSED_TRANSFER),
        ({"compute": (10, 10), "transfer": 5, "copy": 80, "idle": 5}, Cause.MEMORY_COPIES),
        ({"compute": (10, 10), "transfer": 5, "copy": 5, "idle": 80}, Cause.HOST_IDLE),
        ({"compute": (5, 5, 5, 5, 90), "transfer": 2, "copy": 2, "idle": 2}, Cause.IMBALANCE),
    ],
)
def test_the_bottleneck_is_the_cause_with_the_most_seconds(shape, cause):
    diagnosis = diagnose(simple_tables(**shape))
    assert diagnosis.bottleneck is cause
    assert diagnosis.seconds_by_cause[cause] == max(diagnosis.seconds_by_cause.values())


def test_waiting_for_longer_compute_is_imbalance_and_the_rest_is_waiting():
    diagnosis = diagnose(simple_tables(compute=(20, 60), transfer=10, copy=0.1, idle=10))
    assert diagnosis.seconds_by_rank[0][Cause.IMBALANCE] == pytest.approx(40e-6)
    assert diagnosis.seconds_by_rank[0][Cause.EXPOSED_WAIT] == pytest.approx(0, abs=1e-12)
    assert diagnosis.seconds_by_rank[0][Cause.EXPOSED_TRANSFER] == pytest.approx(10e-6)


def sleepy_tables() -> list[EventTable]:
    """Rank 2 sleeps 50 us before the reduction of each step."""
    tables = []
    for rank in range(4):
        sleep = 50 if rank == 2 else 0
        timeline = Timeline(rank=rank, world_size=4)
        for i in range(6):
            number, begin = timeline.step(i * 120, i * 120 + 110), i * 120
            timeline.kernel(begin, 40, launched_us=begin - 2, step_id=number)
            launch = timeline.add(Kind.RUNTIME, begin + 10 + sleep, 1, "cudaLaunchKernel", device=-1)
            timeline.collective(begin + 40 + sleep, 70 - sleep, step_id=number, launch=launch)
        tables.append(timeline.table())
    return tables


def test_the_sentences_name_the_slow_rank_and_what_delays_it():
    diagnosis = diagnose(sleepy_tables())
    assert diagnosis.worst_rank == 2
    assert diagnosis.seconds_by_rank[0][Cause.EXPOSED_WAIT] == pytest.approx(50e-6)
    assert diagnosis.seconds_by_rank[2][Cause.HOST_IDLE] == pytest.approx(60e-6)
    text = " ".join(diagnosis.sentences)
    assert "The other ranks wait for rank 2, the last to arrive in 6 of 6 collectives" in text
    assert "it has 50 us more device idle time (waiting for the host) than their mean." in text


def test_top_kernels_and_collectives_have_seconds_per_step():
    diagnosis = diagnose(simple_tables(compute=(60, 60), transfer=20, copy=5, idle=15))
    assert [(k.name, round(k.seconds * 1e6, 3)) for k in diagnosis.top_kernels] == [("gemm", 60.0)]
    (collective,) = diagnosis.top_collectives
    assert (collective.name, collective.count) == ("all_reduce (0)", 1.0)
    assert collective.seconds == pytest.approx(20e-6)


def test_point_to_point_and_idle_time_of_a_stage_are_the_bubble():
    tables = []
    for rank in range(2):
        timeline = Timeline(rank=rank, world_size=2)
        for i in range(6):
            number, begin = timeline.step(i * 100, i * 100 + 99), i * 100
            timeline.kernel(begin, 40, step_id=number)
            timeline.collective(begin + 40, 25, CollectiveKind.RECV, 100, peer=1 - rank, step_id=number)
            timeline.collective(begin + 65, 5, CollectiveKind.ALL_REDUCE, 100, step_id=number)
        tables.append(timeline.table())
    diagnosis = diagnose(tables, config=Config(pp=2))
    assert diagnosis.seconds_by_cause[Cause.BUBBLE] == pytest.approx(55e-6)
    assert diagnosis.seconds_by_cause[Cause.HOST_IDLE] == 0


def test_one_rank_says_that_exposed_transfer_includes_waiting():
    diagnosis = diagnose(sleepy_tables()[:1])
    assert diagnosis.worst_rank is None
    assert diagnosis.reason is Reason.RANKS_MISSING
    assert diagnosis.seconds_by_cause[Cause.EXPOSED_WAIT] == 0
    assert any("includes waiting" in sentence for sentence in diagnosis.sentences)


def test_without_steps_the_window_is_the_file_and_a_sentence_says_so():
    timeline = Timeline()
    timeline.kernel(0, 30)
    timeline.kernel(90, 10)
    diagnosis = diagnose([timeline.table()])
    assert not diagnosis.is_step
    assert diagnosis.window_s == pytest.approx(100e-6)
    assert diagnosis.sentences[0].startswith("The recorded window (no step markers)")


def test_ranks_without_steps_beside_ranks_with_steps_are_named():
    marked, unmarked = Timeline(0), Timeline(1)
    for timeline, name in ((marked, "gemm"), (unmarked, "copy")):
        number = timeline.step(0, 50) if timeline is marked else -1
        timeline.kernel(10, 30, name, step_id=number)
    trace = TraceView(make_set([marked.table(), unmarked.table()]))
    whose = "no step markers on 1 of 2 ranks: 1"
    assert whose in diagnose_trace(trace).sentences[0]
    assert whose in score_view(trace).metrics["compute_frac"].detail


def test_calls_are_counted_in_whole_digits():
    timeline = Timeline(world_size=2)
    for i in range(1310):
        timeline.collective(20 * i, 10)
    assert any("1310 calls" in sentence for sentence in diagnose([timeline.table()]).sentences)


def test_collectives_of_unknown_size_that_differ_are_described_in_words():
    timelines = [Timeline(rank, 2) for rank in range(2)]
    for timeline, kind in zip(timelines, (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL), strict=True):
        timeline.collective(0, 10, kind, None)
    wait = score_view(TraceView(make_set([timeline.table() for timeline in timelines]))).metrics["comm_wait_frac"]
    assert "is all_reduce on rank 0, all_to_all on rank 1" in wait.detail


def test_without_device_events_there_is_no_diagnosis():
    timeline = Timeline()
    timeline.add(Kind.CPU_OP, 0, 5, "aten::mm", device=-1)
    with pytest.raises(NotAvailable):
        diagnose([timeline.table()])
    assert score_view(TraceView(make_set([timeline.table()]))).diagnosis is None


def test_control_characters_and_markup_in_trace_names_are_removed():
    timeline = Timeline(world_size=2)
    timeline.kernel(0, 30, "evil\x1b[2J<script>alert(1)</script>&\u202e")
    timeline.collective(30, 10, group="<b>\x07", group_desc="<script>")
    trace = TraceView(make_set([timeline.table()]))
    diagnosis = diagnose_trace(trace)
    text = " ".join(diagnosis.sentences)
    assert "\x1b" not in text
    assert "\u202e" not in text
    for chart in (draw_breakdown(diagnosis), draw_timeline(find_lanes(trace))):
        assert chart is not None
        picture = render_svg(chart)
        assert "<script" not in picture
        ElementTree.fromstring(picture)


def test_charts_show_every_rank_with_bars_as_long_as_its_step():
    trace = TraceView(make_set(sleepy_tables()))
    diagnosis = diagnose_trace(trace)
    chart = draw_breakdown(diagnosis)
    bars: dict[str, float] = {}
    for row in chart.spec["data"]["values"]:
        bars[row["bar"]] = bars.get(row["bar"], 0.0) + row["v"]
    assert {name.rstrip(" *") for name in bars} == {f"rank {rank}" for rank in range(4)}
    assert list(bars.values()) == [pytest.approx(1e3 * diagnosis.window_s)] * 4
    timeline = draw_timeline(find_lanes(trace))
    assert {row["rank"] for row in timeline.spec["data"]["values"]} == set(range(4))


def test_median_causes_add_up_to_the_median_of_an_even_number_of_steps():
    trace = TraceView(make_set(random_tables(7, num_ranks=1, num_steps=4)))
    seconds = median_causes(trace)[0]
    assert sum(seconds.values()) == pytest.approx(METRICS.get("trace_step_time")(trace).value, rel=1e-9)


def test_the_diagnosis_says_why_waiting_cannot_be_separated():
    tables = []
    for rank, calls in ((0, 3), (1, 2)):
        timeline = Timeline(rank=rank, world_size=2)
        for i in range(3):
            number = timeline.step(i * 100, i * 100 + 50)
            timeline.kernel(i * 100, 10, step_id=number)
            if i < calls:
                timeline.collective(i * 100 + 10, 10, step_id=number)
        tables.append(timeline.table())
    last = diagnose_trace(TraceView(make_set(tables))).sentences[-1]
    assert last.endswith("separating the two (process group '0': 3 collectives on rank 0, 2 on rank 1).")


def test_operators_of_cpus_are_not_called_kernels_and_their_idle_time_waits_for_no_host():
    timeline = Timeline()
    for i in range(3):
        number = timeline.step(i * 100, i * 100 + 100)
        timeline.kernel(i * 100, 40, "aten::" + "very_long_name_" * 8, step_id=number)
    cpu, device = (
        " ".join(diagnose_trace(TraceView(make_set([timeline.table(accelerator=kind)]))).sentences)
        for kind in ("cpu", "gpu")
    )
    assert "idle time 60 us (60%)" in cpu
    assert "Operators with the most compute time" in cpu
    assert "host" not in cpu
    assert "device idle time" in device
    assert "Kernels with the most compute time" in device
    assert max(map(len, cpu.split())) <= 70
