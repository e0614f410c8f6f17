"""What idle time, waiting and the critical path are attributed to, also with events of duration 0."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_measures import measure
from trace_tables import Timeline, make_set

from cclsearch.trace.diagnosis.causes import Cause
from cclsearch.trace.diagnosis.critical_path import walk_critical_path
from cclsearch.trace.events import EventTable, Kind, Reason
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.score import Diagnosis, diagnose_trace
from cclsearch.trace.view import TraceView
from cclsearch.trace.whatif.graph import build_graph
from cclsearch.trace.whatif.projection import Scenario, prepare_replay


def queued(kernels: list[tuple[float, float]], steps: int = 6, period_us: float = 100) -> EventTable:
    """Steps of kernels (start, duration) that are all launched as the step begins, and a marker for each step."""
    timeline = Timeline()
    for i in range(steps):
        number, begin = timeline.step(i * period_us, i * period_us + 5), i * period_us
        for start, duration in kernels:
            timeline.kernel(begin + start, duration, launched_us=begin - 1, step_id=number)
    return timeline.table()


def diagnose(*tables: EventTable) -> Diagnosis:
    return diagnose_trace(TraceView(make_set(tables)))


def test_the_critical_path_passes_events_of_duration_0():
    path = measure([queued([(0, 40), (40, 0), (40, 0), (40, 30), (70, 0), (70, 30)])], "critical_path")
    assert path.value == pytest.approx(1.0)
    assert path.inputs["path_s"] == pytest.approx(100e-6)


def test_a_replay_keeps_the_order_around_events_of_duration_0():
    replay = prepare_replay(TraceView(make_set([queued([(0, 40), (40, 0), (40, 0), (40, 30), (70, 0), (70, 30)])])))
    assert replay.time(Scenario(compute=0.5)).low_s == pytest.approx(200e-6)
    assert replay.time(Scenario(compute=0.25)).high_s == pytest.approx(400e-6)


def test_only_the_first_event_of_a_stream_has_no_event_before():
    trace = TraceView(make_set([queued([(0, 40), (40, 0), (40, 0), (40, 30), (70, 30)], steps=1)]))
    graph = build_graph(trace, trace.ranks[0], (0, 100_000), 0)
    assert graph.before.tolist() == [-1, 0, 1, 2, 3]


def test_events_of_duration_0_on_two_streams_do_not_wait_for_each_other():
    timeline = Timeline()
    for stream in (7, 8):
        timeline.kernel(0, 10, stream=stream)
        timeline.kernel(50, 0, stream=stream)
    trace = TraceView(make_set([timeline.table()]))
    graph = build_graph(trace, trace.ranks[0], (0, 100_000), 0)
    later = [(i, int(j)) for i, j in enumerate(graph.waited) if j >= i]
    assert later == []


events = st.tuples(
    st.integers(0, 200), st.sampled_from([0, 0, 1, 7, 40]), st.sampled_from([7, 8]), st.none() | st.integers(-60, 10)
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(events, min_size=1, max_size=12), min_size=1, max_size=3), st.booleans())
def test_the_critical_path_accounts_for_the_whole_window(ranks, comm):
    tables = []
    for rank, rows in enumerate(ranks):
        timeline = Timeline(rank=rank, world_size=len(ranks))
        for start, duration, stream, lag in rows:
            launched = {} if lag is None else {"launched_us": start + lag}
            timeline.kernel(start, duration, stream=stream, **launched)
        if comm:
            for k in range(3):
                timeline.collective(100 * k + 20 * rank, 150 - 20 * rank)
        tables.append(timeline.table())
    trace = TraceView(make_set(tables))
    window = max(int(view.parts.window_ns_W.max(initial=0)) for view in trace.ranks.values())
    if window:
        assert sum(walk_critical_path(trace).values()) == window
    else:
        with pytest.raises(NotAvailable):
            walk_critical_path(trace)


def test_idle_time_is_the_hosts_only_if_the_launch_came_after_it_began():
    timeline = Timeline()
    for i in range(6):
        number, begin = timeline.step(i * 400, i * 400 + 10), i * 400
        timeline.kernel(begin, 100, launched_us=begin - 2, step_id=number)
        timeline.kernel(begin + 120, 80, launched_us=begin + 1, step_id=number)  # 20 us after it could start
        timeline.kernel(begin + 260, 40, launched_us=begin + 2, step_id=number)  # 60 us, launched long before
        timeline.kernel(begin + 370, 30, launched_us=begin + 350, step_id=number)  # 70 us, launched late
    table = timeline.table()
    diagnosis = diagnose(table)
    idle = {cause: diagnosis.seconds_by_cause[cause] for cause in Cause if cause.endswith("idle")}
    assert idle == {
        Cause.HOST_IDLE: pytest.approx(70e-6),
        Cause.LAUNCH_IDLE: pytest.approx(20e-6),
        Cause.UNKNOWN_IDLE: pytest.approx(60e-6),
    }
    assert "device idle time (cause unknown) 60 us (15%)" in diagnosis.sentences[0]
    shares = measure([table], "idle_cause").inputs["diagnosed"]
    assert shares == {"host": pytest.approx(7 / 15), "launch": pytest.approx(2 / 15), "unknown": pytest.approx(6 / 15)}
    path = measure([table], "critical_path").inputs
    assert path["host_share"] == pytest.approx(370 / 400)  # no synchronization: the host never waited for the device
    assert path["idle_share"] == 0


def test_a_gap_before_work_that_was_already_launched_is_not_the_hosts_on_the_path():
    path = measure([queued([(0, 40), (80, 20)])], "critical_path").inputs
    assert (path["host_share"], path["idle_share"]) == pytest.approx((0.0, 0.4))


def test_without_launch_records_the_cause_of_idle_time_is_unknown():
    timeline = Timeline()
    timeline.kernel(0, 30)
    timeline.kernel(90, 10)
    diagnosis = diagnose(timeline.table())
    assert diagnosis.seconds_by_cause[Cause.UNKNOWN_IDLE] == pytest.approx(60e-6)
    assert "waiting for the host" not in " ".join(diagnosis.sentences)


def lonely(rank: int, length_us: float, kernel: str = "gemm") -> EventTable:
    """A rank that communicates with nobody, recorded for this long."""
    timeline = Timeline(rank=rank)
    timeline.kernel(0, length_us / 2, kernel)
    timeline.kernel(length_us * 0.75, length_us / 4, kernel)
    return timeline.table()


def test_ranks_without_common_collectives_or_steps_do_not_wait():
    diagnosis = diagnose(lonely(0, 100), lonely(1, 160), lonely(2, 80))
    assert diagnosis.seconds_by_cause[Cause.IMBALANCE] == 0
    assert diagnosis.worst_rank is None
    assert diagnosis.window_s == pytest.approx(160e-6) == pytest.approx(sum(diagnosis.seconds_by_cause.values()))
    text = " ".join(diagnosis.sentences)
    assert "wait for rank" not in text
    assert "imbalance" not in text
    assert "of rank 1, the longest of 3 ranks," in text


def test_lengths_of_single_steps_are_not_an_imbalance():
    tables = []
    for rank, begin in enumerate((0, 60)):  # rank 0 began to record earlier
        timeline = Timeline(rank=rank, world_size=2)
        number = timeline.step(begin, 150)
        timeline.kernel(begin, 10, launched_us=begin, step_id=number)
        timeline.kernel(70, 10, launched_us=69, step_id=number)
        timeline.collective(80, 20, step_id=number)
        tables.append(timeline.table())
    diagnosis = diagnose(*tables)
    assert diagnosis.window_s == pytest.approx(100e-6)
    assert diagnosis.seconds_by_cause[Cause.IMBALANCE] == 0
    assert diagnosis.shown_rank == 0


def test_imbalance_compares_ranks_that_recorded_the_same_work():
    same = measure([lonely(0, 100), lonely(1, 160)], "compute_imbalance")
    assert same.value == pytest.approx(160 / 130 - 1)
    other = measure([lonely(0, 100), lonely(1, 160, "softmax")], "compute_imbalance")
    assert (other.value, other.reason) == (None, Reason.NO_COMM_EVENTS)


def test_a_rank_that_only_copies_has_another_role():
    copying = Timeline(rank=2)
    copying.copy(0, 10)
    found = measure([lonely(0, 100), lonely(1, 160), copying.table()], "compute_imbalance")
    assert found.value == pytest.approx(160 / 130 - 1)
    assert "without rank 2" in found.detail


def test_the_sentence_says_if_another_rank_is_late_more_often():
    tables = []
    for rank in range(2):
        timeline = Timeline(rank=rank, world_size=2)
        for i in range(6):
            number, begin = timeline.step(i * 200, i * 200 + 190), i * 200
            timeline.kernel(begin, 10, step_id=number)
            for k in range(3):
                late = (50 if rank == 0 else 0) if k == 0 else (5 if rank == 1 else 0)
                most = 50 if k == 0 else 5
                timeline.collective(begin + 15 + 60 * k + late, most - late + 5, step_id=number)
        tables.append(timeline.table())
    text = " ".join(diagnose(*tables).sentences)
    assert "wait for rank 0, the last to arrive in 6 of 18 collectives (rank 1: 12, with shorter waits)" in text


def test_a_copy_of_duration_0_adds_no_time():
    timeline = Timeline()
    timeline.add(Kind.MEMSET, 0, 0, "Memset (Device)")
    timeline.kernel(0, 50)
    assert sum(diagnose(timeline.table()).seconds_by_cause.values()) == pytest.approx(50e-6)
