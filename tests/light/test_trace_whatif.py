"""What-if projections compared with independent simulations of the other hardware."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from trace_tables import Timeline, make_set

from cclsearch.trace.events import CollectiveKind, EventTable, Kind
from cclsearch.trace.metric import NotAvailable
from cclsearch.trace.metrics.steps import measure_step_time
from cclsearch.trace.view import TraceView
from cclsearch.trace.whatif.projection import Scenario, WhatIf, prepare_replay


def ask_what_if(trace: TraceView, scenario: Scenario, ranks_per_domain: int | None = None) -> WhatIf:
    return prepare_replay(trace, ranks_per_domain).time(scenario)


@dataclass(frozen=True)
class Machine:
    """A data-parallel step: layers of backward whose gradients are reduced on another stream, then the optimizer."""

    num_ranks: int = 4
    alpha_us: float = 10.0
    us_per_mib: float = 40.0
    compute_us: tuple[float, ...] = (60.0, 80.0, 50.0, 90.0)
    sizes_mib: tuple[int, ...] = (1, 2, 4, 1)
    optimizer_us: float = 30.0
    slow_rank_factor: float = 1.0
    """Factor by which rank 1 computes longer."""
    compute_speed: float = 1.0
    steps: int = 6


def simulate(machine: Machine) -> list[EventTable]:
    """Return event tables of a run; every kernel is queued early, so that the device never waits for the host."""
    timelines = [Timeline(rank=rank, world_size=machine.num_ranks) for rank in range(machine.num_ranks)]
    now = [0.0] * machine.num_ranks
    for i in range(machine.steps):
        numbers = [timeline.step(i * 50.0, i * 50.0 + 45) for timeline in timelines]
        wire_free = 0.0
        issued = i * 50.0
        for compute, size in zip(machine.compute_us, machine.sizes_mib, strict=True):
            for rank, timeline in enumerate(timelines):
                own = compute / machine.compute_speed * (machine.slow_rank_factor if rank == 1 else 1.0)
                timeline.kernel(now[rank], own, launched_us=issued, step_id=numbers[rank])
                now[rank] += own
            arrive = [max(t, wire_free) for t in now]
            wire_free = max(arrive) + machine.alpha_us + machine.us_per_mib * size
            for rank, timeline in enumerate(timelines):
                launch = timeline.add(Kind.RUNTIME, issued + 1, 1, "cudaLaunchKernel", device=-1)
                timeline.collective(
                    arrive[rank],
                    wire_free - arrive[rank],
                    message_bytes=size << 20,
                    step_id=numbers[rank],
                    launch=launch,
                )
            issued += 2
        for rank, timeline in enumerate(timelines):
            start = max(now[rank], wire_free)
            own = machine.optimizer_us / machine.compute_speed
            timeline.kernel(start, own, "adam", launched_us=issued, step_id=numbers[rank])
            now[rank] = start + own
    return [timeline.table() for timeline in timelines]


def view_of(machine: Machine) -> TraceView:
    return TraceView(make_set(simulate(machine)))


def step_of(machine: Machine) -> float:
    return measure_step_time(view_of(machine)).value


MACHINES = {
    "exposed": Machine(),
    "hidden": Machine(us_per_mib=2.0),
    "straggler": Machine(slow_rank_factor=1.7),
    "latency": Machine(alpha_us=120.0, us_per_mib=5.0),
    "two ranks": Machine(num_ranks=2, sizes_mib=(8, 1, 2, 16)),
}


@pytest.mark.parametrize("name", MACHINES)
def test_an_unchanged_scenario_gives_the_measured_step_time(name):
    answer = ask_what_if(view_of(MACHINES[name]), Scenario())
    assert answer.step_time_s == pytest.approx(step_of(MACHINES[name]))
    assert (answer.low_s, answer.high_s) == (pytest.approx(answer.step_time_s), pytest.approx(answer.step_time_s))


@pytest.mark.parametrize("factor", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("name", MACHINES)
def test_another_bandwidth_agrees_with_its_simulation(name, factor):
    machine = MACHINES[name]
    answer = ask_what_if(view_of(machine), Scenario(scale_up_bw=factor))
    truth = step_of(replace(machine, us_per_mib=machine.us_per_mib / factor))
    assert answer.low_s == pytest.approx(truth, rel=0.01)
    assert answer.high_s == pytest.approx(truth, rel=0.01)


@pytest.mark.parametrize("name", MACHINES)
def test_faster_compute_agrees_with_its_simulation(name):
    answer = ask_what_if(view_of(MACHINES[name]), Scenario(compute=2.0))
    truth = step_of(replace(MACHINES[name], compute_speed=2.0))
    assert answer.low_s == pytest.approx(truth, rel=0.01)


def test_compression_shrinks_messages_and_adds_coding_time():
    machine = Machine()
    answer = ask_what_if(view_of(machine), Scenario(compress_ratio=4.0, compress_cost_s_per_byte=5e-6 / (1 << 20)))
    truth = step_of(replace(machine, us_per_mib=machine.us_per_mib / 4 + 5))
    assert answer.low_s == pytest.approx(truth, rel=0.01)


def test_a_missing_coding_cost_is_noted():
    tables = [
        replace(t, collectives=tuple(replace(c, in_bytes=None) for c in t.collectives)) for t in simulate(Machine())
    ]
    replay = prepare_replay(TraceView(make_set(tables)))
    cost = Scenario(compress_ratio=4.0, compress_cost_s_per_byte=1.0, algorithm="tree")
    notes = replay.time(cost).notes
    assert any("16 of 16 collectives have no recorded message size" in note for note in notes)
    assert any("assumed to be a ring" in note for note in notes)  # both notes are shown
    assert not any("coding" in note for note in replay.time(Scenario(compress_ratio=4.0)).notes)
    assert not any("coding" in note for note in prepare_replay(view_of(Machine())).time(cost).notes)


def test_a_tree_has_fewer_hops_and_more_bytes_than_a_ring():
    machine = Machine(num_ranks=8, alpha_us=140.0, us_per_mib=35.0)
    answer = ask_what_if(view_of(machine), Scenario(algorithm="tree"))
    truth = step_of(replace(machine, alpha_us=140.0 * 6 / 14, us_per_mib=35.0 * 2 / (2 * 7 / 8)))
    assert answer.low_s == pytest.approx(truth, rel=0.01)
    assert any("assumed to be a ring" in note for note in answer.notes)


def test_links_between_domains_matter_only_to_groups_across_domains():
    replay = prepare_replay(view_of(Machine(num_ranks=4)), ranks_per_domain=2)
    assert replay.time(Scenario(scale_up_bw=2.0)).low_s == pytest.approx(replay.step_time_s)
    assert replay.time(Scenario(scale_out_bw=2.0)).low_s < 0.95 * replay.step_time_s


def test_a_wider_domain_with_unknown_bandwidth_is_noted():
    replay = prepare_replay(view_of(Machine(num_ranks=4)), ranks_per_domain=2)
    answer = replay.time(Scenario(scale_up_domain=4, scale_up_bw=2.0))
    assert answer.low_s == pytest.approx(replay.time(Scenario(scale_out_bw=2.0)).low_s)
    assert any("assumed to be equal" in note for note in answer.notes)


def test_too_few_sizes_give_bounds_around_the_true_value():
    machine = Machine(sizes_mib=(2, 2, 2, 2), alpha_us=40.0)
    answer = ask_what_if(view_of(machine), Scenario(scale_up_bw=2.0))
    truth = step_of(replace(machine, us_per_mib=machine.us_per_mib / 2))
    assert answer.low_s < truth < answer.high_s
    assert answer.high_s == pytest.approx(answer.step_time_s)
    assert any("too few message sizes" in note for note in answer.notes)


def test_one_rank_gives_bounds_around_the_true_value():
    machine = Machine(slow_rank_factor=1.7)
    alone = TraceView(make_set(simulate(machine)[:1]))
    answer = ask_what_if(alone, Scenario(scale_up_bw=2.0))
    truth = step_of(replace(machine, us_per_mib=machine.us_per_mib / 2))
    assert answer.low_s <= truth <= answer.high_s
    assert any("one rank does not separate" in note for note in answer.notes)


def test_a_host_bound_step_gains_nothing_from_faster_compute():
    timeline = Timeline()
    for i in range(6):
        number = timeline.step(i * 100, i * 100 + 99)
        for k in range(5):
            timeline.kernel(i * 100 + 20 * k, 5, launched_us=i * 100 + 20 * k - 3, step_id=number)
    answer = ask_what_if(TraceView(make_set([timeline.table()])), Scenario(compute=4.0))
    assert answer.low_s == pytest.approx(100e-6, rel=0.05)


def test_launches_after_a_synchronization_move_with_the_device():
    """Each kernel is launched after a synchronization on the previous one."""
    timeline = Timeline()
    for i in range(6):
        number = timeline.step(i * 100, i * 100 + 99)
        for k in range(5):
            begin = i * 100 + 20 * k
            timeline.kernel(begin, 16, launched_us=begin - 2, step_id=number)
            timeline.add(Kind.RUNTIME, begin + 1, 16, "cudaDeviceSynchronize", device=-1)
    answer = ask_what_if(TraceView(make_set([timeline.table()])), Scenario(compute=2.0))
    assert answer.low_s == pytest.approx(60e-6, rel=0.05)


def test_utilities_rank_the_limiting_resource_first():
    exposed = prepare_replay(view_of(Machine(us_per_mib=200.0))).utilities()
    assert max(exposed, key=lambda name: exposed[name].gain_low) == "scale_up_bw"
    busy = prepare_replay(view_of(Machine(us_per_mib=1.0, alpha_us=1.0))).utilities()
    assert max(busy, key=lambda name: busy[name].gain_low) == "compute"
    assert busy["scale_out_bw"].gain_high == pytest.approx(0)


def test_a_replayed_step_that_is_not_the_median_is_noted():
    timeline = Timeline()
    for i, begin in enumerate((0, 100, 220, 320)):
        number = timeline.step(begin, begin + 90)
        timeline.kernel(begin, 50, launched_us=begin - 1, step_id=number)
        timeline.collective(begin + 50, 20 + i, CollectiveKind.ALL_REDUCE, step_id=number)
    answer = ask_what_if(TraceView(make_set([timeline.table()])), Scenario())
    assert any("scaled to the median" in note for note in answer.notes)


def test_without_steps_the_whole_file_is_replayed_and_a_note_says_so():
    timeline = Timeline()
    for i in range(4):
        timeline.kernel(20 * i, 20, launched_us=0)
    replay = prepare_replay(TraceView(make_set([timeline.table()])))
    answer = replay.time(Scenario(compute=2.0))
    assert not replay.is_step
    assert (answer.step_time_s, answer.high_s) == (pytest.approx(80e-6), pytest.approx(40e-6))
    assert any("no step markers: the whole file" in note for note in answer.notes)


def test_without_device_events_that_take_time_there_is_no_projection():
    timeline = Timeline()
    timeline.kernel(0, 0)
    with pytest.raises(NotAvailable):
        ask_what_if(TraceView(make_set([timeline.table()])), Scenario())


def test_a_gain_of_0_is_explained_by_the_hosts_launches():
    timeline = Timeline()
    for i in range(20):
        timeline.kernel(20 * i, 19.9, launched_us=20 * i)
    late = prepare_replay(TraceView(make_set([timeline.table()])))
    doubled = late.time(Scenario(compute=2.0))
    assert doubled.gain_high == pytest.approx(9.95 / 399.9, abs=1e-3)
    timeline.kernel(400, 1, launched_us=399.9)
    bound = prepare_replay(TraceView(make_set([timeline.table()]))).time(Scenario(compute=2.0))
    assert any("the host's launches bound the window" in note for note in bound.notes)
    queued = Timeline()
    for i in range(20):
        queued.kernel(20 * i, 20, launched_us=0)
    halved = prepare_replay(TraceView(make_set([queued.table()]))).time(Scenario(compute=2.0))
    assert not any("launches" in note for note in halved.notes)


def test_a_replay_that_deviates_from_the_measured_step_says_by_how_much():
    timelines = [Timeline(rank=rank, world_size=2) for rank in range(2)]
    for i in range(6):
        for rank, timeline in enumerate(timelines):
            number = timeline.step(i * 100, i * 100 + 90)
            timeline.kernel(i * 100, 40, step_id=number)
            timeline.collective(i * 100 + 40 + 30 * rank, 60 - 30 * rank, step_id=number)
    exact = prepare_replay(TraceView(make_set([timeline.table() for timeline in timelines])))
    assert not any("of the measured time" in note for note in exact.time(Scenario()).notes)
    cut = replace(exact, window_s=exact.window_s * 1.25)
    assert any("takes 80 % of the measured time" in note for note in cut.time(Scenario()).notes)


def simulate_pipeline(stage_us: float, transfer_us: float, micro_batches: int = 4) -> list[EventTable]:
    """Two stages: the first computes and sends each micro-batch, the second waits for it; then both reduce."""
    timelines = [Timeline(rank=rank, world_size=2) for rank in range(2)]
    base = 0.0
    for i in range(6):
        numbers = [timeline.step(i * 5.0, i * 5.0 + 4) for timeline in timelines]
        sender = receiver = base
        for _ in range(micro_batches):
            timelines[0].kernel(sender, stage_us, launched_us=i * 5.0, step_id=numbers[0])
            sender += stage_us
            ends = max(sender, receiver) + transfer_us
            for rank, (kind, start) in enumerate(((CollectiveKind.SEND, sender), (CollectiveKind.RECV, receiver))):
                launch = timelines[rank].add(Kind.RUNTIME, i * 5.0, 1, "cudaLaunchKernel", device=-1)
                timelines[rank].collective(
                    start,
                    ends - start,
                    kind,
                    1 << 20,
                    group_ranks=(0, 1),
                    stream=7,
                    step_id=numbers[rank],
                    launch=launch,
                )
            sender = ends
            timelines[1].kernel(ends, stage_us, launched_us=i * 5.0, step_id=numbers[1])
            receiver = ends + stage_us
        base = max(sender, receiver) + 1
        for rank, start in enumerate((sender, receiver)):
            launch = timelines[rank].add(Kind.RUNTIME, i * 5.0 + 1, 1, "cudaLaunchKernel", device=-1)
            timelines[rank].collective(
                start, base - start, message_bytes=4, stream=7, step_id=numbers[rank], launch=launch
            )
    return [timeline.table() for timeline in timelines]


@pytest.mark.parametrize(("stage_us", "transfer_us"), [(40.0, 10.0), (10.0, 40.0)])
def test_a_pipeline_is_replayed_with_its_messages(stage_us, transfer_us):
    trace = TraceView(make_set(simulate_pipeline(stage_us, transfer_us)))
    truth = measure_step_time(TraceView(make_set(simulate_pipeline(stage_us / 2, transfer_us)))).value
    answer = ask_what_if(trace, Scenario(compute=2.0))
    assert answer.low_s == pytest.approx(truth, rel=0.01)
    assert answer.high_s == pytest.approx(truth, rel=0.01)
    faster = measure_step_time(TraceView(make_set(simulate_pipeline(stage_us, transfer_us / 2)))).value
    bounds = ask_what_if(trace, Scenario(scale_up_bw=2.0))
    assert bounds.low_s == pytest.approx(faster, rel=0.01)
    assert bounds.high_s == pytest.approx(bounds.step_time_s)
