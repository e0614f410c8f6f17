"""The `slurm` launcher: one job per trial."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from cclsearch.core.content import project_root
from cclsearch.core.errors import UnavailableError, UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import FailureKind, Provenance, Stage
from cclsearch.launch.base import Check, Handle, Job, JobState, JobStatus, refuse_places
from cclsearch.launch.collect import changed_record, explain_record
from cclsearch.launch.ownership import find_attempt_files, is_own
from cclsearch.launch.slurm.commands import ListedJob, SlurmError, SlurmUnavailable, read_queue, require_command
from cclsearch.launch.slurm.job_files import (
    CANCELLED_FILE,
    JOBS_FILE,
    SPEC_FILE,
    SUBMISSION_FILE,
    JobList,
    JobSpec,
    RunScript,
    Submission,
    describe_job_spec,
    link_scratch,
    list_bad_nodes,
    make_job_spec,
    prepare_folder,
)
from cclsearch.launch.slurm.script import node_command, render_script
from cclsearch.launch.slurm.settings import SlurmSettings
from cclsearch.launch.slurm.submit import Submitter, Unresolved, find_max_array, find_max_jobs
from cclsearch.launch.slurm.watch import QueueCache, Watcher, cancel_attempts, mark_cancelled

# Resuming without its answer could submit a job twice.
FIND_TIMEOUT_S = 600.0
"""Seconds that `find` waits for a controller that does not answer."""
ATTEMPT_FOLDERS = "slurm-a*"
"""Pattern of the names that attempts' own folders have."""
RESULT_POLL_S = 2.0
"""Pause between two checks for result files."""


class SlurmLauncher:
    """Runs each trial as one Slurm job on as many nodes as its ranks need."""

    name = "slurm"
    provenance = Provenance.MEASURED
    shares_files = True

    def __init__(
        self,
        settings: SlurmSettings,
        run_script: RunScript,
        *,
        run_dir: Path | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        self.settings = settings
        self.run_script = run_script
        self.run_dir = run_dir
        self.ranks_per_node = ranks_per_node
        """Accelerators per node in the profile, for `check`; each trial states its own number."""
        self.poll_interval_s = min(RESULT_POLL_S, settings.poll_s)
        self._submitter = Submitter(settings)
        self._watcher = Watcher(settings, QueueCache(settings.poll_s))
        self._specs: dict[Path, JobSpec] = {}
        self._next_try = 0.0

    @functools.cached_property
    def max_parallel(self) -> int:
        return find_max_jobs(self.settings)

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Submit in chunks below Slurm's limits; `poll` later submits the jobs that a limit kept out."""
        refuse_places(jobs, self.name)
        for command in ("sbatch", "squeue", "scancel"):
            require_command(command)
        specs = [make_job_spec(job, self.run_script, self.settings) for job in jobs]
        for spec in specs:
            self._prepare(spec)
        if len(specs) > 1 and self.settings.max_array is None:
            self._submitter.max_array = self._max_array
        self._submitter.left_out = list_bad_nodes(self.run_dir)
        self._submitter.submit(specs)
        return [self._handle(spec) for spec in specs]

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        """Check result files at every call, and the queue at most every `poll_s` seconds: one query for all jobs."""
        specs = [self._spec(handle) for handle in handles]
        known = [spec for spec in specs if spec is not None]
        refused = self._submit_waiting(known)
        numbered = [(spec, job) for spec in known if (job := self._submitter.ids.get(spec.folder)) is not None]
        seen = dict(zip([p.folder for p, _ in numbered], self._watcher.poll(numbered), strict=True))
        why = one_line(self._submitter.waiting_for or "a limit of the cluster", 160)
        waiting = JobStatus(state=JobState.QUEUED, note=f"not submitted yet: {why}")
        return [
            _explain_unread(handle) if spec is None else seen.get(spec.folder) or refused or waiting
            for handle, spec in zip(handles, specs, strict=True)
        ]

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Cancel the jobs and wait until all of them have ended in Slurm's queue."""
        specs = [spec for handle in handles if (spec := self._spec(handle)) is not None]
        for spec in specs:
            mark_cancelled(spec)
        try:
            numbered = [(p, job) for p in specs if (job := self._submitter.resolve(p.folder)) is not None]
            left = cancel_attempts(numbered) if numbered else []
        except (SlurmUnavailable, Unresolved) as error:
            raise UnavailableError(
                f"Slurm does not answer ({one_line(str(error), 120)}), so jobs may still run;"
                " run `ccl-search clean RUN` later"
            ) from None
        if left:
            raise UserError(f"Slurm still lists {', '.join(left)} after scancel; run `ccl-search clean RUN` later")

    def find(self, run_id: str) -> list[Handle]:
        """Return every submitted attempt of the run, found by the files in its folder and by Slurm's queue."""
        rows = self._read_queue_with_retry() if shutil.which("squeue") is not None else []
        found: dict[Path, Handle] = {}
        for folder in [*find_attempt_files(self.run_dir, ATTEMPT_FOLDERS), *_folders_in_queue(rows, run_id)]:
            spec = self._read_spec(folder)
            if spec is None or spec.run_id != run_id or folder in found or not self._is_ours(folder):
                continue
            if self._submitter.resolve(folder, rows) is not None:
                self._specs[folder] = spec
                found[folder] = self._handle(spec)
        return list(found.values())

    def render(self, job: Job) -> str:
        """Return the job's script; given to sbatch by hand, it runs the trial once more in a separate folder."""
        spec = make_job_spec(job, self.run_script, self.settings)
        script = render_script(
            spec.shape,
            self.settings,
            name=spec.name,
            comment=f"ccl-search run={job.run_id} trial={job.trial} by hand",
            folder=spec.trial_dir,
            command=node_command(spec.host_python, spec.program, "again", spec.folder / SPEC_FILE),
        )
        return script + "".join(f"# {line}\n" for line in describe_job_spec(spec))

    def check(self) -> list[Check]:
        """Check that the cluster accepts and runs such jobs; submits one small job."""
        from cclsearch.launch.slurm.check import check_cluster

        ranks = self.settings.gpus_per_node or self.ranks_per_node
        return check_cluster(self.settings, self.run_script, ranks, self.run_dir or project_root() / "runs")

    def close(self) -> None:
        """Does nothing: no connection is open, and jobs keep running."""

    @functools.cached_property
    def _max_array(self) -> int:
        return find_max_array()

    def _prepare(self, spec: JobSpec) -> None:
        """Write the attempt's files, unless a killed search has already submitted the attempt."""
        self._specs[spec.folder] = spec
        if not self._submitter.may_be_submitted(spec.folder):
            self._write_files(spec)

    def _write_files(self, spec: JobSpec) -> None:
        (spec.folder / CANCELLED_FILE).unlink(missing_ok=True)
        prepare_folder(spec)
        link_scratch(spec, self.settings)

    def _submit_waiting(self, specs: Sequence[JobSpec]) -> JobStatus | None:
        """Submit jobs that a limit kept out, at most every `poll_s` seconds; return the failure if Slurm now refuses
        one.
        """
        waiting = [
            spec
            for spec in specs
            if not (spec.folder / CANCELLED_FILE).exists() and not self._submitter.may_be_submitted(spec.folder)
        ]
        if not waiting or time.monotonic() < self._next_try:
            return None
        self._next_try = time.monotonic() + self.settings.poll_s
        try:
            for spec in waiting:
                self._submitter.submit([spec])
                if spec.folder not in self._submitter.ids:
                    break
        except UserError as error:
            return JobStatus.failed(FailureKind.LAUNCHER, str(error), Stage.SUBMIT)
        return None

    def _spec(self, handle: Handle) -> JobSpec | None:
        folder = Path(handle.details.get("folder", ""))
        if folder not in self._specs:
            spec = self._read_spec(folder)
            if spec is None:
                return None
            self._specs[folder] = spec
            if handle.job_id:
                self._submitter.ids.setdefault(folder, handle.job_id)
        return self._specs[folder]

    def _read_spec(self, folder: Path) -> JobSpec | None:
        """Return the job spec in that folder, with its paths where the run is now; None if it is another run's.

        Raises UserError if another user submitted the job, because Slurm does not list it here.
        """
        spec = JobSpec.read(folder / SPEC_FILE)
        if spec is None or not is_own(self.run_dir and self.run_dir.absolute(), spec.trial_dir, spec.run_inode):
            return None
        submission = Submission.read(folder / SUBMISSION_FILE)
        if submission is not None and submission.user != os.getuid():
            raise UserError(
                f"job {spec.name} was submitted by the user with id {submission.user}, and you are {os.getuid()}:"
                " only its user can see and cancel it. Run this command as that user"
            )
        return spec.model_copy(update={"folder": folder, "trial_dir": folder.parent})

    def _handle(self, spec: JobSpec) -> Handle:
        return Handle(
            launcher=self.name,
            job_name=spec.name,
            job_id=self._submitter.ids.get(spec.folder, ""),
            trial_dir=spec.trial_dir,
            details={"folder": str(spec.folder)},
        )

    def _is_ours(self, folder: Path) -> bool:
        """Whether the folder belongs to this run: another project may have a run of the same name."""
        return self.run_dir is None or folder.resolve().is_relative_to(self.run_dir.resolve())

    def _read_queue_with_retry(self) -> list[ListedJob]:
        deadline, pause = time.monotonic() + FIND_TIMEOUT_S, 1.0
        while True:
            try:
                return read_queue()
            except SlurmError as error:
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"Slurm must answer before jobs can be found again: {one_line(str(error), 120)}; retry later"
                    ) from None
            time.sleep(pause)
            pause = min(pause * 2, 20.0)


def _folders_in_queue(rows: Sequence[ListedJob], run_id: str) -> Iterator[Path]:
    """Yield attempt folders of the run's jobs in the queue, found by job name, comment or working directory."""
    for folder in dict.fromkeys(row.folder for row in rows if _may_be_of(row, run_id)):
        jobs = JobList.read(Path(folder) / JOBS_FILE)
        if jobs is not None and jobs.run_id == run_id:
            yield from (path.parent for path in jobs.jobs)


def _may_be_of(row: ListedJob, run_id: str) -> bool:
    return row.name.startswith(f"{run_id}-") or f"run={run_id} " in f"{row.comment} " or "/submission-" in row.folder


def _explain_unread(handle: Handle) -> JobStatus:
    """Return the failure of a job whose spec is missing or was changed by the job."""
    if problem := explain_record(Path(handle.details.get("folder", "")) / SPEC_FILE, JobSpec):
        return changed_record(problem)
    message = f"the files of job {handle.job_id or handle.job_name} are missing in {handle.trial_dir}"
    return JobStatus.failed(FailureKind.LAUNCHER, message)
