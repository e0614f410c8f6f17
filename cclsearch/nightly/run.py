"""A whole night (lock, searches, comparison, pruning, summary, message to the chat), and the nights of a series."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import RESULT_BYTES, read_job_bytes
from cclsearch.core.offline import refuse_outside
from cclsearch.core.secrets.redact import declare_secret, redact
from cclsearch.core.text import plain
from cclsearch.loop.jobs import StopSignal
from cclsearch.nightly.config import NightlyConfig
from cclsearch.nightly.night import NightRun, plan_jobs, show_time
from cclsearch.nightly.prune import Pruned, prune_evidence
from cclsearch.nightly.summary import (
    EXIT_BUSY,
    EXIT_TROUBLE,
    EXIT_USAGE,
    NightSummary,
    assemble_jobs,
    assemble_summary,
    render_markdown,
    render_message,
    render_night,
)
from cclsearch.nightly.window import NIGHTS_FOLDER, SUMMARY_FILE, find_interrupted, find_window, nights_folder
from cclsearch.propose.agent.providers.spec import parse_spec, refuse_if_offline
from cclsearch.record.lock import FolderLock, is_locked
from cclsearch.tracking.webhook import send_webhook

MAX_HISTORY_NIGHTS = 60
"""Number of earlier nights that the page lists."""


class NightBusyError(Exception):
    """Another night is running in this runs folder; the message names its process."""


class NightBrokenError(Exception):
    """The night started but its results cannot be written; the message says why."""


def run_night(
    config: NightlyConfig, runs: Path, *, stop: StopSignal, say: Callable[[str], None] = lambda line: None
) -> NightSummary:
    """Run one night and write its summary.

    Raises NightBusyError while another night runs, UserError for bad input, and NightBrokenError, without a summary, if
    the disk fails.
    """
    if config.webhook_env is not None:
        declare_secret(config.webhook_env)
    plans = plan_jobs(config)
    lock_folder = runs / NIGHTS_FOLDER
    try:
        lock_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {str(lock_folder)!r}: {error.strerror}") from None
    lock = FolderLock(lock_folder, purpose="nightly")
    with ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except UserError as error:
            if is_locked(lock_folder):
                raise NightBusyError(str(error)) from None
            raise
        window = find_window(config, runs, time.time())
        night = NightRun(config, runs, window, stop=stop, lock=lock, say=say, plans=plans)
        try:
            night.run()
            return finish_night(night)
        except BrokenPipeError:
            raise  # the reader of the output is gone, the disk is fine
        except OSError as error:
            raise NightBrokenError(
                f"cannot write {str(window.folder)!r}: {error.strerror or error}. Every finished trial is kept."
                " Free some space, then start the night again"
            ) from None


def finish_night(night: NightRun) -> NightSummary:
    """Compare, prune, write summary and page, send the message to the chat; returns the summary.

    A night that a signal stopped before its end is summarized but removes no evidence, because a stop must be quick.
    """
    config, window = night.config, night.window
    (jobs, damage), is_stopped = assemble_jobs(night), night.is_stopped
    current_runs = {state.folder.name for state in night.states.values() if state.folder is not None}
    if is_stopped:
        pruned = Pruned()
    else:
        pruned = prune_evidence(night.runs, config.name, config.keep, tonight=window.stamp, current_runs=current_runs)
    summary = assemble_summary(night, jobs, damage, pruned, is_stopped=is_stopped)
    summary = NightSummary.model_validate_json(redact(summary.model_dump_json()))
    write_summary(night, summary)
    if config.webhook_env is not None:
        problem = send_webhook(config.webhook_env, redact(render_message(summary)))
        if problem is not None:
            summary = summary.model_copy(update={"notes": (*summary.notes, problem)})
            write_summary(night, summary)
    return summary


def write_summary(night: NightRun, summary: NightSummary) -> None:
    """Write `summary.json`, `summary.md` and the page to the night's folder and, as latest, the series folder."""
    series_folder = nights_folder(night.runs, night.config.name)
    page = redact(render_night(summary, read_summaries(series_folder, before=night.window.stamp)))
    texts = {"report.html": page, "summary.md": render_markdown(summary)}
    texts[SUMMARY_FILE] = summary.model_dump_json(indent=1) + "\n"
    for folder in (night.window.folder, series_folder):
        for name, text in texts.items():
            write_atomically(folder / name, text)


def list_series(runs: Path) -> list[str]:
    """The names of the series of nights in a folder of runs."""
    folders = (runs / NIGHTS_FOLDER).glob("*/")
    return sorted(folder.name for folder in folders if not folder.is_symlink() and folder.name.isprintable())


def read_summaries(series_folder: Path, *, before: str | None = None) -> list[NightSummary]:
    """Summaries of the nights of a series before that night, the oldest first; unreadable ones are left out."""
    found = []
    for path in sorted(series_folder.glob(f"*/{SUMMARY_FILE}"))[-MAX_HISTORY_NIGHTS:]:
        if before is not None and path.parent.name >= before:
            continue
        try:
            found.append(NightSummary.model_validate_json(read_job_bytes(path, RESULT_BYTES)))
        except (OSError, ValueError):
            continue
    return found


# The clock may be adjusted while the service waits.
MAX_SLEEP_S = 30.0
"""Seconds between two reads of the clock."""


@dataclass(frozen=True)
class NightService:
    """Runs nights into a folder of runs, and reports on them."""

    config: NightlyConfig
    runs: Path
    stop: StopSignal
    show: Callable[[NightSummary], None]
    """Takes the result of each night."""
    say: Callable[[str], None]
    """Takes lines about the progress."""
    warn: Callable[[str], None]
    """Takes lines about errors."""

    def run(self, *, once: bool = False) -> int:
        """Run one night now, or one at each `start` until stopped; returns the exit code of the last night."""
        if once or self.config.start_moment is None:
            return self._run_one()
        code = 0
        plan_jobs(self.config)
        if find_interrupted(self.config, self.runs, time.time()) is not None:
            code = self._run_safely()
        while wait_for_start(self.config, self.stop, self.say):
            code = self._run_safely()
        return code

    def _run_one(self) -> int:
        """Run one night; returns its exit code."""
        try:
            summary = run_night(self.config, self.runs, stop=self.stop, say=lambda line: self.say(plain(line)))
        except NightBusyError as error:
            self.warn(f"ccl-search: {error}")
            return EXIT_BUSY
        except NightBrokenError as error:
            self._report_failure(str(error))
            return EXIT_TROUBLE
        self.show(summary)
        return summary.exit_code

    def _run_safely(self) -> int:
        """Run one night of a process that runs every night: report a failure, and leave the next night its chance."""
        try:
            return self._run_one()
        except BrokenPipeError:
            raise
        except (UserError, OSError) as error:
            self._report_failure(str(error))
            return EXIT_USAGE

    def _report_failure(self, why: str) -> None:
        """Report here and in the chat that a night failed."""
        text = redact(f"{self.config.name}: this night failed: {why}")
        self.warn(f"ccl-search: {text}")
        webhook = self.config.webhook_env
        problem = send_webhook(webhook, f"ccl-search {text}") if webhook else None
        if problem is not None:
            self.warn(f"note: {problem}")


def prepare_outside(config: NightlyConfig, *, connects: bool) -> None:
    """Declare the webhook a secret; raise UserError if connections are refused, and the webhook or an LLM needs one.

    `connects` says that jobs will run: a preview needs no connection.
    """
    if config.webhook_env is not None:
        if connects:
            refuse_outside("the webhook", "remove `webhook_env` from the nightly file")
        declare_secret(config.webhook_env)
    for job in config.all_jobs if connects else ():
        if job.llm:
            refuse_if_offline(parse_spec(job.llm))


def wait_for_start(config: NightlyConfig, stop: StopSignal, say: Callable[[str], None]) -> bool:
    """Sleep until the next start; False if stopped."""
    assert config.start_moment is not None
    start_s = config.start_moment.next_after(time.time())
    say(f"the next night starts at {show_time(start_s)} (UTC)")
    while time.time() < start_s and not stop.is_set():
        stop.wait(min(MAX_SLEEP_S, max(start_s - time.time(), 0.1)))
    return not stop.is_set()
