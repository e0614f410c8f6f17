"""The local launcher with real processes: jobs outlive the search, are ended at their limits and explained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from trials import make_input, make_job

from cclsearch.core import processes
from cclsearch.core.processes import start_ticks, terminate_processes
from cclsearch.core.values import Failure, FailureKind
from cclsearch.launch.base import Handle, JobState, JobStatus
from cclsearch.launch.collect import collect_result
from cclsearch.launch.contract import RunStatus
from cclsearch.launch.local import LocalLauncher
from cclsearch.launch.profile import make_launcher, profile_from_mapping
from cclsearch.tasks.training.contract import TrainingResult

WRITE_RESULT = """
import json, os
path = os.path.join(os.environ["CCL_TRIAL_DIR"], "result.json")
with open(path + ".part", "w") as file:
    json.dump({"status": "ok", "step_times_s": [0.1], "extra": {"tp": os.environ["CCL_TP"]}}, file)
os.replace(path + ".part", path)
"""


@pytest.fixture
def start(project: Path):
    """Start a script of a user's framework as a trial; jobs that still run at the end are cancelled."""
    started: list[tuple[LocalLauncher, Handle]] = []

    def begin(script: str, *, timeout_s: float = 120.0, run_id: str = "run") -> tuple[LocalLauncher, Handle]:
        folder = project / "launchers"
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(script)
        knobs = [{"name": name, "choices": [1, 2]} for name in ("tp", "dp", "micro_batch_size")]
        (folder / "mine.framework.yaml").write_text(
            yaml.safe_dump({"title": "mine", "script": "mine.py", "runner": "process", "knobs": knobs})
        )
        profile = profile_from_mapping({"launcher": "local", "python": sys.executable}, name="here")
        launcher = make_launcher(profile, framework="mine", run_dir=project / "runs" / run_id)
        payload = make_input({"tp": 2, "dp": 1, "micro_batch_size": 2}, run_id=run_id)
        job = make_job(project / "runs" / run_id / "trials" / "0001", payload, timeout_s=timeout_s)
        [handle] = launcher.submit([job])
        started.append((launcher, handle))
        return launcher, handle

    yield begin
    for launcher, handle in started:
        launcher.cancel([handle])


def wait_until_done(launcher: LocalLauncher, handle: Handle, limit_s: float = 90.0) -> JobStatus:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        [status] = launcher.poll([handle])
        if status.state is JobState.DONE:
            return status
        time.sleep(0.05)
    raise AssertionError("the job was not done in time")


def fail(start, script: str, **options: float) -> Failure:
    launcher, handle = start(script, **options)
    return wait_until_done(launcher, handle).failure


def test_a_job_runs_under_the_trial_contract(start):
    launcher, handle = start(WRITE_RESULT)
    assert wait_until_done(launcher, handle).failure is None
    result = collect_result(handle.trial_dir, TrainingResult)
    assert result.status is RunStatus.OK
    assert result.extra == {"tp": "2"}


def test_a_job_inherits_no_secret(start, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-do-not-tell-anyone")
    launcher, handle = start("import os; print(sorted(os.environ))" + WRITE_RESULT)
    wait_until_done(launcher, handle)
    output = (handle.trial_dir / "stdout.log").read_text()
    assert "CCL_TP" in output
    assert "SOME_API_KEY" not in output


@pytest.mark.parametrize(("field", "value"), [("timeout_s", -1), ("timeout_s", True), ("pid", "7")])
def test_a_job_that_spoils_its_own_record_has_failed_and_the_message_says_what_is_wrong(start, field, value):
    launcher, handle = start("import time; time.sleep(600)")
    path = handle.trial_dir / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    [status] = launcher.poll([handle])
    assert status.failure.kind is FailureKind.CRASHED
    assert f"changed its own record: job.json: {field}: Input should be " in status.failure.message
    assert status.failure.message.endswith(f"({value!r})")
    assert start_ticks(int(handle.job_id)) is None, "its processes must not be left behind"


def test_a_job_that_is_found_without_its_record_keeps_its_time_limit(start, monkeypatch):
    launcher, handle = start("import time; time.sleep(600)", timeout_s=100.0)
    (handle.trial_dir / "job.json").unlink()
    [found] = launcher.find("run")
    assert launcher.poll([found])[0].state is JobState.RUNNING
    monkeypatch.setattr(processes, "process_age_s", lambda ticks: 101.0)
    [status] = launcher.poll([found])
    assert (status.failure.kind, "no result after 100 s" in status.failure.message) == (FailureKind.TIMEOUT, True)
    assert start_ticks(int(handle.job_id)) is None, "its processes must not be left behind"


def test_a_job_over_its_time_limit_is_ended_with_all_its_processes(start):
    script = (
        "import subprocess, sys, time, os\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    launcher, handle = start(script, timeout_s=1.5)
    failure = wait_until_done(launcher, handle).failure
    assert failure.kind is FailureKind.TIMEOUT
    assert "no result after 1.5 s" in failure.message
    child = int((handle.trial_dir / "stdout.log").read_text())
    assert start_ticks(child) is None, "a child in its own session must not be left behind"


@pytest.mark.parametrize(
    "spoil",
    [
        'os.remove("job.json")',
        'record = json.load(open("job.json")); json.dump({**record, "timeout_s": 9e6}, open("job.json", "w"))',
        'open("exit_code", "w").write("0")',
    ],
)
def test_a_job_keeps_its_time_limit_whatever_it_does_to_its_own_files(start, spoil):
    """Also a script that clears its working folder before it starts."""
    script = f"import json, os, time\nwhile not os.path.exists('job.json'): time.sleep(0.01)\n{spoil}\ntime.sleep(20)"
    failure = fail(start, script, timeout_s=1.0)
    assert (failure.kind, "no result after 1 s" in failure.message) == (FailureKind.TIMEOUT, True)


def test_cancel_ends_the_whole_job(start):
    launcher, handle = start("import time; time.sleep(600)")
    assert launcher.poll([handle])[0].state is JobState.RUNNING
    launcher.cancel([handle])
    assert start_ticks(int(handle.job_id)) is None
    assert launcher.poll([handle])[0].state is JobState.DONE


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("pass", FailureKind.CRASHED, "exited with 0 but wrote no result.json"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", FailureKind.CRASHED, "SIGSEGV"),
        ("open('/dev/full', 'w').write('x' * 100000)", FailureKind.LAUNCHER, "No space left on device"),
        ("raise ValueError('odd heads')", FailureKind.CRASHED, "ValueError: odd heads"),
    ],
    ids=["no result", "a signal", "a full disk", "an exception"],
)
def test_a_failure_of_a_job_says_its_cause(start, script, kind, message):
    failure = fail(start, script)
    assert failure.kind is kind
    assert message in failure.message


def test_a_job_left_by_a_killed_search_is_found_and_finished(start, project):
    gate = project / "gate"
    script = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)\n" + WRITE_RESULT
    _, handle = start(script, run_id="killed")
    profile = profile_from_mapping({"launcher": "local"}, name="here")
    later = make_launcher(profile, framework="mine", run_dir=project / "runs" / "killed")
    [found] = later.find("killed")
    assert found == handle
    (handle.trial_dir / "job.json").unlink()
    [unrecorded] = later.find("killed")
    assert unrecorded.job_name == handle.job_name, "killed before its record was written: found by its environment"
    assert later.find("kill") == [], "another run whose name begins the same"
    gate.touch()
    assert wait_until_done(later, found).failure is None


def test_a_job_survives_the_death_of_its_search(project):
    """A real search process is killed with SIGKILL while its trial runs."""
    (project / "launchers").mkdir()
    gate = project / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.05)\n"
    (project / "launchers" / "mine.py").write_text(waits + WRITE_RESULT)
    (project / "launchers" / "mine.framework.yaml").write_text(
        yaml.safe_dump({"script": "mine.py", "runner": "process", "knobs": [{"name": "tp", "choices": [1, 2]}]})
    )
    folder = project / "runs" / "lost" / "trials" / "0001"
    job = make_job(folder, make_input({"tp": 2, "micro_batch_size": 2}, run_id="lost"))
    (project / "job.txt").write_text(job.model_dump_json())
    code = (
        "import os, pathlib, signal\n"
        "from cclsearch.launch.base import Job\n"
        "from cclsearch.launch.profile import make_launcher, profile_from_mapping\n"
        "launcher = make_launcher(profile_from_mapping({'launcher': 'local'}, name='here'), framework='mine')\n"
        "launcher.submit([Job.model_validate_json(pathlib.Path('job.txt').read_text())])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project, timeout=120, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    profile = profile_from_mapping({"launcher": "local"}, name="here")
    later = make_launcher(profile, framework="mine", run_dir=project / "runs" / "lost")
    [found] = later.find("lost")
    gate.touch()
    try:
        assert wait_until_done(later, found).failure is None
    finally:
        later.cancel([found])
    assert json.loads((folder / "result.json").read_text())["status"] == "ok"


def test_a_process_with_a_reused_id_is_not_mistaken_for_the_job(start):
    launcher, handle = start(WRITE_RESULT)
    wait_until_done(launcher, handle)
    (handle.trial_dir / "result.json").unlink()
    other = handle.model_copy(update={"job_id": str(os.getpid())})
    assert launcher.poll([other])[0].state is JobState.DONE
    launcher.cancel([other])
    assert start_ticks(os.getpid()) is not None


def test_terminating_no_process_succeeds_at_once():
    assert terminate_processes([]) is True


def test_the_job_script_quotes_special_characters(start, project):
    launcher, handle = start(WRITE_RESULT)
    wait_until_done(launcher, handle)
    payload = make_input({"tp": 2, "micro_batch_size": 2, "note": "a b; rm -rf $HOME"})
    script = launcher.render(make_job(project / "a folder", payload))
    assert "export CCL_NOTE='a b; rm -rf $HOME'" in script
    assert f"export CCL_TRIAL_DIR='{project / 'a folder'}'" in script
    assert script.endswith("/launchers/mine.py\n")
