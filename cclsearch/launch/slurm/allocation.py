"""Trials as steps inside an allocation that the user holds: no queue, and no step that the time left cannot fit.

The registered `slurm` launcher chooses between such steps and jobs of their own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cclsearch.core import processes
from cclsearch.core.content import list_frameworks
from cclsearch.core.errors import UnavailableError, UserError
from cclsearch.core.values import BootMoment, FailureKind, Model, Stage
from cclsearch.launch.base import Handle, Job, JobState, JobStatus, write_model
from cclsearch.launch.contract import RunStatus
from cclsearch.launch.ownership import find_attempt_files
from cclsearch.launch.profile import LAUNCHERS, Profile
from cclsearch.launch.slurm.commands import ListedJob, SlurmError, ask_slurm, cancel_jobs, run_slurm, step_environment
from cclsearch.launch.slurm.ending import ENDED_STATES, read_ending
from cclsearch.launch.slurm.job_files import (
    CANCELLED_FILE,
    END_FILE,
    JOBS_FILE,
    SCRIPT_FILE,
    SPEC_FILE,
    STARTED_FILE,
    JobList,
    JobSpec,
    RunScript,
    list_bad_nodes,
    make_job_spec,
    sees_file,
)
from cclsearch.launch.slurm.launcher import ATTEMPT_FOLDERS, SlurmLauncher
from cclsearch.launch.slurm.settings import DATA_SETTINGS, SlurmSettings
from cclsearch.launch.slurm.submit import render_chunk
from cclsearch.launch.slurm.watch import DEADLINE_S, mark_cancelled
from cclsearch.space.framework import load_framework

LAUNCHED_FILE = "launched.json"
REFUSED_FILE = "refused.json"
TIME_LEFT_MARGIN_S = 60.0
"""Seconds that must be left of the allocation beyond a trial's own time limit."""
CLAIM_TIMEOUT_S = 30.0
"""Seconds that the process of a step may take to claim its attempt."""


class StepRecord(Model):
    """`launched.json`: the local process that runs a step; written before it starts, and again after."""

    allocation: str
    nodes: tuple[str, ...]
    moment: BootMoment
    process: processes.ProcessIdentity | None = None
    """None before it was started."""
    submitted: str
    """Slurm's submit time of the allocation: a job that gets its number later has another one; empty if unknown."""


class RefusalRecord(Model):
    """`refused.json`: why a step was not started."""

    reason: str


class AllocationLauncher(SlurmLauncher):
    """Runs each trial as a step on its own nodes of the allocation."""

    @functools.cached_property
    def _ended_s(self) -> dict[Path, float]:
        """Attempt folder -> when its step was first seen to have ended, by the boot clock."""
        return {}

    @functools.cached_property
    def allocation(self) -> str:
        """The allocation's job id; UserError if there is none."""
        given = self.settings.in_allocation
        number = os.environ.get("SLURM_JOB_ID") if given is True else str(given)
        if not number or not re.fullmatch(r"\d+(?:_\d+)?", number):
            raise UserError(
                f"in_allocation must be an allocation's number, or true inside `salloc`, but it is {given!r}"
                f" and SLURM_JOB_ID is {os.environ.get('SLURM_JOB_ID')!r}"
            )
        return number

    @functools.cached_property
    def max_parallel(self) -> int:
        return max(1, len(self._nodes))

    @functools.cached_property
    def _nodes(self) -> list[str]:
        row = self._query_allocation()
        if row is None or row.state in ENDED_STATES:
            raise UserError(
                f"allocation {self.allocation} is not running: Slurm says {row.state if row else 'no such job'}"
            )
        return run_slurm(["scontrol", "show", "hostnames", row.nodes]).split()

    def _query_allocation(self) -> ListedJob | None:
        """Return the allocation's row of the queue, at most `poll_s` seconds old; None if Slurm does not list it."""
        queue = self._watcher.queue
        if queue.refresh() or queue.queried_at:
            return queue.row_by_number(self.allocation)
        raise UnavailableError(f"Slurm does not answer: {queue.last_error or 'no reason given'}; try again later")

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Start each job as a step while nodes are free; `poll` starts the others later."""
        specs = [make_job_spec(job, self.run_script, self.settings) for job in jobs]
        for spec in specs:
            if spec.nodes > len(self._nodes):
                raise UserError(
                    f"a trial needs {spec.nodes} nodes, but allocation {self.allocation} has {len(self._nodes)};"
                    " request a larger one, or correct the profile's hardware"
                )
            self._specs[spec.folder] = spec
            if not _was_started(spec):
                self._write_files(spec)
        self._start_waiting(specs)
        return [self._handle(spec) for spec in specs]

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        specs = [self._spec(handle) for handle in handles]
        known = [spec for spec in specs if spec is not None]
        self._start_waiting(known)
        return [self._status(handle, spec) for handle, spec in zip(handles, specs, strict=True)]

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Cancel the steps and wait until their processes are gone."""
        specs = [spec for handle in handles if (spec := self._spec(handle)) is not None]
        for spec in specs:
            mark_cancelled(spec)
        elsewhere = [p for p in specs if not _signal(p, signal.SIGTERM) and _was_started(p) and _is_alive(p)]
        self._cancel_steps(elsewhere)
        deadline = time.monotonic() + 60.0
        while (left := [spec for spec in specs if _is_alive(spec)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        for spec in left:
            _signal(spec, signal.SIGKILL)
        self._cancel_steps(specs)

    def find(self, run_id: str) -> list[Handle]:
        """Return the attempts of the run that were started as steps."""
        found = []
        for folder in find_attempt_files(self.run_dir, ATTEMPT_FOLDERS):
            spec = self._read_spec(folder)
            if spec is not None and spec.run_id == run_id and _was_started(spec):
                self._specs[folder] = spec
                found.append(self._handle(spec))
        return found

    def _handle(self, spec: JobSpec) -> Handle:
        allocation = self._allocation_of(spec)
        return super()._handle(spec).model_copy(update={"job_id": f"{allocation}.{spec.name}"})

    def _start_waiting(self, specs: Sequence[JobSpec]) -> None:
        """Start waiting jobs on free nodes while the allocation has enough time left."""
        waiting = [p for p in specs if not _was_started(p) and not (p.folder / CANCELLED_FILE).exists()]
        for spec in waiting:
            shortage = self._explain_time_shortage(spec)
            if shortage is not None and any(self._running_steps()):
                return  # running steps may still finish: the refusal is reported when none is left
            if shortage is not None:
                write_model(spec.folder / REFUSED_FILE, RefusalRecord(reason=shortage))
                continue
            taken = {node for step in self._running_steps() for node in step.nodes}
            bad = list_bad_nodes(self.run_dir)
            good = [node for node in self._nodes if node not in bad]
            free = [node for node in (good if len(good) >= spec.nodes else self._nodes) if node not in taken]
            if len(free) < spec.nodes:
                return
            self._start_step(spec, free[: spec.nodes])

    def _explain_time_shortage(self, spec: JobSpec) -> str | None:
        row = self._query_allocation()
        if row is None or row.state in ENDED_STATES:
            return f"allocation {self.allocation} has ended"
        if row.left_s is None:
            return None
        left_s = row.left_s - (processes.boot_clock_s() - self._watcher.queue.queried_at)
        if left_s >= spec.timeout_s + TIME_LEFT_MARGIN_S:
            return None
        return (
            f"allocation {self.allocation} has {max(0, left_s):.0f} s left, but a trial needs"
            f" {spec.timeout_s:.0f} s and a margin of {TIME_LEFT_MARGIN_S:.0f} s"
        )

    def _running_steps(self) -> Iterator[StepRecord]:
        """Yield the steps of this run that have not ended."""
        on_disk = (self._read_spec(folder) for folder in find_attempt_files(self.run_dir, ATTEMPT_FOLDERS))
        known = {spec.folder: spec for spec in (*on_disk, *self._specs.values()) if spec is not None}
        for spec in known.values():
            launched = StepRecord.read(spec.folder / LAUNCHED_FILE)
            if launched is not None and not sees_file(spec.folder / END_FILE) and _is_alive(spec):
                yield launched

    def _start_step(self, spec: JobSpec, nodes: list[str]) -> None:
        """Start the job script as a process that outlives the search."""
        place = (f"--jobid={self.allocation}", f"--nodelist={','.join(nodes)}")
        arguments = (*spec.srun_arguments, *self.settings.step_options, *place)
        step_name = f"{spec.name}-{hashlib.sha256(str(spec.folder).encode()).hexdigest()[:8]}"
        placed = spec.model_copy(update={"srun_arguments": arguments, "step_name": step_name})
        self._specs[spec.folder] = placed
        write_model(spec.folder / SPEC_FILE, placed)
        write_model(spec.folder / JOBS_FILE, JobList(run_id=spec.run_id, jobs=(spec.folder / SPEC_FILE,)))
        script = spec.folder / SCRIPT_FILE
        script.write_text(render_chunk([placed], spec.folder, self.settings), encoding="utf-8")
        row = self._watcher.queue.row_by_number(self.allocation)
        submitted = row.submitted if row else ""
        launched = StepRecord(
            allocation=self.allocation, nodes=tuple(nodes), moment=BootMoment.now(), submitted=submitted
        )
        write_model(spec.folder / LAUNCHED_FILE, launched)
        environment = {**step_environment(), "CCL_STEP_JOB": f"{self.allocation}.{spec.name}"}
        with (spec.folder / f"slurm-{self.allocation}.{spec.name}.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                cwd=spec.folder,
            )
        done = launched.model_copy(update={"process": processes.ProcessIdentity.of(process.pid)})
        write_model(spec.folder / LAUNCHED_FILE, done)

    def _status(self, handle: Handle, spec: JobSpec | None) -> JobStatus:
        if spec is None:
            return JobStatus.failed(FailureKind.LAUNCHER, f"the files of job {handle.job_name} are missing")
        status = self._watcher.read_result(spec)
        if status is RunStatus.OK:
            return JobStatus(state=JobState.DONE)
        refused = RefusalRecord.read(spec.folder / REFUSED_FILE)
        if refused is not None and not _was_started(spec):
            return JobStatus.failed(FailureKind.ALLOCATION_ENDED, refused.reason, Stage.SUBMIT)
        if not _was_started(spec):
            if (spec.folder / CANCELLED_FILE).exists():
                return JobStatus.failed(FailureKind.CANCELLED, "cancelled by the search before it started")
            return JobStatus(state=JobState.QUEUED, note="waiting for free nodes of the allocation")
        if not sees_file(spec.folder / END_FILE) and _is_alive(spec):
            return JobStatus(state=JobState.RUNNING, note=f"step of allocation {self._allocation_of(spec)}")
        return self._explain_end(spec, failed_result=status is RunStatus.FAILED)

    def _explain_end(self, spec: JobSpec, *, failed_result: bool) -> JobStatus:
        """Return why the step ended without a valid result; the end of the allocation is not the trial's fault."""
        queue = self._watcher.queue
        queue.refresh(urgent=True)
        ended_s = self._ended_s.setdefault(spec.folder, processes.boot_clock_s())
        if sees_file(spec.folder / END_FILE) and queue.queried_at < ended_s and not queue.last_error:
            return JobStatus(state=JobState.RUNNING, note="ended; waiting for Slurm's state of the allocation")
        allocation = self._allocation_of(spec)
        row = self._find_row(spec, allocation)
        ending = read_ending(spec, f"{allocation}.{spec.name}", state=None, submission_folder=spec.folder)
        gone = row is None or row.state.split()[0] in ENDED_STATES or row.state == "COMPLETING"
        if gone and not ending.cancelled_by_us:
            state = row.state if row else "unknown to Slurm"
            message = f"allocation {allocation} ended while the trial ran ({state})"
            return JobStatus.failed(FailureKind.ALLOCATION_ENDED, message, Stage.SUBMIT)
        return self._watcher.conclude(spec, ending, failed_result=failed_result)

    def _find_row(self, spec: JobSpec, allocation: str) -> ListedJob | None:
        """Return the row of the allocation of a step; None also if another job has its number now."""
        launched, row = StepRecord.read(spec.folder / LAUNCHED_FILE), self._watcher.queue.row_by_number(allocation)
        is_other = launched is not None and row is not None and launched.submitted not in ("", row.submitted)
        return None if is_other else row

    def _allocation_of(self, spec: JobSpec) -> str:
        """Return the allocation that the step was started in: this shell may be in another one, or in none."""
        launched = StepRecord.read(spec.folder / LAUNCHED_FILE)
        return launched.allocation if launched is not None else self.allocation

    def _cancel_steps(self, specs: Sequence[JobSpec]) -> None:
        """Cancel those steps that Slurm still lists."""
        names: dict[str, set[str]] = {}
        for spec in specs:
            if _was_started(spec):
                placed = JobSpec.read(spec.folder / SPEC_FILE) or spec
                names.setdefault(self._allocation_of(spec), set()).add(placed.step_name or placed.name)
        for allocation, wanted in names.items():
            listed = ask_slurm(["squeue", "--steps", f"--jobs={allocation}", "--noheader", "--format=%i %j"]) or ""
            rows = [line.partition(" ") for line in listed.splitlines()]
            with contextlib.suppress(SlurmError):
                cancel_jobs([step for step, _, name in rows if name.strip() in wanted])


def _was_started(spec: JobSpec) -> bool:
    """Whether a process was started for the attempt: it claimed it, its file names one, or it may still start."""
    if sees_file(spec.folder / STARTED_FILE):
        return True
    launched = StepRecord.read(spec.folder / LAUNCHED_FILE)
    return launched is not None and (launched.process is not None or launched.moment.elapsed_s() < CLAIM_TIMEOUT_S)


def _is_alive(spec: JobSpec) -> bool:
    """Whether the step's process still runs; if another machine started it, whether its time is left."""
    launched = StepRecord.read(spec.folder / LAUNCHED_FILE)
    if launched is None:
        return False
    process = launched.process
    if process is not None and not process.is_elsewhere and process.is_of_this_boot and process.start:
        return process.is_running()
    if sees_file(spec.folder / END_FILE):
        return False
    has_started = process is not None or sees_file(spec.folder / STARTED_FILE)
    return launched.moment.elapsed_s() < (spec.timeout_s + DEADLINE_S if has_started else CLAIM_TIMEOUT_S)


def _signal(spec: JobSpec, number: int) -> bool:
    """Signal the step's process; False if it is not on this machine or has ended."""
    launched = StepRecord.read(spec.folder / LAUNCHED_FILE)
    process = launched.process if launched else None
    if process is None or not process.is_running():
        return False
    os.kill(process.pid, number)
    return True


@LAUNCHERS.register("slurm")
class SlurmLauncherFactory:
    """Chooses the launcher class by the profile's `in_allocation`."""

    data_settings = DATA_SETTINGS

    @classmethod
    def from_profile(cls, profile: Profile) -> SlurmLauncher:
        """Return the launcher; UserError if a field is wrong. Sends no command to the cluster yet."""
        settings = profile.read_settings(SlurmSettings)
        launcher = SlurmLauncher if settings.in_allocation is False else AllocationLauncher
        return launcher(
            settings,
            _read_run_script(profile),
            run_dir=profile.run_dir,
            ranks_per_node=profile.hardware.accelerators_per_node or 1,
        )


def _read_run_script(profile: Profile) -> RunScript:
    """Return the run script of the profile's framework; without a framework its path is None, enough for `check`."""
    if profile.framework is None:
        needs = tuple(need for name in list_frameworks() for need in load_framework(name).needs)
        return RunScript(None, "torchrun", profile.environment, needs=needs)
    framework = load_framework(profile.framework)
    add = framework.knob_environment
    return RunScript(framework.script_path, framework.runner, profile.environment, add, framework.needs)
