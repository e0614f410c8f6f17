"""The `tpu-vm` launcher: one process per worker of a slice, started once, polled, its files copied back.

An attempt's record is written locally before anything starts on a worker, the workers claim an attempt by an exclusive
file, and a queued resource has the run's label and a name made from it. So a resumed search finds everything that a
killed one left, and nothing is started twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.offline import refuse_outside
from cclsearch.core.text import one_line
from cclsearch.core.values import BootMoment, Failure, FailureKind, Provenance, Stage
from cclsearch.launch.base import Check, Handle, Job, JobState, JobStatus, Leftover, refuse_places, write_model
from cclsearch.launch.collect import clear_results, explain_record
from cclsearch.launch.ownership import find_attempt_files, is_own, read_inode
from cclsearch.launch.profile import LAUNCHERS, Profile
from cclsearch.launch.tpu_vm.cloud_source import make_worker_source
from cclsearch.launch.tpu_vm.gcloud import make_token
from cclsearch.launch.tpu_vm.job import (
    CANCELLED_FILE,
    RECORD_FILE,
    START_FILE,
    STATUS_FILE,
    TpuJobRecord,
    TpuStartRecord,
    append_logs,
    attempt_folder,
    find_failure,
    log_offsets,
    merge_logs,
    render_run_script,
    unpack_results,
    write_bundle,
)
from cclsearch.launch.tpu_vm.settings import DATA_SETTINGS, TpuSettings
from cclsearch.launch.tpu_vm.workers import (
    Unreachable,
    WorkerAnswer,
    WorkerAnswers,
    WorkerGroup,
    WorkersLost,
    WorkersPending,
    WorkersReady,
    WorkerState,
    is_permanent_error,
)
from cclsearch.space.framework import Framework, load_framework

BUNDLE_FILE = "bundle.tar.gz"
DEADLINE_S = 120.0
"""Seconds beyond a trial's time limit in which a worker may report that it ended the trial."""
PEER_GRACE_S = 20.0
"""Seconds that the other processes may continue after one of them has ended."""
STOP_S = 60.0
CLOUD_PATIENCE_FACTOR = 5
"""Multiple of `lost_after_s` that a new TPU VM may take to accept connections."""
_CANCELLED = JobStatus.failed(FailureKind.CANCELLED, "cancelled by the search")


@LAUNCHERS.register("tpu-vm")
class TpuVmLauncher:
    """Runs trials on the workers of a TPU slice; see the module's docstring."""

    name = "tpu-vm"
    provenance = Provenance.MEASURED
    data_settings = DATA_SETTINGS
    max_parallel = 1

    def __init__(self, profile: Profile, settings: TpuSettings) -> None:
        self.profile = profile
        self.settings = settings
        self.worker_source = make_worker_source(settings, profile.run_dir)
        self.poll_interval_s = settings.poll_s or (2.0 if settings.hosts else 10.0)
        self._since: dict[tuple[str, int, str], float] = {}
        self._run_ids: set[str] = set()

    @classmethod
    def from_profile(cls, profile: Profile) -> TpuVmLauncher:
        """Return the launcher of a profile; UserError if its own fields are wrong or name no workers."""
        settings = profile.read_settings(TpuSettings)
        where = profile.source or profile.name
        if len(settings.sources) != 1:
            given = " and ".join(settings.sources) or "none of them"
            raise UserError(
                f"{where}: a TPU profile needs exactly one of `hosts` (workers over SSH), `tpu` (a TPU VM by name)"
                f" and `queued_resource`, but it has {given}; copy it into your project's launchers/ and fill it in"
            )
        if not settings.hosts and settings.zone is None:
            raise UserError(f"{where}: `zone` must name the zone of the TPU (us-central1-a)")
        if not settings.hosts:
            refuse_outside(f"Google Cloud (gcloud), which the profile {where!r} needs", "name workers by `hosts`")
        return cls(profile, settings)

    @cached_property
    def framework(self) -> Framework:
        """The framework whose script the jobs run."""
        return load_framework(self.profile.require_framework())

    def submit(self, jobs: Sequence[Job]) -> list[Handle]:
        """Record each attempt and request workers; `poll` starts it when they are ready."""
        refuse_places(jobs, self.name)
        handles = []
        for job in jobs:
            self._run_ids.add(job.run_id)
            folder = attempt_folder(job.trial_dir, job.attempt)
            record = TpuJobRecord(
                run_id=job.run_id,
                trial=job.trial,
                attempt=job.attempt,
                name=job.name,
                trial_dir=job.trial_dir.absolute(),
                num_processes=math.ceil(job.payload.num_ranks / job.payload.ranks_per_node),
                timeout_s=job.timeout_s,
                token=make_token(self.profile.run_dir),
                run_inode=read_inode(self.profile.run_dir),
            )
            self.worker_source.request(job.run_id)
            if not (folder / RECORD_FILE).is_file():
                clear_results(job.trial_dir)
                texts = {"run.sh": self.render(job), "job.json": record.model_dump_json(exclude={"trial_dir"})}
                write_bundle(folder / BUNDLE_FILE, job, self.framework, texts)
                write_model(folder / RECORD_FILE, record)
            handles.append(_make_handle(record))
        return handles

    def poll(self, handles: Sequence[Handle]) -> list[JobStatus]:
        """Return the status of these jobs; starts waiting jobs whose workers are ready."""
        return [self._poll_one(handle) for handle in handles]

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Stop these jobs on every reachable worker and wait until their processes are gone."""
        for handle in handles:
            record = _read_record(handle)
            if record is None or JobStatus.read(record.folder / STATUS_FILE) is not None:
                continue
            self._run_ids.add(record.run_id)
            (record.folder / CANCELLED_FILE).touch()
            group = self._find_group(record)
            if group is not None:
                self._end_processes(record, group)
            self._finish(record, _CANCELLED)

    def find(self, run_id: str) -> list[Handle]:
        """Return every recorded attempt of the run, whether or not it is in the ledger."""
        self._run_ids.add(run_id)
        return [_make_handle(record) for record in self._records(run_id)]

    def render(self, job: Job) -> str:
        """Return the script that every worker runs."""
        return render_run_script(job, self.framework, self.profile.environment, self.settings)

    def check(self) -> list[Check]:
        """Check whether the workers, or the cloud, can be reached from here."""
        return self.worker_source.check()

    def close(self) -> None:
        """Delete the search's resources, except with an unfinished job."""
        recorded = self.worker_source.recorded_run()  # a search killed during deletion has no job left to name its run
        for run_id in sorted(self._run_ids | ({recorded} if recorded else set())):
            if not self._open_records(run_id):
                self.worker_source.release(run_id)
        self._run_ids.clear()

    def leftovers(self, run_id: str) -> list[Leftover]:
        """Return the attempts that have not ended, and the resources with the run's label."""
        open_jobs = self._open_records(run_id)
        jobs = [Leftover(kind="job", name=r.name, state="not known to have ended") for r in open_jobs]
        return [*jobs, *self.worker_source.leftovers(run_id)]

    def remove_leftovers(self, run_id: str) -> None:
        """Stop the jobs and delete the resources; UserError if one cannot be deleted."""
        self.cancel([_make_handle(record) for record in self._records(run_id)])
        self.worker_source.release(run_id, thorough=True)
        self._run_ids.discard(run_id)

    def _poll_one(self, handle: Handle) -> JobStatus:
        record = _read_record(handle)
        if record is None:
            problem = explain_record(_record_path(handle), TpuJobRecord)
            gone = f"the files of job {handle.job_name} are missing"
            unread = f"the record of job {handle.job_name} cannot be used: {one_line(problem, 300)}"
            return JobStatus.failed(FailureKind.LAUNCHER, unread if problem else gone)
        self._run_ids.add(record.run_id)
        known = JobStatus.read(record.folder / STATUS_FILE)
        if known is not None:
            return known
        if (record.folder / CANCELLED_FILE).exists():
            return self._finish(record, _CANCELLED)
        start = TpuStartRecord.read(record.folder / START_FILE)
        found = self.worker_source.find_workers(record.run_id)
        if isinstance(found, WorkersLost):
            return self._end_attempt(record, found.failure)
        if isinstance(found, WorkersPending) and found.uncertain and (start is not None or found.unanswered):
            return self._wait_uncertain(record, start, found)
        self._since.pop((record.name, -1, "cloud"), None)
        if start is not None and (isinstance(found, WorkersPending) or found.name != start.place):
            gone = f"the slice {start.place!r} that ran the trial is gone"
            return self._fail_attempt(record, FailureKind.PREEMPTED, gone)
        if isinstance(found, WorkersPending):
            return JobStatus(state=JobState.QUEUED, note=found.note)
        return self._start(record, found) if start is None else self._poll_processes(record, found.group, start)

    def _wait_uncertain(self, record: TpuJobRecord, start: TpuStartRecord | None, found: WorkersPending) -> JobStatus:
        """The state of the slice is unknown: wait, and fail the attempt when its time limit and a margin are over."""
        patience_s = record.timeout_s + DEADLINE_S + self.settings.lost_after_s * CLOUD_PATIENCE_FACTOR
        if start is None:
            over = self._waited(record, -1, "cloud", patience_s)
        else:
            over = start.moment.elapsed_s() > patience_s
        if not over:
            return JobStatus(state=JobState.QUEUED if start is None else JobState.RUNNING, note=found.note)
        message = f"{found.note}, and the trial's time limit has passed"
        stage = Stage.SUBMIT if start is None else Stage.RUN
        return self._fail_attempt(record, FailureKind.LAUNCHER, message, stage)

    def _start(self, record: TpuJobRecord, ready: WorkersReady) -> JobStatus:
        """Copy the files to the workers and start the processes, the coordinator's first."""
        group, folder = ready.group, record.folder
        if record.num_processes > len(group.addresses):
            message = f"the trial needs {record.num_processes} workers, but there are {len(group.addresses)}"
            # otherwise nothing would be released
            self._finish(record, JobStatus.failed(FailureKind.LAUNCHER, message, Stage.SUBMIT))
            raise UserError(
                f"{message}; correct the profile's `hardware` (num_accelerators, accelerators_per_node), or add hosts"
            )
        processes, name = range(record.num_processes), f"{record.remote_name}.tar.gz"
        errors = group.push(folder / BUNDLE_FILE, name, processes)
        if errors:
            return self._cannot_start(record, errors)
        remote = self._remote(record)
        unpack = (
            f"mkdir -p {remote} && if [ -e {name} ]; then tar -xzf {name} -C {remote}; rm -f {name}; fi"
            f" && exec python3 {remote}/worker.py"
        )
        address = group.addresses[0]
        coordinator = f"[{address}]" if ":" in address else address
        arguments = ["start", remote, "--coordinator", coordinator]
        first = group.call(unpack, arguments, [0])
        if 0 not in first.by_process:
            return self._cannot_start(record, first.silent)
        others = list(processes)[1:]
        if others:
            rest = group.call(unpack, [*arguments, "--port", str(first.by_process[0].port)], others)
            if rest.silent:
                self._end_processes(record, group)
                return self._cannot_start(record, rest.silent)
        self._since = {key: since for key, since in self._since.items() if key[0] != record.name}
        begun = TpuStartRecord(place=ready.name, moment=BootMoment.now(), coordinator=coordinator)
        write_model(folder / START_FILE, begun)
        return JobStatus(state=JobState.RUNNING, note=f"started on {record.num_processes} workers")

    def _cannot_start(self, record: TpuJobRecord, errors: Mapping[int, str]) -> JobStatus:
        """A worker did not accept the job: fail at once if a retry cannot help, else after a while."""
        process, error = sorted(errors.items())[0]
        message = f"worker {process} cannot be reached: {one_line(error, 300)}"
        if self.settings.hosts and is_permanent_error(error):  # a new TPU VM may take a while to accept the key
            self._fail_attempt(record, FailureKind.LAUNCHER, message, Stage.SUBMIT)
            raise UserError(f"{message}; run `ccl-search launcher check {self.profile.name}`, which tries each worker")
        patience_s = self.settings.lost_after_s * (1 if self.settings.hosts else CLOUD_PATIENCE_FACTOR)
        if not self._waited(record, -1, "begin", patience_s):
            return JobStatus(state=JobState.QUEUED, note=message)
        return self._fail_attempt(record, FailureKind.NODE_FAILED, message, Stage.SUBMIT)

    def _poll_processes(self, record: TpuJobRecord, group: WorkerGroup, start: TpuStartRecord) -> JobStatus:
        """Query every process, append new log output, and handle processes that have ended or are lost."""
        answers = self._query_processes(record, group)
        lost = self._find_lost(record, group, answers)
        if lost is not None:
            return self._end_attempt(record, lost)
        by_process = answers.by_process
        ended = [answer for answer in by_process.values() if answer.state is WorkerState.ENDED]
        if len(ended) == record.num_processes:
            return self._collect(record, group, by_process)
        if ended and self._waited(record, -1, "peers", PEER_GRACE_S):
            self._call_if_there(record, group, "stop")
        if start.moment.elapsed_s() > record.timeout_s + DEADLINE_S:
            message = f"not ended after {record.timeout_s:g} s, so the processes were ended"
            return self._fail_attempt(record, FailureKind.TIMEOUT, message)
        note = f"{len(by_process) - len(ended)} of {record.num_processes} processes running"
        if answers.silent:
            note += f"; worker {min(answers.silent)} does not answer"
        return JobStatus(state=JobState.RUNNING, note=note)

    def _query_processes(self, record: TpuJobRecord, group: WorkerGroup) -> WorkerAnswers:
        folder, remote = record.folder, self._remote(record)
        merged: dict[int, WorkerAnswer] = {}
        asking = list(range(record.num_processes))
        silent: dict[int, str] = {}
        while asking:
            arguments = ["status", remote, "--offsets", log_offsets(folder, record.num_processes)]
            answers = group.call(f"exec python3 {remote}/worker.py", arguments, asking)
            for process, answer in answers.by_process.items():
                append_logs(folder, process, answer.stdout, answer.stderr)
            merged |= answers.by_process
            silent |= answers.silent
            asking = [process for process, answer in answers.by_process.items() if answer.more]
        merge_logs(folder, record.trial_dir, record.num_processes)
        return WorkerAnswers(merged, silent)

    def _find_lost(self, record: TpuJobRecord, group: WorkerGroup, answers: WorkerAnswers) -> Failure | None:
        """Return why the trial is lost: slice preempted, worker restarted, or worker silent for too long; else None."""
        cloud = group.explain_loss() if answers.silent else None
        for process in range(record.num_processes):
            answer = answers.by_process.get(process)
            if answer is None and cloud is not None:
                return Failure(stage=Stage.RUN, kind=FailureKind.PREEMPTED, message=cloud, rank=process)
            if answer is None:
                if self._waited(record, process, "silent", self.settings.lost_after_s):
                    why = one_line(answers.silent.get(process, ""), 200)
                    return _node_failed(group, process, f"does not answer: {why}")
                continue
            self._since.pop((record.name, process, "silent"), None)
            if answer.state in (WorkerState.VANISHED, WorkerState.ABSENT):
                what = "lost the trial: it was restarted, or its processes were killed"
                return _node_failed(group, process, what)
        return None

    def _collect(self, record: TpuJobRecord, group: WorkerGroup, by_process: Mapping[int, WorkerAnswer]) -> JobStatus:
        """Copy the files of the ended processes back and return the job's final status."""
        folder = record.folder
        archives = {}
        for process in by_process:
            target = folder / f"w{process}.tar.gz"
            try:
                group.pull(process, f"{self._remote(record)}/w{process}/out.tar.gz", target)
                archives[process] = target
            except Unreachable as error:
                if not self._waited(record, process, "pull", self.settings.lost_after_s):
                    return JobStatus(state=JobState.RUNNING, note=f"worker {process}: {one_line(str(error), 100)}")
                message = f"the files of worker {process} could not be copied back: {one_line(str(error), 200)}"
                return self._fail_attempt(record, FailureKind.NODE_FAILED, message)
        try:
            unpack_results(archives, record.trial_dir, folder / "unpacked")
        except ValueError as error:
            return self._fail_attempt(record, FailureKind.CRASHED, one_line(str(error)))
        merge_logs(folder, record.trial_dir, record.num_processes)
        status = self._finish(record, JobStatus(state=JobState.DONE, failure=find_failure(record, by_process)))
        for archive in archives.values():
            archive.unlink(missing_ok=True)
        self._sweep(record, group)
        return status

    def _fail_attempt(
        self, record: TpuJobRecord, kind: FailureKind, message: str, stage: Stage = Stage.RUN
    ) -> JobStatus:
        return self._end_attempt(record, Failure(stage=stage, kind=kind, message=message))

    def _end_attempt(self, record: TpuJobRecord, failure: Failure) -> JobStatus:
        """End the attempt without results; stop its processes on reachable workers."""
        group = None if failure.kind is FailureKind.PREEMPTED else self._find_group(record)
        if group is not None:
            self._end_processes(record, group)
        merge_logs(record.folder, record.trial_dir, record.num_processes)
        return self._finish(record, JobStatus(state=JobState.DONE, failure=failure))

    def _finish(self, record: TpuJobRecord, status: JobStatus) -> JobStatus:
        write_model(record.folder / STATUS_FILE, status)
        (record.folder / BUNDLE_FILE).unlink(missing_ok=True)
        return status

    def _end_processes(self, record: TpuJobRecord, group: WorkerGroup) -> None:
        """Stop every process that answers, and repeat until none of them runs."""
        deadline = time.monotonic() + STOP_S
        while True:
            answers = self._call_if_there(record, group, "stop")
            running = [p for p, answer in answers.by_process.items() if answer.state is WorkerState.RUNNING]
            if not running or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        self._sweep(record, group)

    def _sweep(self, record: TpuJobRecord, group: WorkerGroup) -> None:
        if not self.settings.keep_remote:
            self._call_if_there(record, group, "sweep")

    def _call_if_there(self, record: TpuJobRecord, group: WorkerGroup, action: str) -> WorkerAnswers:
        """Call `worker.py` on the job's workers that have it."""
        remote = self._remote(record)
        guard = f"test ! -e {remote}/worker.py || exec python3 {remote}/worker.py"
        return group.call(guard, [action, remote], range(min(record.num_processes, len(group.addresses))))

    def _find_group(self, record: TpuJobRecord) -> WorkerGroup | None:
        """Return the workers that may run the job; None if there are none any more."""
        found = self.worker_source.find_workers(record.run_id)
        return found.group if isinstance(found, WorkersReady) else None

    def _remote(self, record: TpuJobRecord) -> str:
        return f"{self.settings.remote_dir}/{record.remote_name}"

    def _waited(self, record: TpuJobRecord, process: int, what: str, patience_s: float) -> bool:
        """Whether `patience_s` has passed since the first call with these arguments."""
        since = self._since.setdefault((record.name, process, what), time.monotonic())
        return time.monotonic() - since >= patience_s

    def _records(self, run_id: str) -> Iterator[TpuJobRecord]:
        for path in find_attempt_files(self.profile.run_dir, f"tpu-a*/{RECORD_FILE}"):
            record = TpuJobRecord.read(path)
            if record is None or record.run_id != run_id or self.profile.run_dir is None:
                continue
            if is_own(self.profile.run_dir.absolute(), record.trial_dir, record.run_inode):
                yield record.model_copy(update={"trial_dir": path.parent.parent})

    def _open_records(self, run_id: str) -> list[TpuJobRecord]:
        """Return the run's attempts without a recorded end."""
        return [r for r in self._records(run_id) if JobStatus.read(r.folder / STATUS_FILE) is None]


def _node_failed(group: WorkerGroup, process: int, what: str) -> Failure:
    message = f"worker {process} ({group.addresses[process]}) {what}"
    return Failure(stage=Stage.RUN, kind=FailureKind.NODE_FAILED, message=message, rank=process)


def _make_handle(record: TpuJobRecord) -> Handle:
    return Handle(
        launcher=TpuVmLauncher.name,
        job_name=record.name,
        job_id=record.name,
        trial_dir=record.trial_dir,
        details={"attempt": str(record.attempt)},
    )


def _record_path(handle: Handle) -> Path:
    return attempt_folder(handle.trial_dir, int(handle.details.get("attempt", "1"))) / RECORD_FILE


def _read_record(handle: Handle) -> TpuJobRecord | None:
    record = TpuJobRecord.read(_record_path(handle))
    return None if record is None else record.model_copy(update={"trial_dir": handle.trial_dir})
