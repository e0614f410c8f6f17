"""Submission that is safe to repeat after a kill at any point: no attempt is submitted to Slurm twice.

`submission.json` is written to the attempt's folder before sbatch is called, and `submitted.json`, with the job id, to
the submission's folder after it. If only the first exists, the job itself (`started.json`) or the queue, which lists a
job's working directory, shows whether sbatch succeeded. sbatch keeps a lock open while it runs, even if the search that
called it was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.values import BootMoment
from cclsearch.launch.base import write_model
from cclsearch.launch.ownership import run_folder_of
from cclsearch.launch.slurm.commands import (
    SITE_DEFAULTS,
    ListedJob,
    Reaction,
    SlurmError,
    SlurmRefusal,
    SlurmUnavailable,
    ask_slurm,
    cancel_jobs,
    classify_refusal,
    find_squeue_filter,
    has_live_jobs,
    is_submit_limit,
    read_queue,
    submit_script,
    suggest_remedy,
)
from cclsearch.launch.slurm.job_files import (
    JOBS_FILE,
    SCRIPT_FILE,
    SPEC_FILE,
    STARTED_FILE,
    SUBMISSION_FILE,
    SUBMITTED_FILE,
    JobList,
    JobSpec,
    SbatchAnswer,
    StartRecord,
    Submission,
)
from cclsearch.launch.slurm.script import node_command, render_script
from cclsearch.launch.slurm.settings import SlurmSettings


class Unresolved(Exception):
    """Slurm does not answer, so it is open whether an attempt was submitted."""


@dataclass
class Submitter:
    """Submits attempts with sbatch, in chunks that the limits allow."""

    settings: SlurmSettings
    max_array: int = 1000
    ids: dict[Path, str] = field(default_factory=dict)
    """Attempt folder -> job id, if known."""
    left_out: Sequence[str] = ()
    """Nodes whose hardware failed: jobs exclude them, as well as the profile's."""
    waiting_for: str = ""
    """Slurm's message on why attempts could not be submitted yet; empty if none waits."""

    def submit(self, specs: Sequence[JobSpec]) -> None:
        """Submit the attempts that are not submitted yet; those that a limit keeps out get no entry in `ids`.

        Raises UserError if Slurm says that such a job can never run; the jobs of this call are then cancelled.
        """
        self.waiting_for = ""
        fresh = [spec for spec in specs if not self.may_be_submitted(spec.folder)]
        done: list[JobSpec] = []
        try:
            for chunk in self._chunk(fresh):
                if self.waiting_for:
                    break
                self._submit_chunk(chunk, done)
        except UserError:
            with contextlib.suppress(SlurmError):
                cancel_jobs([self.ids[spec.folder] for spec in done])
            raise

    def may_be_submitted(self, folder: Path) -> bool:
        """Whether the attempt in that folder was submitted, or Slurm does not answer now, which `waiting_for` says."""
        try:
            return self.resolve(folder) is not None
        except Unresolved as error:
            self.waiting_for = str(error)
            return True

    def resolve(self, folder: Path, rows: Sequence[ListedJob] | None = None) -> str | None:
        """Return the job id of the attempt in that folder; None if it was never submitted.

        Raises `Unresolved` if Slurm does not answer now.
        """
        if folder in self.ids:
            return self.ids[folder]
        submission = Submission.read(folder / SUBMISSION_FILE)
        if submission is None:
            return None
        found = self._read_evidence(folder, submission)
        if found is None:
            with _hold_lock(folder.parent):  # waits for an sbatch that outlived its search
                found = self._read_evidence(folder, submission) or _find_in_queue(submission, rows)
        if found is not None:
            self.ids[folder] = found
        return found

    def _read_evidence(self, folder: Path, submission: Submission) -> str | None:
        submitted = SbatchAnswer.read(submission.folder / SUBMITTED_FILE)
        if submitted is not None:
            return submitted.job_id if submission.index is None else f"{submitted.job_id}_{submission.index}"
        started = StartRecord.read(folder / STARTED_FILE)
        return None if started is None else started.job_id

    def _chunk(self, specs: Sequence[JobSpec]) -> Iterator[list[JobSpec]]:
        """Yield attempts of one shape together, at most one array at a time."""
        most = min(self.max_array, self.settings.max_array or self.max_array) if self.settings.arrays else 1
        size = max(1, most)
        for shape in dict.fromkeys(spec.shape for spec in specs):
            same = [spec for spec in specs if spec.shape == shape]
            yield from (same[start : start + size] for start in range(0, len(same), size))

    def _submit_chunk(self, chunk: list[JobSpec], done: list[JobSpec]) -> None:
        """Call sbatch once; if a limit refuses the chunk, try its halves, down to a single job."""
        try:
            self._call_with_retry(chunk)
            done.extend(chunk)
            return
        except SlurmUnavailable as error:
            self.waiting_for = str(error)
            return
        except SlurmRefusal as refusal:
            for spec in chunk:
                (spec.folder / SUBMISSION_FILE).unlink(missing_ok=True)
            others = len(chunk) > 1 or self._has_jobs(str(refusal))
            meaning = classify_refusal(str(refusal), others_queued=others)
            if meaning is Reaction.NEVER and self.left_out:  # the other nodes are too few
                self.left_out = ()
                self._submit_chunk(chunk, done)
                return
            if meaning is Reaction.NEVER or (meaning is Reaction.SMALLER_ARRAY and len(chunk) == 1):
                raise UserError(f"Slurm refuses the job: {refusal}; {suggest_remedy(str(refusal))}") from None
            if len(chunk) == 1:
                self.waiting_for = str(refusal)
                return
            if meaning is Reaction.SMALLER_ARRAY:
                self.max_array = max(1, len(chunk) // 2)
        for half in (chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]):
            if not self.waiting_for:
                self._submit_chunk(half, done)

    def _call_with_retry(self, chunk: list[JobSpec]) -> None:
        """Call sbatch, and again if a submit limit refuses a job though none is queued: one may just have ended."""
        try:
            self._call_sbatch(chunk)
        except SlurmRefusal as refusal:
            message = str(refusal)
            if len(chunk) > 1 or not is_submit_limit(message) or self._has_jobs(message):
                raise
            self._call_sbatch(chunk)

    def _has_jobs(self, refusal: str) -> bool:
        """Whether queued jobs count against the limit; True if Slurm does not answer."""
        account, qos = (
            getattr(self.settings, name) or os.environ.get(SITE_DEFAULTS[name]) for name in ("account", "qos")
        )
        try:
            return has_live_jobs(find_squeue_filter(refusal, account=account, qos=qos))
        except SlurmError:
            return True

    def _call_sbatch(self, chunk: list[JobSpec]) -> None:
        first = chunk[0]
        folder = first.folder / f"submission-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        paths = tuple(spec.folder / SPEC_FILE for spec in chunk)
        write_model(folder / JOBS_FILE, JobList(run_id=first.run_id, jobs=paths))
        script = folder / SCRIPT_FILE
        excluded = ",".join(name for name in (self.settings.exclude, *self.left_out) if name) or None
        settings = self.settings.model_copy(update={"exclude": excluded})
        script.write_text(render_chunk(chunk, folder, settings), encoding="utf-8")
        with _hold_lock(first.trial_dir) as descriptor:
            for index, spec in enumerate(chunk):
                position = index if len(chunk) > 1 else None
                submission = Submission(folder=folder, index=position, moment=BootMoment.now(), user=os.getuid())
                write_model(spec.folder / SUBMISSION_FILE, submission)
            job_id = submit_script(script, pass_fds=(descriptor,), without=overridden_defaults(self.settings))
            write_model(folder / SUBMITTED_FILE, SbatchAnswer(job_id=job_id))
        for index, spec in enumerate(chunk):
            self.ids[spec.folder] = f"{job_id}_{index}" if len(chunk) > 1 else job_id
        time.sleep(self.settings.submit_pause_s)


def render_chunk(chunk: Sequence[JobSpec], folder: Path, settings: SlurmSettings) -> str:
    """Return the sbatch script of one submission: a job or a job array."""
    first = chunk[0]
    alone = len(chunk) == 1
    what = f"trial={first.trial} attempt={first.attempt}" if alone else f"trials={len(chunk)}"
    return render_script(
        first.shape,
        settings,
        name=first.name if alone else f"{first.run_id}-x{len(chunk)}",
        comment=f"ccl-search run={first.run_id} {what}",
        folder=folder,
        command=node_command(first.host_python, first.program, "batch", folder / JOBS_FILE),
        array_size=None if alone else len(chunk),
    )


def overridden_defaults(settings: SlurmSettings) -> list[str]:
    """Return the variables of the site's defaults that would override the profile."""
    return [name for setting, name in SITE_DEFAULTS.items() if getattr(settings, setting)]


def _find_in_queue(submission: Submission, rows: Sequence[ListedJob] | None) -> str | None:
    """Return the job id by the submission's folder, which is the job's working directory."""
    # An array that was cancelled before any of its tasks started is listed as one job without task numbers.
    try:
        known = read_queue() if rows is None else rows
    except SlurmError as error:
        raise Unresolved(str(error)) from None
    ids = [row.job_id for row in known if Path(row.folder) == submission.folder]
    if submission.index is None:
        return ids[0] if ids else None
    whole = next((f"{job_id}_{submission.index}" for job_id in ids if "_" not in job_id), None)
    return next((job_id for job_id in ids if job_id.endswith(f"_{submission.index}")), whole)


@contextlib.contextmanager
def _hold_lock(trial_dir: Path) -> Iterator[int]:
    """Lock the submissions of one run on this machine; yield the descriptor, so that sbatch keeps the lock too."""
    name = hashlib.sha256(str(run_folder_of(trial_dir) or trial_dir.parent).encode()).hexdigest()[:16]
    locks = Path(tempfile.gettempdir()) / f"ccl-search-{os.getuid()}"
    locks.mkdir(mode=0o700, exist_ok=True)
    if locks.lstat().st_uid != os.getuid() or locks.is_symlink():
        raise UserError(f"{str(locks)!r} must be your own folder, but belongs to another user; set TMPDIR")
    descriptor = os.open(locks / f"submit-{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


# No proposer could use more.
DEFAULT_MAX_JOBS = 64
"""Jobs at a time, if the profile sets no limit."""
DEFAULT_MAX_ARRAY = 1000
TIMEOUT_S = 20.0


def find_max_array() -> int:
    """Return the maximum number of tasks in an array: MaxArraySize minus one, or Slurm's default of 1000."""
    text = ask_slurm(["scontrol", "show", "config"], timeout_s=TIMEOUT_S) or ""
    match = re.search(r"^MaxArraySize\s*=\s*([0-9]{1,9})\b", text, re.MULTILINE)
    return max(1, int(match.group(1)) - 1) if match else DEFAULT_MAX_ARRAY


def find_max_jobs(settings: SlurmSettings) -> int:
    """Return the maximum number of jobs at a time: `max_jobs`, within the limits of the account and the QOS."""
    account = [f"account={settings.account}"] if settings.account else []
    associations = _show("assoc", f"user={getpass.getuser()}", *account, "format=partition,maxsubmit,grpsubmit")
    limits = [row[1:] for row in associations if row[0] in {"", settings.partition or ""}]
    if settings.qos is not None:
        limits += _show("qos", settings.qos, "format=MaxSubmitJobsPerUser,MaxSubmitJobsPerAccount,GrpSubmitJobs")
    numbers = [max(1, int(limit)) for row in limits for limit in row if re.fullmatch("[0-9]{1,9}", limit)]
    return min([settings.max_jobs or DEFAULT_MAX_JOBS, *numbers])


def _show(*words: str) -> list[list[str]]:
    """Return the rows that sacctmgr shows; none if it does not answer."""
    text = ask_slurm(["sacctmgr", "--noheader", "--parsable2", "show", *words], timeout_s=TIMEOUT_S) or ""
    return [line.split("|") for line in text.splitlines()]
