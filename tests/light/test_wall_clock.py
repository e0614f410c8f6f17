"""Time limits count by the boot clock: a wall clock that is set ends no trial and gives up no job."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from trials import make_input
from trials import make_job as make_local_job

from cclsearch.core import timestamps as moment
from cclsearch.core.processes import boot_clock_s, process_age_s, start_ticks
from cclsearch.core.timestamps import BootMoment, elapsed_since
from cclsearch.launch.base import JobState
from cclsearch.launch.profile import make_launcher, profile_from_mapping
from cclsearch.launch.tpu_vm import worker

STEP_S = 7200.0


@pytest.fixture
def step_clock(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the wall clock of this process by some seconds."""
    real = time.time

    def step(by_s: float) -> None:
        monkeypatch.setattr(time, "time", lambda: real() + by_s)

    return step


@pytest.mark.parametrize("by_s", [STEP_S, -STEP_S])
def test_a_moment_counts_by_the_boot_clock_and_after_a_restart_by_the_wall_clock(
    step_clock, monkeypatch: pytest.MonkeyPatch, by_s: float
) -> None:
    then = BootMoment.now()
    step_clock(by_s)
    assert 0 <= then.elapsed_s() < 60
    assert elapsed_since(None, then.wall_s) == pytest.approx(max(0.0, by_s), abs=60)
    monkeypatch.setattr(moment, "boot_id", lambda: "the next boot")
    assert then.elapsed_s() == pytest.approx(max(0.0, by_s), abs=60)


def test_the_age_of_a_process_is_counted_from_its_start() -> None:
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
def test_a_local_trial_is_not_ended_when_the_clock_is_set(project: Path, step_clock, by_s: float) -> None:
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


def test_a_worker_of_a_tpu_slice_counts_by_the_boot_clock(tmp_path: Path, step_clock) -> None:
    (tmp_path / "trial").mkdir()
    with subprocess.Popen(["sleep", "0.5"]) as script:
        step_clock(STEP_S)
        assert worker.watch(script, str(tmp_path), str(tmp_path / "trial"), 1800.0) == "finished"
    with subprocess.Popen(["sleep", "60"]) as script:
        real = time.time
        steps = iter(range(10**6))
        time.time = lambda: real() - STEP_S * next(steps)  # a clock that runs backwards never reaches a deadline
        try:
            assert worker.watch(script, str(tmp_path), str(tmp_path / "trial"), 0.3) == "timeout"
        finally:
            time.time = real
        script.kill()
