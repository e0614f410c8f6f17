"""Submission that can be repeated after a kill at any point: no attempt is given to Slurm twice.

Before sbatch is called an attempt's folder says so (`submission.json`), after it the submission's folder holds the
number (`submitted.json`). Where only the first is there, the job itself (`started.json`) or the queue, which knows a
job's working directory, tells whether sbatch came through. sbatch holds a lock while it lives, also when the search
that called it was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.launch.slurm.commands import (
    QueueRow,
    SlurmRefusal,
    SlurmUnavailable,
    cancel_jobs,
    has_live_jobs,
    read_queue,
    submit_script,
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
    read_model,
    write_model,
)
from cclsearch.launch.slurm.refusal import (
    Refusal,
    classify_refusal,
    find_squeue_filter,
    is_submit_limit,
    suggest_remedy,
)
from cclsearch.launch.slurm.script import node_command, render_script
from cclsearch.launch.slurm.settings import SlurmSettings

_SITE_DEFAULTS = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "constraint": "SBATCH_CONSTRAINT",
    "reservation": "SBATCH_RESERVATION",
}


class Unresolved(Exception):
    """Whether an attempt was submitted cannot be told now: Slurm does not answer."""


@dataclass
class Submitter:
    """Gives attempts to sbatch in chunks that the limits allow."""

    settings: SlurmSettings
    max_array: int = 1000
    ids: dict[Path, str] = field(default_factory=dict)
    """Attempt folder -> job number, as far as known."""
    waiting_for: str = ""
    """Slurm's own words for why attempts wait to be submitted; empty where none does."""

    def submit(self, specs: Sequence[JobSpec]) -> None:
        """Submit what is not submitted yet; attempts that a limit keeps out stay without a number in `ids`.

        Raises UserError where Slurm says that such a job can never run; nothing of this call is then left in the queue.
        """
        self.waiting_for = ""
        fresh = []
        for spec in specs:
            try:
                if self.resolve(spec.folder) is None:
                    fresh.append(spec)
            except Unresolved as error:
                self.waiting_for = str(error)
        done: list[JobSpec] = []
        try:
            for chunk in self._chunk(fresh):
                if self.waiting_for:
                    break
                self._submit_chunk(chunk, done)
        except UserError:
            with contextlib.suppress(SlurmUnavailable, SlurmRefusal):
                cancel_jobs([self.ids[spec.folder] for spec in done])
            raise

    def resolve(self, folder: Path, rows: Sequence[QueueRow] | None = None) -> str | None:
        """Job number of the attempt in that folder; None where it was never submitted.

        Raises `Unresolved` where that cannot be told now.
        """
        if folder in self.ids:
            return self.ids[folder]
        submission = read_model(folder / SUBMISSION_FILE, Submission)
        if submission is None:
            return None
        found = self._read_evidence(folder, submission)
        if found is None:
            with _hold_lock(folder.parent.parent):  # a sbatch that outlived its search ends first
                found = self._read_evidence(folder, submission) or _find_in_queue(submission, rows)
        if found is not None:
            self.ids[folder] = found
        return found

    def _read_evidence(self, folder: Path, submission: Submission) -> str | None:
        submitted = read_model(submission.folder / SUBMITTED_FILE, SbatchAnswer)
        if submitted is not None:
            return submitted.job_id if submission.index is None else f"{submitted.job_id}_{submission.index}"
        started = read_model(folder / STARTED_FILE, StartRecord)
        return None if started is None else started.job_id

    def _chunk(self, specs: Sequence[JobSpec]) -> Iterator[list[JobSpec]]:
        """Attempts of one shape together, at most an array's worth."""
        size = self._array_size()
        shapes = dict.fromkeys(spec.shape for spec in specs)
        for shape in shapes:
            same = [spec for spec in specs if spec.shape == shape]
            yield from (same[start : start + size] for start in range(0, len(same), size))

    def _array_size(self) -> int:
        if not self.settings.arrays:
            return 1
        return max(1, min(self.max_array, self.settings.max_array or self.max_array))

    def _submit_chunk(self, chunk: list[JobSpec], done: list[JobSpec]) -> None:
        """One call of sbatch; where a limit refuses the chunk, its halves are tried, down to a single job."""
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
            if meaning is Refusal.NEVER or (meaning is Refusal.SMALLER_ARRAY and len(chunk) == 1):
                raise UserError(f"Slurm refuses the job: {refusal}; {suggest_remedy(str(refusal))}") from None
            if len(chunk) == 1:
                self.waiting_for = str(refusal)
                return
            if meaning is Refusal.SMALLER_ARRAY:
                self.max_array = max(1, len(chunk) // 2)
        for half in (chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]):
            if not self.waiting_for:
                self._submit_chunk(half, done)

    def _call_with_retry(self, chunk: list[JobSpec]) -> None:
        """Call sbatch, and again where a submit limit refuses a job though none is queued: one may just have ended."""
        try:
            self._call_sbatch(chunk)
        except SlurmRefusal as refusal:
            said = str(refusal)
            if len(chunk) > 1 or not is_submit_limit(said) or self._has_jobs(said):
                raise
            self._call_sbatch(chunk)

    def _has_jobs(self, refusal: str) -> bool:
        """Whether jobs are queued that count against the limit; True where that cannot be told."""
        account, qos = (
            getattr(self.settings, name) or os.environ.get(_SITE_DEFAULTS[name]) for name in ("account", "qos")
        )
        try:
            return has_live_jobs(find_squeue_filter(refusal, account=account, qos=qos))
        except (SlurmUnavailable, SlurmRefusal):
            return True

    def _call_sbatch(self, chunk: list[JobSpec]) -> None:
        first = chunk[0]
        folder = first.folder / f"submission-{uuid.uuid4().hex[:8]}"
        folder.mkdir(parents=True)
        write_model(
            folder / JOBS_FILE,
            JobList(run_id=first.run_id, jobs=tuple(spec.folder / SPEC_FILE for spec in chunk)),
        )
        script = folder / SCRIPT_FILE
        script.write_text(render_chunk(chunk, folder, self.settings), encoding="utf-8")
        with _hold_lock(first.trial_dir.parent) as descriptor:
            for index, spec in enumerate(chunk):
                place = index if len(chunk) > 1 else None
                write_model(spec.folder / SUBMISSION_FILE, Submission(folder=folder, index=place, at=time.time()))
            job_id = submit_script(script, pass_fds=(descriptor,), without=overridden_defaults(self.settings))
            write_model(folder / SUBMITTED_FILE, SbatchAnswer(job_id=job_id, at=time.time()))
        for index, spec in enumerate(chunk):
            self.ids[spec.folder] = f"{job_id}_{index}" if len(chunk) > 1 else job_id
        time.sleep(self.settings.submit_pause_s)


def render_chunk(chunk: Sequence[JobSpec], folder: Path, settings: SlurmSettings) -> str:
    """The sbatch script of one submission: a job, or an array of them."""
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
    """Variables of the site's own defaults that would win over what the profile says."""
    return [name for setting, name in _SITE_DEFAULTS.items() if getattr(settings, setting)]


def _find_in_queue(submission: Submission, rows: Sequence[QueueRow] | None) -> str | None:
    """Job number by the submission's folder, which is the job's working directory.

    An array that was cancelled before any of its tasks began is listed as one job without task numbers.
    """
    try:
        known = read_queue() if rows is None else rows
    except (SlurmUnavailable, SlurmRefusal) as error:
        raise Unresolved(str(error)) from None
    ids = [row.job_id for row in known if Path(row.folder) == submission.folder]
    if submission.index is None:
        return ids[0] if ids else None
    whole = next((f"{job_id}_{submission.index}" for job_id in ids if "_" not in job_id), None)
    return next((job_id for job_id in ids if job_id.endswith(f"_{submission.index}")), whole)


@contextlib.contextmanager
def _hold_lock(folder: Path) -> Iterator[int]:
    """A lock for the submissions of one run on this machine; yields its descriptor, for sbatch to hold as well."""
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"ccl-search-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.lstat().st_uid != os.getuid() or place.is_symlink():
        raise UserError(f"{str(place)!r} must be a folder of your own: it belongs to somebody else; set TMPDIR")
    descriptor = os.open(place / f"submit-{name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)
