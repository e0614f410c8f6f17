"""The `local` launcher: each trial is a process group of this machine that outlives the search.

A small shell around the run script leaves its exit code in a file; `job.json` holds the process id with its start time,
and every process of a job carries the job's name in its environment. So a search that was killed finds its jobs again,
and cancelling one ends all of its processes, those in sessions of their own included.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from pydantic import Field

from cclsearch.core import processes
from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import TrialError
from cclsearch.core.text import one_line
from cclsearch.core.values import Failure, FailureKind, Model, Provenance, Stage
from cclsearch.launch.base import Check, Handle, Job, JobState, JobStatus
from cclsearch.launch.collect import EXIT_FILE, FAILURES_FOLDER, collect_result, tail_text
from cclsearch.launch.contract import RESULT_FILE, STDERR_FILE, STDOUT_FILE, TRACE_FOLDER
from cclsearch.launch.environment import added_environment, inherited_environment, render_script, run_command
from cclsearch.launch.profile import Profile
from cclsearch.plugins import LAUNCHERS
from cclsearch.space.framework import Framework, load_framework

JOB_FILE = "job.json"
NAME_VARIABLE = "CCL_JOB_NAME"
"""Every process of a job carries it: how all of them are found."""

_FINISH_S = 30.0
"""How long a run script may take to end once its result is there."""
_SHELL = '"$@"; code=$?; echo "$code" >"$0.part" && mv -f "$0.part" "$0"; exit "$code"'


class LocalSettings(Model):
    """The fields of a profile that are the `local` launcher's own."""

    python: str | None = None
    """Interpreter of the run scripts; the one that runs the search where none is given."""
    fork_ranks: bool = True
    """Let a script that can be its own torchrun fork its ranks: they share one import of torch."""
    max_parallel: int = Field(default=1, ge=1)
    """Trials at once: more than one disturb each other's times unless they share nothing."""
    poll_interval_s: float = Field(default=0.1, gt=0)


class LocalJobRecord(Model):
    """`job.json`: the process that runs a trial."""

    job_name: str
    run_id: str
    pid: int
    start_ticks: int
    boot_id: str
    started_s: float
    """Unix time of its start."""
    timeout_s: float
    oom_kills: int
    """Processes that the kernel had killed for memory on this machine before the job began."""


@LAUNCHERS.register("local")
class LocalLauncher:
    """Runs trials on this machine; see the module's docstring."""

    name = "local"
    provenance = Provenance.MEASURED

    def __init__(self, profile: Profile, settings: LocalSettings) -> None:
        self.profile = profile
        self.settings = settings
        self.max_parallel = settings.max_parallel
        self.poll_interval_s = settings.poll_interval_s
        self.python = settings.python or sys.executable
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @classmethod
    def from_profile(cls, profile: Profile) -> LocalLauncher:
        """The launcher of a profile; raises UserError where its own fields are wrong."""
        return cls(profile, profile.read_settings(LocalSettings))

    @cached_property
    def framework(self) -> Framework:
        """The framework whose script the jobs run."""
        return load_framework(self.profile.require_framework())

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Start each job as a process group of its own."""
        return [self._start(job) for job in jobs]

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        """Where these jobs are; one that is over its time limit is ended here."""
        self._reap()
        return [self._status(handle) for handle in handles]

    def cancel(self, handles: Sequence[Handle]) -> None:
        """End every process of these jobs."""
        for handle in handles:
            processes.terminate_processes(_find_processes(handle))
        self._reap()

    def find(self, run_id: str) -> list[Handle]:
        """Jobs of that run: those that run, and those that ended and left their record in the run's folder."""
        found = {}
        for record, folder in self._records(run_id):
            found[record.job_name] = _make_handle(record, folder)
        for pid, variables in processes.find_processes_by_variable(NAME_VARIABLE, f"{run_id}-t").items():
            name, folder = variables.get(NAME_VARIABLE, ""), Path(variables.get("CCL_TRIAL_DIR", ""))
            if name not in found and self._is_ours(folder):
                details = {"start_ticks": str(processes.start_ticks(pid) or 0), "boot_id": processes.boot_id()}
                found[name] = Handle(
                    launcher=self.name, job_name=name, job_id=str(pid), trial_dir=folder, details=details
                )
        return list(found.values())

    def render(self, job: Job) -> str:
        """The shell script that does what `submit` does."""
        comment = f"trial {job.trial} of {job.run_id}: {job.payload.config}"
        return render_script(self._added(job), self._command(job), comment=comment)

    def check(self) -> list[Check]:
        """Whether interpreter, script and what the framework needs are there; without a framework, the interpreter."""
        found = shutil.which(self.python)
        checks = [
            Check(
                name="python",
                ok=found is not None,
                detail=found or f"{self.python!r} is not to be found",
                remedy="" if found else "set `python` in the profile to an interpreter",
            )
        ]
        if self.profile.framework is None:
            return checks
        script = self.framework.script_path
        checks.append(Check(name="run script", ok=True, detail=str(script)))
        return [*checks, *self._check_package(found), *self._check_needs()]

    def close(self) -> None:
        """Jobs go on; nothing is held."""
        self._reap()

    def _start(self, job: Job) -> Handle:
        folder = job.trial_dir
        _clear(folder)
        try:
            child = self._spawn(job)
        except OSError as error:
            message = f"the job could not be started: {error}"
            raise TrialError(Failure(stage=Stage.SUBMIT, kind=FailureKind.LAUNCHER, message=message)) from None
        self._children[job.name] = child
        record = LocalJobRecord(
            job_name=job.name,
            run_id=job.run_id,
            pid=child.pid,
            start_ticks=processes.start_ticks(child.pid) or 0,
            boot_id=processes.boot_id(),
            started_s=time.time(),
            timeout_s=job.timeout_s,
            oom_kills=_count_oom_kills(),
        )
        try:
            write_atomically(folder / JOB_FILE, record.model_dump_json(indent=1))
        except OSError as error:
            processes.terminate_processes({child.pid, *processes.find_processes_by_variable(NAME_VARIABLE, job.name)})
            message = f"the trial's folder cannot be written: {error}"
            raise TrialError(Failure(stage=Stage.SUBMIT, kind=FailureKind.LAUNCHER, message=message)) from None
        return _make_handle(record, folder)

    def _spawn(self, job: Job) -> subprocess.Popen[bytes]:
        folder = job.trial_dir
        command = ["/bin/sh", "-c", _SHELL, str(folder / EXIT_FILE), *self._command(job)]
        environment = {**inherited_environment(), **self._added(job), NAME_VARIABLE: job.name}
        with open(folder / STDOUT_FILE, "wb") as out, open(folder / STDERR_FILE, "wb") as err:
            return subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _command(self, job: Job) -> list[str]:
        fork = self.settings.fork_ranks and self.framework.forks_ranks
        return run_command(self.framework, python=self.python, num_processes=job.payload.num_ranks, fork=fork)

    def _added(self, job: Job) -> dict[str, str]:
        return added_environment(self.profile.environment, self.framework, job.trial_dir, job.payload)

    def _status(self, handle: Handle) -> JobStatus:
        record, result = _read_record(handle), handle.trial_dir / RESULT_FILE
        age_s = time.time() - record.started_s if record else 0.0
        if result.is_file():
            return self._finish(handle, result)
        if record is not None and age_s > record.timeout_s and not (handle.trial_dir / EXIT_FILE).is_file():
            return self._time_out(handle, record)
        if _is_running(handle):
            return JobStatus(state=JobState.RUNNING, note=f"running for {age_s:.0f} s")
        return self._explain_end(handle, record)

    def _finish(self, handle: Handle, result: Path) -> JobStatus:
        """The result is there: done once the script has ended, or has had its time to."""
        with contextlib.suppress(OSError):
            if _is_running(handle) and time.time() - result.stat().st_mtime < _FINISH_S:
                return JobStatus(state=JobState.RUNNING, note="finishing")
        processes.terminate_processes(_find_processes(handle))
        return JobStatus(state=JobState.DONE)

    def _time_out(self, handle: Handle, record: LocalJobRecord) -> JobStatus:
        processes.terminate_processes(_find_processes(handle))
        self._reap()
        if (handle.trial_dir / RESULT_FILE).is_file():
            return JobStatus(state=JobState.DONE)
        last = [line for line in tail_text(handle.trial_dir / STDERR_FILE, 8192).splitlines() if line.strip()][-1:]
        said = f"; its last words: {one_line(last[0], 300)}" if last else ""
        message = f"no result after {record.timeout_s:g} s: every process of the trial was ended{said}"
        return JobStatus(
            state=JobState.DONE, failure=Failure(stage=Stage.RUN, kind=FailureKind.TIMEOUT, message=message)
        )

    def _explain_end(self, handle: Handle, record: LocalJobRecord | None) -> JobStatus:
        """The job is over without a result: what its ranks, its logs and the kernel say."""
        processes.terminate_processes(_find_processes(handle))
        collected = collect_result(handle.trial_dir)
        if not isinstance(collected, Failure):
            return JobStatus(state=JobState.DONE)
        if record is not None and "SIGKILL" in collected.message and _count_oom_kills() > record.oom_kills:
            message = "the kernel killed a process of the trial because memory ran out"
            collected = Failure(stage=Stage.RUN, kind=FailureKind.OUT_OF_MEMORY, message=message)
        return JobStatus(state=JobState.DONE, failure=collected)

    def _records(self, run_id: str) -> Iterator[tuple[LocalJobRecord, Path]]:
        if self.profile.run_dir is None:
            return
        for path in sorted((self.profile.run_dir / "trials").glob(f"*/{JOB_FILE}")):
            with contextlib.suppress(OSError, ValueError):
                record = LocalJobRecord.model_validate_json(path.read_bytes())
                if record.run_id == run_id:
                    yield record, path.parent.absolute()

    def _is_ours(self, folder: Path) -> bool:
        root = self.profile.run_dir
        return root is None or root.resolve() in folder.resolve().parents

    def _check_package(self, python: str | None) -> list[Check]:
        package = self.framework.package
        if python is None or not package:
            return []
        code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
        answer = subprocess.run(
            [python, "-c", code, package],
            capture_output=True,
            text=True,
            timeout=60,
            env=inherited_environment(),
            stdin=subprocess.DEVNULL,
        )
        ok = answer.returncode == 0
        detail = f"{package} {answer.stdout.strip()}" if ok else f"{package} is not installed for {python}"
        return [Check(name=package, ok=ok, detail=detail, remedy="" if ok else f"{python} -m pip install {package}")]

    def _check_needs(self) -> Iterator[Check]:
        variables = {**inherited_environment(), **self.profile.environment}
        for need in self.framework.needs:
            value = variables.get(need.env)
            ok = need.is_met(value)
            detail = need.describe(value, is_met=ok)
            yield Check(name=need.env, ok=ok, detail=detail, remedy="" if ok else need.remedy)

    def _reap(self) -> None:
        self._children = {name: child for name, child in self._children.items() if child.poll() is None}


def _make_handle(record: LocalJobRecord, folder: Path) -> Handle:
    details = {"start_ticks": str(record.start_ticks), "boot_id": record.boot_id}
    return Handle(
        launcher=LocalLauncher.name,
        job_name=record.job_name,
        job_id=str(record.pid),
        trial_dir=folder,
        details=details,
    )


def _read_record(handle: Handle) -> LocalJobRecord | None:
    """The job's record; None where it is gone or another attempt's."""
    with contextlib.suppress(OSError, ValueError):
        record = LocalJobRecord.model_validate_json((handle.trial_dir / JOB_FILE).read_bytes())
        return record if record.job_name == handle.job_name else None
    return None


def _is_running(handle: Handle) -> bool:
    """Whether the shell around the script lives: the same process in the same boot, not one that got its number."""
    if handle.details.get("boot_id", "") != processes.boot_id():
        return False
    ticks = processes.start_ticks(int(handle.job_id))
    return ticks is not None and str(ticks) == handle.details.get("start_ticks")


def _find_processes(handle: Handle) -> set[int]:
    """Every living process of the job, the shell first found by number, the rest by the mark they carry."""
    own = {int(handle.job_id)} if _is_running(handle) else set()
    marked = processes.find_processes_by_variable(NAME_VARIABLE, handle.job_name)
    return own | {pid for pid, variables in marked.items() if variables.get(NAME_VARIABLE) == handle.job_name}


def _clear(folder: Path) -> None:
    """Take away what an earlier attempt left that would be read as this one's."""
    for name in (RESULT_FILE, EXIT_FILE, JOB_FILE):
        (folder / name).unlink(missing_ok=True)
    for name in (TRACE_FOLDER, FAILURES_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)


def _count_oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
