"""Processes and clocks: identity, ends, and clocks that someone sets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from trials import make_input
from trials import make_job as make_local_job

from cclsearch.core import processes
from cclsearch.core import values as moment
from cclsearch.core.processes import (
    boot_clock_s,
    count_oom_kills,
    find_processes_by_variable,
    measure_load,
    process_age_s,
    read_variables,
    start_ticks,
    terminate_processes,
)
from cclsearch.core.values import BootMoment
from cclsearch.launch.base import JobState
from cclsearch.launch.profile import make_launcher, profile_from_mapping
from cclsearch.launch.tpu_vm import worker

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is read instead of /proc."""
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    return tmp_path


def write_stat(proc: Path, *seconds: float) -> None:
    (proc / "stat").write_text(f"cpu  {' '.join(str(round(s * TICKS)) for s in seconds)}\ncpu0 1 1 1 1\n")


@pytest.mark.parametrize(("field", "cores"), [(n, 0 if n in (3, 4, 8, 9) else 200) for n in range(10)])
def test_the_load_is_all_cpu_time_but_idle_io_wait_and_guests(proc, monkeypatch, field, cores):
    """Fields of `proc_stat(5)`: time of guests is contained in that of users; 400 CPU seconds in 2 seconds."""
    before = [1000.0] * 10
    write_stat(proc, *before)
    clock = iter([50.0, 52.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: 7.0)
    after = [value + 400 * (n == field) for n, value in enumerate(before)]
    monkeypatch.setattr(time, "sleep", lambda _: write_stat(proc, *after))
    assert measure_load() == pytest.approx(cores)


def test_the_own_cpu_time_is_no_load_and_a_load_is_not_negative(proc, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: write_stat(proc, 106, *[0.0] * 9))
    for own_s, cores in ((4.0, 1.0), (20.0, 0.0)):
        write_stat(proc, 100, *[0.0] * 9)
        used, clock = iter([1.0, 1.0 + own_s]), iter([50.0, 52.0])
        monkeypatch.setattr(time, "process_time", lambda used=used: next(used))
        monkeypatch.setattr(time, "monotonic", lambda clock=clock: next(clock))
        assert measure_load() == pytest.approx(cores)


def test_nothing_is_said_without_proc(proc, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert measure_load() is None
    assert count_oom_kills() == 0
    assert start_ticks(os.getpid()) is None
    assert find_processes_by_variable("CCL_RUN", "") == {}


def test_processes_that_the_kernel_killed_for_memory_are_counted(proc):
    (proc / "vmstat").write_text("pgfault 9\noom_kill_x 8\noom_kill 3\n")
    assert count_oom_kills() == 3


def write_process(proc: Path, pid: int, state: str, environ: bytes) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "environ").write_bytes(environ)
    fields = " ".join(str(n) for n in range(4, 30))
    (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) {state} {fields}\n")


def test_a_process_is_found_by_its_variables_and_a_zombie_is_none(proc):
    write_process(proc, 11, "S", b"HOME=/h\0CCL_RUN=/runs/a=b/trials\0CCL_JOB=j")
    write_process(proc, 12, "Z", b"CCL_RUN=/runs/a=b/trials")
    write_process(proc, 13, "X", b"CCL_RUN=/runs/a=b/trials")
    write_process(proc, 14, "R", b"CCL_RUN=/runs/other")
    write_process(proc, 15, "R", b"CCL_JOB=/runs/a=b")
    write_process(proc, 16, "R", b"RUN=/runs/a=b")
    assert find_processes_by_variable("CCL_RUN", "/runs/a=b") == {11: {"CCL_RUN": "/runs/a=b/trials", "CCL_JOB": "j"}}
    assert (start_ticks(11), start_ticks(12), start_ticks(13)) == (22, None, None), "field 22 of `proc_pid_stat(5)`"
    assert read_variables(16) == {}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_a_process_that_ignores_sigterm_is_killed_and_another_one_with_its_id_is_not():
    code = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", code], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        ticks = start_ticks(child.pid)
        assert ticks is not None
        processes._signal_all({child.pid: ticks + 1}, signal.SIGKILL)
        assert child.poll() is None, "another start time is another process"
        assert terminate_processes([child.pid, os.getpid()], grace_s=0.1), "the caller itself is left alone"
        assert child.wait(60) == -signal.SIGKILL


STEP_S = 7200.0


@pytest.fixture
def step_clock(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the wall clock of this process by some seconds."""
    real = time.time

    def step(by_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + by_s)

    return step


@pytest.mark.parametrize("by_s", [STEP_S, -STEP_S])
def test_a_moment_counts_by_the_boot_clock_and_after_a_restart_by_the_wall_clock(step_clock, monkeypatch, by_s):
    then = BootMoment.now()
    step_clock(by_s)
    assert 0 <= then.elapsed_s() < 60
    monkeypatch.setattr(moment, "boot_id", lambda: "the next boot")
    assert then.elapsed_s() == pytest.approx(max(0.0, by_s), abs=60)


def test_the_age_of_a_process_is_counted_from_its_start():
    with subprocess.Popen(["sleep", "60"]) as child:
        ticks = start_ticks(child.pid)
        assert ticks is not None
        starts = []
        for pause_s in (0.0, 0.3):
            time.sleep(pause_s)
            before_s, age_s, after_s = boot_clock_s(), process_age_s(ticks), boot_clock_s()
            assert 0 <= age_s < 30
            starts.append((before_s - age_s, after_s - age_s))
        child.kill()
    latest_low, earliest_high = max(low for low, _ in starts), min(high for _, high in starts)
    assert latest_low <= earliest_high + 0.01, "one start, however long the machine paused between two readings"


@pytest.mark.parametrize("by_s", [STEP_S, -STEP_S])
def test_a_local_trial_is_not_ended_when_the_clock_is_set(project, step_clock, by_s):
    """Also not by a search that was resumed after the step."""
    (project / "launchers").mkdir()
    (project / "launchers" / "mine.py").write_text("import time; time.sleep(600)")
    knobs = [{"name": "tp", "choices": [1, 2]}]
    framework = yaml.safe_dump({"script": "mine.py", "runner": "process", "knobs": knobs})
    (project / "launchers" / "mine.framework.yaml").write_text(framework)
    profile = profile_from_mapping({"launcher": "local", "python": sys.executable}, name="here")
    folder = project / "runs" / "run"
    launcher = make_launcher(profile, framework="mine", run_dir=folder)
    job = make_local_job(folder / "trials" / "0001", make_input({"tp": 2}, run_id="run"), timeout_s=1800.0)
    handles = launcher.submit([job])
    try:
        step_clock(by_s)
        assert launcher.poll(handles)[0].state is JobState.RUNNING
        resumed = make_launcher(profile, framework="mine", run_dir=folder)
        [status] = resumed.poll(resumed.find("run"))
        assert (status.state, status.failure) == (JobState.RUNNING, None)
    finally:
        launcher.cancel(handles)


def test_a_worker_of_a_tpu_slice_counts_by_the_boot_clock(tmp_path, step_clock):
    (tmp_path / "trial").mkdir()
    with subprocess.Popen(["sleep", "0.5"]) as script:
        step_clock(STEP_S)
        assert worker.watch(script, tmp_path, 1800.0) == "finished"
    with subprocess.Popen(["sleep", "60"]) as script:
        real = time.time
        steps = iter(range(10**6))
        time.time = lambda: real() - STEP_S * next(steps)  # a clock that runs backwards never reaches a deadline
        try:
            assert worker.watch(script, tmp_path, 0.3) == "timeout"
        finally:
            time.time = real
        script.kill()
