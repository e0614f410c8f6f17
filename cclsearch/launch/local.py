"""The `local` launcher: each trial is a process group on this machine that outlives the search.

A shell around the run script writes its exit code to a file; `job.json` has the process id with its start time, and
every process of a job has the job's name in its environment. So a resumed search finds its jobs again, and cancelling
a job ends all of its processes, including those in sessions of their own.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from cclsearch.core import processes
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import has_job_file
from cclsearch.core.lock_file import hold_file, is_held
from cclsearch.core.values import Count, Failure, FailureKind, Model, PositiveCount, Provenance, TimeLimit
from cclsearch.launch import network_namespaces
from cclsearch.launch.base import (
    Check,
    Handle,
    Job,
    JobState,
    JobStatus,
    refuse_cpu_devices,
    refuse_places,
    submit_error,
    write_model,
)
from cclsearch.launch.collect import (
    EXIT_FILE,
    MEMORY_RAN_OUT,
    changed_record,
    clear_results,
    collect_end,
    explain_record,
    explain_timeout,
    is_killed,
    quote_last_line,
)
from cclsearch.launch.contract import DEVICES_VARIABLE, RESULT_FILE, STDERR_FILE, STDOUT_FILE, trial_environment
from cclsearch.launch.environment import inherited_environment, render_script
from cclsearch.launch.local_setup import LocalSettings, check_framework
from cclsearch.launch.ownership import find_attempt_files, is_own, place_in, run_folder_of
from cclsearch.launch.profile import LAUNCHERS, Profile
from cclsearch.space.framework import Framework, load_framework

JOB_FILE = "job.json"
ALIVE_FILE = "job.lock"
"""The job's processes hold it, so that other PID namespaces see whether they run."""
NAME_VARIABLE = "CCL_JOB_NAME"
"""Set in every process of a job, so that all of them can be found."""
LIMIT_VARIABLE = "CCL_TIMEOUT_S"
"""The job's time limit, for a search that finds the job without its record."""

_FINISH_S = 30.0
"""Seconds that a run script may take to end after it wrote its result."""
_SHELL = '"$@"; code=$?; echo "$code" >"$0.part" && mv -f "$0.part" "$0"; exit "$code"'


class LocalJobRecord(Model):
    """`job.json`: the process that runs a trial."""

    job_name: str
    run_id: str
    pid: PositiveCount
    start_ticks: Count
    boot_id: str
    pid_ns: str = ""
    """PID namespace that `pid` is of."""
    timeout_s: TimeLimit
    oom_kills: Count
    """Processes that the kernel had killed for memory on this machine before the job started."""


_BUSY_CORES = 0.5
"""Cores that other processes may use before the search says that the machine is busy."""


@LAUNCHERS.register("local")
class LocalLauncher:
    """Runs trials on this machine; see the module's docstring."""

    name = "local"
    provenance = Provenance.MEASURED
    shares_files = True
    data_settings = frozenset({"fork_ranks", "max_parallel", "poll_interval_s"})

    def __init__(self, profile: Profile, settings: LocalSettings) -> None:
        self.profile = profile
        self.settings = settings
        self.max_parallel = settings.max_parallel
        self.poll_interval_s = settings.poll_interval_s
        self.python = settings.python or sys.executable
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._written_s: dict[str, float] = {}
        """Job -> when its result was first seen, by the boot clock."""

    @classmethod
    def from_profile(cls, profile: Profile) -> LocalLauncher:
        """Return the launcher of a profile; UserError if one of its own fields is wrong."""
        return cls(profile, profile.read_settings(LocalSettings))

    @cached_property
    def framework(self) -> Framework:
        """The framework whose script the jobs run."""
        return load_framework(self.profile.require_framework())

    def warn_at_start(self) -> str | None:
        """Return a line on the processes that use this machine before the first trial; None below half a core."""
        # A desktop or a monitoring agent uses less than half a core.
        load, cores = processes.measure_load(), os.cpu_count() or 1
        if load is None or load < _BUSY_CORES:
            return None
        return (
            f"other processes use {load:.1f} of {cores} cores: trials that need these cores will not be admitted."
            " Stop the processes before the search, or run it on another machine"
        )

    def refuse_at_start(self) -> None:
        """Raise UserError about the first failed check: every trial would fail for the same reason."""
        failed = next((check for check in self.check() if not check.ok), None)
        if failed is not None:
            found = failed.detail if failed.name in failed.detail else f"{failed.name}: {failed.detail}"
            raise UserError(f"{found}. {failed.remedy[:1].upper()}{failed.remedy[1:]}")

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Start each job in its own process group."""
        if not self.settings.network_namespaces:
            refuse_places(jobs, self.name)
            refuse_cpu_devices(jobs)
        return [self._start(job) for job in jobs]

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        """Return the status of these jobs; ends a job that exceeded its time limit."""
        self._reap()
        return [self._status(handle) for handle in handles]

    def cancel(self, handles: Sequence[Handle]) -> None:
        """End every process of these jobs."""
        for handle in handles:
            processes.terminate_processes(_find_processes(handle))
        self._reap()
        unseen = next((handle for handle in handles if _identify(handle).is_elsewhere and _is_running(handle)), None)
        if unseen is not None:
            raise UserError(
                f"job {unseen.job_name} runs in another PID namespace, such as a container, and cannot be ended from"
                " here; run this command there, or end it there"
            )

    def find(self, run_id: str) -> list[Handle]:
        """Return the running jobs of that run, and the ended ones with a record in the run's folder."""
        found = {}
        for path in find_attempt_files(self.profile.run_dir, JOB_FILE):
            record = LocalJobRecord.read(path)
            if record is not None and record.run_id == run_id:
                found[record.job_name] = _make_handle(record, path.parent)
        for pid, variables in processes.find_processes_by_variable(NAME_VARIABLE, f"{run_id}-t").items():
            name, folder = variables.get(NAME_VARIABLE, ""), Path(variables.get("CCL_TRIAL_DIR", ""))
            if name not in found and self._is_ours(folder):
                limit_s = _parse_limit(variables.get(LIMIT_VARIABLE, ""))
                found[name] = _make_handle(_record_process(pid, name, run_id, timeout_s=limit_s), folder)
        return list(found.values())

    def render(self, job: Job) -> str:
        """Return a shell script that does the same as `submit`."""
        comment = f"trial {job.trial} of {job.run_id}: {job.payload.config}"
        return render_script(self._added(job), self._command(job), comment=comment)

    def check(self) -> list[Check]:
        """Check the interpreter and, with a framework, its script, package and required variables."""
        python = Check.of_program("python", self.python, "set `python` in the profile to an interpreter")
        missing = [name for name in self.settings.network_namespaces if not Path("/run/netns", name).exists()]
        if missing:
            return [python, Check.of("network namespaces", False, f"no {', '.join(missing)}", "`ip netns add NAME`")]
        if self.profile.framework is None:
            return [python]
        variables = {**self._inherited(), **self.profile.environment}
        return [python, *check_framework(self.framework, self.python, variables)]

    def close(self) -> None:
        """Reap ended children; jobs keep running."""
        self._reap()

    def _start(self, job: Job) -> Handle:
        folder = job.trial_dir
        clear_results(folder, EXIT_FILE, JOB_FILE, ALIVE_FILE)
        try:
            child = self._spawn(job)
        except OSError as error:
            raise submit_error(f"the job could not be started: {error}") from None
        self._children[job.name] = child
        record = _record_process(child.pid, job.name, job.run_id, timeout_s=job.timeout_s)
        try:
            write_model(folder / JOB_FILE, record)
        except OSError as error:
            processes.terminate_processes({child.pid, *_find_processes(_make_handle(record, folder))})
            raise submit_error(f"could not write to the trial's folder: {error}") from None
        return _make_handle(record, folder)

    def _spawn(self, job: Job) -> subprocess.Popen[bytes]:
        folder = job.trial_dir
        command = ["/bin/sh", "-c", _SHELL, str(folder / EXIT_FILE), *self._command(job)]
        own = {NAME_VARIABLE: job.name, LIMIT_VARIABLE: str(job.timeout_s)}
        environment = {**self._inherited(), **self._added(job), **own}
        alive = hold_file(folder / ALIVE_FILE)
        try:
            with open(folder / STDOUT_FILE, "wb") as out, open(folder / STDERR_FILE, "wb") as err:
                return subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    pass_fds=() if alive is None else (alive,),
                )
        finally:
            if alive is not None:
                os.close(alive)  # the job has it now

    def _command(self, job: Job) -> list[str]:
        """Return the command that runs the script: by torchrun, unless the script starts its ranks itself."""
        script = str(self.framework.script_path)
        if self.settings.network_namespaces:
            where, payload = self.settings.network_namespaces, job.payload
            words = [
                f"namespaces={','.join(where)}",
                f"ranks={payload.num_ranks}",
                f"per_node={payload.ranks_per_node}",
                f"namespaces_per_node={self.settings.namespaces_per_node}",
            ]
            words += [f"places={','.join(map(str, payload.places))}"] if payload.places else []
            return [self.python, str(Path(network_namespaces.__file__)), script, *words]
        if self.framework.runner == "process" or (self.settings.fork_ranks and self.framework.forks_ranks):
            return [self.python, script]
        runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.payload.num_ranks)]
        return [self.python, *runner, script]

    def _inherited(self) -> dict[str, str]:
        needed = (need.env for need in self.framework.needs)
        return inherited_environment((*needed, *self.settings.pass_environment))

    def _added(self, job: Job) -> dict[str, str]:
        """Return the variables besides the inherited ones; the trial's override the profile's."""
        knobs = self.framework.knob_environment(job.payload.config)
        added = {**self.profile.environment, **knobs, **trial_environment(job.trial_dir, job.payload)}
        if self.settings.network_namespaces:  # each rank starts in the namespace of its place
            added.pop(DEVICES_VARIABLE, None)
        return added

    def _status(self, handle: Handle) -> JobStatus:
        record, result = _read_record(handle), handle.trial_dir / RESULT_FILE
        age_s, limit_s = _age_s(handle), _limit_s(handle, record)
        if result.is_file():
            return self._finish(handle, result)
        if record is None and (problem := explain_record(handle.trial_dir / JOB_FILE, LocalJobRecord)):
            processes.terminate_processes(_find_processes(handle))
            return changed_record(problem)
        is_running = _is_running(handle)
        if age_s > limit_s and (is_running or not has_job_file(handle.trial_dir / EXIT_FILE)):
            return self._time_out(handle, limit_s)
        if is_running:
            return JobStatus(state=JobState.RUNNING, note=f"running for {age_s:.0f} s")
        return self._explain_end(handle, record)

    def _finish(self, handle: Handle, result: Path) -> JobStatus:
        """Return done for a job with a result, once the script has ended or has had `_FINISH_S` to end."""
        with contextlib.suppress(OSError):
            written_s = self._written_s.setdefault(handle.job_name, processes.boot_clock_s())
            if _is_running(handle) and processes.boot_clock_s() - written_s < _FINISH_S:
                return JobStatus(state=JobState.RUNNING, note="finishing")
        processes.terminate_processes(_find_processes(handle))
        return JobStatus(state=JobState.DONE)

    def _time_out(self, handle: Handle, limit_s: float) -> JobStatus:
        processes.terminate_processes(_find_processes(handle))
        self._reap()
        if (handle.trial_dir / RESULT_FILE).is_file():
            return JobStatus(state=JobState.DONE)
        return JobStatus.failed(FailureKind.TIMEOUT, explain_timeout(limit_s) + quote_last_line(handle.trial_dir))

    def _explain_end(self, handle: Handle, record: LocalJobRecord | None) -> JobStatus:
        """Return why a job ended without a result, from its ranks' files, its logs and the kernel's counter."""
        processes.terminate_processes(_find_processes(handle))
        shell = _identify(handle)
        is_cut_off = shell.is_elsewhere or not shell.is_of_this_boot
        if is_cut_off and not has_job_file(handle.trial_dir / EXIT_FILE):
            message = "the machine or the container that ran the trial was restarted, or ended"
            return JobStatus.failed(FailureKind.NODE_FAILED, message)
        collected = collect_end(handle.trial_dir)
        if not isinstance(collected, Failure):
            return JobStatus(state=JobState.DONE)
        if record is not None and is_killed(collected) and processes.count_oom_kills() > record.oom_kills:
            return JobStatus.failed(FailureKind.OUT_OF_MEMORY, MEMORY_RAN_OUT)
        return JobStatus(state=JobState.DONE, failure=collected)

    def _is_ours(self, folder: Path) -> bool:
        root = self.profile.run_dir
        return root is None or root.resolve() in folder.resolve().parents

    def _reap(self) -> None:
        self._children = {name: child for name, child in self._children.items() if child.poll() is None}


def _record_process(pid: int, name: str, run_id: str, *, timeout_s: float) -> LocalJobRecord:
    """Return the record of a job that a process of this PID namespace runs."""
    return LocalJobRecord(
        job_name=name,
        run_id=run_id,
        pid=pid,
        start_ticks=processes.start_ticks(pid) or 0,
        boot_id=processes.boot_id(),
        pid_ns=processes.pid_namespace(),
        timeout_s=timeout_s,
        oom_kills=processes.count_oom_kills(),
    )


def _make_handle(record: LocalJobRecord, folder: Path) -> Handle:
    details = {
        "start_ticks": str(record.start_ticks),
        "boot_id": record.boot_id,
        "pid_ns": record.pid_ns,
        "timeout_s": str(record.timeout_s),
    }
    return Handle(
        launcher=LocalLauncher.name, job_name=record.job_name, job_id=str(record.pid), trial_dir=folder, details=details
    )


def _read_record(handle: Handle) -> LocalJobRecord | None:
    """Return the job's record; None if it is missing or belongs to another attempt."""
    record = LocalJobRecord.read(handle.trial_dir / JOB_FILE)
    return record if record is not None and record.job_name == handle.job_name else None


def _age_s(handle: Handle) -> float:
    """Return the seconds since the job started; 0 for a job of an earlier boot, which has ended."""
    shell = _identify(handle)
    return processes.process_age_s(int(shell.start)) if shell.is_of_this_boot and shell.start else 0.0


def _limit_s(handle: Handle, record: LocalJobRecord | None) -> float:
    """Return the job's time limit: the ledger's, since a job can change or remove its record; else the record's."""
    recorded_s = record.timeout_s if record is not None else math.inf
    return float(handle.details.get("timeout_s", recorded_s))


def _parse_limit(text: str) -> float:
    """Return the seconds of a time limit; infinite if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def _identify(handle: Handle) -> processes.ProcessIdentity:
    """Return the identity of the shell around the job's script."""
    known = handle.details
    return processes.ProcessIdentity(
        int(handle.job_id), known.get("boot_id", ""), known.get("start_ticks", ""), known.get("pid_ns", "")
    )


def _is_running(handle: Handle) -> bool:
    """Whether the shell around the script runs, and is the job's: same boot, start time, name and folder.

    In another PID namespace the job's lock shows it; on a file system without locks, it counts as running until its
    time limit.
    """
    shell = _identify(handle)
    if not shell.is_of_this_boot:
        return False
    if not shell.is_elsewhere:
        return shell.is_running() and _is_of(handle, processes.read_variables(shell.pid))
    if (handle.trial_dir / EXIT_FILE).is_file():
        return False
    held, record = is_held(handle.trial_dir / ALIVE_FILE), _read_record(handle)
    return held if held is not None else record is not None and _age_s(handle) < _limit_s(handle, record)


def _is_of(handle: Handle, variables: Mapping[str, str]) -> bool:
    """Whether a process with these variables is of the job: another project may have a run of the same name.

    After a move of the run, its job still has the folder's earlier path.
    """
    if variables.get(NAME_VARIABLE) != handle.job_name:
        return False
    folder, run_dir = Path(variables.get("CCL_TRIAL_DIR", "")), run_folder_of(handle.trial_dir)
    if run_dir is None or run_folder_of(folder) is None:
        return folder == handle.trial_dir
    return place_in(run_dir, folder) == handle.trial_dir and is_own(run_dir, folder)


def _find_processes(handle: Handle) -> set[int]:
    """Return the ids of all running processes of the job, by its name and folder in their environment."""
    marked = processes.find_processes_by_variable(NAME_VARIABLE, handle.job_name)
    own = {int(handle.job_id)} if not _identify(handle).is_elsewhere and _is_running(handle) else set()
    return own | {pid for pid, variables in marked.items() if _is_of(handle, variables)}
