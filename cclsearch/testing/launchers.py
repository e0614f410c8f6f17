"""The contract of a launcher that runs scripts: its jobs end with a result or a reason, and survive the search."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from cclsearch.core.trust import trust_project
from cclsearch.core.values import Config
from cclsearch.launch.base import Handle, Job, JobState, JobStatus, Launcher
from cclsearch.launch.contract import CONFIG_FILE, RESULT_FILE, STDERR_FILE, STDOUT_FILE, TrialInput
from cclsearch.launch.profile import make_launcher, profile_from_mapping

SECRET = "sk-contract-0123456789abcdef"
_SCRIPT = """import json, os, sys, time
print(sorted(os.environ.items()), flush=True)
what = os.environ["CCL_OUTCOME"]
if what == "wait":
    time.sleep(600)
if what == "crash":
    raise RuntimeError("the contract's trial fails on purpose")
path = os.path.join(os.environ["CCL_TRIAL_DIR"], "result.json")
with open(path + ".part", "w") as file:
    json.dump({"status": "ok", "metrics": {"trial": json.load(open(os.environ["CCL_CONFIG"]))["trial"]}}, file)
os.replace(path + ".part", path)
"""


class LauncherContract:
    """Subclass it, and set `profile`; each test starts real jobs through the launcher and ends them."""

    profile: ClassVar[Mapping[str, Any]]
    """The fields of a profile, `launcher` among them, with which a job can run where the tests run."""
    patience_s: ClassVar[float] = 90.0
    """After this time a job that has not ended fails the test."""
    timeout_s: ClassVar[float] = 3.0
    """The time limit of a trial that is ended by it; the shortest that the scheduler can keep."""

    @pytest.fixture
    def started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Launcher, Handle]]]:
        """Make a project with a run script; jobs that are in the list are cancelled at the end."""
        (tmp_path / "launchers").mkdir()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        trust_project(tmp_path)
        (tmp_path / "launchers" / "contract_run.py").write_text(_SCRIPT)
        framework = {
            "title": "contract",
            "script": "contract_run.py",
            "runner": "process",
            "knobs": [{"name": "outcome", "choices": ["ok", "crash", "wait"]}],
        }
        (tmp_path / "launchers" / "contract.framework.yaml").write_text(yaml.safe_dump(framework))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CONTRACT_API_KEY", SECRET)
        jobs: list[tuple[Launcher, Handle]] = []
        yield jobs
        for launcher, handle in jobs:
            launcher.cancel([handle])
            launcher.close()

    def make_launcher(self, run_id: str = "contract") -> Launcher:
        """Return a new launcher of the profile, as a search and its `resume` each make one."""
        fields = {"python": sys.executable, **self.profile} if self.profile.get("launcher") == "local" else self.profile
        profile = profile_from_mapping(dict(fields), name="contract")
        return make_launcher(profile, framework="contract", run_dir=Path.cwd() / "runs" / run_id)

    def make_job(self, outcome: str, trial: int = 1, run_id: str = "contract", timeout_s: float = 300.0) -> Job:
        """Return a job whose script ends as `outcome` says: `ok`, `crash` or `wait`."""
        folder = Path.cwd() / "runs" / run_id / "trials" / f"{trial:04d}"
        folder.mkdir(parents=True)
        payload = TrialInput(
            run_id=run_id,
            trial=trial,
            config=Config({"outcome": outcome}),
            precision="bf16",
            num_ranks=1,
            ranks_per_node=1,
        )
        (folder / CONFIG_FILE).write_text(payload.model_dump_json())
        return Job(run_id=run_id, trial=trial, attempt=1, trial_dir=folder, payload=payload, timeout_s=timeout_s)

    def wait(self, launcher: Launcher, handles: Sequence[Handle], state: JobState = JobState.DONE) -> list[JobStatus]:
        """Return the statuses once all jobs are in that state."""
        deadline = time.monotonic() + self.patience_s
        statuses = launcher.poll(handles)
        while not all(status.state is state for status in statuses):
            assert time.monotonic() < deadline, f"not {state} after {self.patience_s:g} s: {statuses}"
            time.sleep(min(max(launcher.poll_interval_s, 0.05), 1.0))
            statuses = launcher.poll(handles)
        return statuses

    def test_it_says_what_it_is(self, started: list[tuple[Launcher, Handle]]) -> None:
        """Name, provenance and limits are set, and each failed check says what to do."""
        launcher = self.make_launcher()
        assert launcher.name == self.profile["launcher"], "`name` is the registered name"
        assert launcher.provenance in type(launcher.provenance)
        assert launcher.max_parallel >= 1
        assert launcher.poll_interval_s >= 0
        checks = launcher.check()
        assert checks, "`check` names at least one thing"
        lacking = [check.name for check in checks if not check.ok and not check.remedy]
        assert lacking == [], "a failed check has a remedy"
        launcher.close()

    def test_jobs_end_with_their_result_or_a_reason(self, started: list[tuple[Launcher, Handle]]) -> None:
        """Two jobs at once: statuses come in the order of the handles, and logs are in the trial's folder."""
        launcher = self.make_launcher()
        good, bad = self.make_job("ok", 1), self.make_job("crash", 2)
        handles = launcher.submit([good, bad])
        started += [(launcher, handle) for handle in handles]
        assert [handle.job_name for handle in handles] == [good.name, bad.name], "one handle per job, in order"
        assert [handle.trial_dir for handle in handles] == [good.trial_dir, bad.trial_dir]
        done, failed = self.wait(launcher, handles)
        assert done.failure is None
        assert (good.trial_dir / RESULT_FILE).is_file(), "done without a failure means that the result can be read"
        assert failed.failure is not None or "on purpose" in (bad.trial_dir / STDERR_FILE).read_text()
        assert not (bad.trial_dir / RESULT_FILE).exists()

    def test_a_job_gets_the_trials_variables_and_no_secret(self, started: list[tuple[Launcher, Handle]]) -> None:
        """The job sees its knobs, but no secret of the environment in which the search runs."""
        launcher, job = self.make_launcher(), self.make_job("ok")
        [handle] = launcher.submit([job])
        started.append((launcher, handle))
        self.wait(launcher, [handle])
        shown = (job.trial_dir / STDOUT_FILE).read_text()
        assert "CCL_OUTCOME" in shown
        assert SECRET not in shown
        assert SECRET not in launcher.render(job)

    def test_a_new_launcher_finds_a_job_that_runs(self, started: list[tuple[Launcher, Handle]]) -> None:
        """As after a kill: without the handle, by the run alone; and by the handle as the ledger keeps it."""
        first, job = self.make_launcher(), self.make_job("wait")
        [handle] = first.submit([job])
        started.append((first, handle))
        self.wait(first, [handle], JobState.RUNNING)
        first.close()
        again = self.make_launcher()
        assert [found.job_name for found in again.find(job.run_id)] == [job.name]
        assert self.make_launcher("other").find("other") == [], "another run has no jobs"
        kept = Handle.model_validate_json(handle.model_dump_json())
        assert again.poll([kept])[0].state is JobState.RUNNING
        again.cancel([kept])
        self.wait(again, [kept])
        assert not (job.trial_dir / RESULT_FILE).exists()

    def test_a_cancelled_job_is_gone_and_may_be_cancelled_again(self, started: list[tuple[Launcher, Handle]]) -> None:
        """No call raises because a job has ended."""
        launcher, job = self.make_launcher(), self.make_job("wait")
        [handle] = launcher.submit([job])
        started.append((launcher, handle))
        launcher.cancel([handle])
        launcher.cancel([handle])
        self.wait(launcher, [handle])
        assert not (job.trial_dir / RESULT_FILE).exists()

    def test_a_job_over_its_time_limit_is_ended(self, started: list[tuple[Launcher, Handle]]) -> None:
        """The launcher enforces the limit, whatever the script does."""
        launcher, job = self.make_launcher(), self.make_job("wait", timeout_s=self.timeout_s)
        [handle] = launcher.submit([job])
        started.append((launcher, handle))
        [status] = self.wait(launcher, [handle])
        assert status.failure is not None
        assert str(status.failure.kind) == "timeout", status.failure

    def test_rendering_starts_nothing(self, started: list[tuple[Launcher, Handle]]) -> None:
        """`--dry-run` shows the job script; nothing is submitted."""
        launcher, job = self.make_launcher(), self.make_job("ok")
        assert "contract_run.py" in launcher.render(job)
        assert launcher.find(job.run_id) == []
        assert not (job.trial_dir / RESULT_FILE).exists()
        launcher.close()
