"""What is read from /proc: the load of other processes, kills for memory, and a process by its start time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cclsearch.core import processes
from cclsearch.core.processes import (
    count_oom_kills,
    find_processes_by_variable,
    measure_load,
    read_variables,
    start_ticks,
    terminate_processes,
)

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is read instead of /proc."""
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    return tmp_path


def write_stat(proc: Path, *seconds: float) -> None:
    (proc / "stat").write_text(f"cpu  {' '.join(str(round(s * TICKS)) for s in seconds)}\ncpu0 1 1 1 1\n")


@pytest.mark.parametrize(("field", "cores"), [(n, 0 if n in (3, 4, 8, 9) else 200) for n in range(10)])
def test_the_load_is_all_cpu_time_but_idle_io_wait_and_guests(
    proc: Path, monkeypatch: pytest.MonkeyPatch, field: int, cores: float
) -> None:
    """Fields of `proc_stat(5)`: time of guests is contained in that of users; 400 CPU seconds in 2 seconds."""
    before = [1000.0] * 10
    write_stat(proc, *before)
    clock = iter([50.0, 52.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "process_time", lambda: 7.0)
    after = [value + 400 * (n == field) for n, value in enumerate(before)]
    monkeypatch.setattr(time, "sleep", lambda _: write_stat(proc, *after))
    assert measure_load() == pytest.approx(cores)


def test_the_own_cpu_time_is_no_load_and_a_load_is_not_negative(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: write_stat(proc, 106, *[0.0] * 9))
    for own_s, cores in ((4.0, 1.0), (20.0, 0.0)):
        write_stat(proc, 100, *[0.0] * 9)
        used, clock = iter([1.0, 1.0 + own_s]), iter([50.0, 52.0])
        monkeypatch.setattr(time, "process_time", lambda used=used: next(used))
        monkeypatch.setattr(time, "monotonic", lambda clock=clock: next(clock))
        assert measure_load() == pytest.approx(cores)


def test_nothing_is_said_without_proc(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert measure_load() is None
    assert count_oom_kills() == 0
    assert start_ticks(os.getpid()) is None
    assert find_processes_by_variable("CCL_RUN", "") == {}


def test_processes_that_the_kernel_killed_for_memory_are_counted(proc: Path) -> None:
    (proc / "vmstat").write_text("pgfault 9\noom_kill_x 8\noom_kill 3\n")
    assert count_oom_kills() == 3


def write_process(proc: Path, pid: int, state: str, environ: bytes) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "environ").write_bytes(environ)
    fields = " ".join(str(n) for n in range(4, 30))
    (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) {state} {fields}\n")


def test_a_process_is_found_by_its_variables_and_a_zombie_is_none(proc: Path) -> None:
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
def test_a_process_that_ignores_sigterm_is_killed_and_another_one_with_its_id_is_not() -> None:
    code = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        ticks = start_ticks(child.pid)
        assert ticks is not None
        processes._signal_all({child.pid: ticks + 1}, signal.SIGKILL)
        assert child.poll() is None, "another start time is another process"
        assert terminate_processes([child.pid, os.getpid()], grace_s=0.1), "the caller itself is left alone"
        assert child.wait(60) == -signal.SIGKILL
