"""A whole night: lock, searches, comparison, pruning, summary, and the message to the chat."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UserError
from cclsearch.core.job_file import RESULT_BYTES, read_job_bytes
from cclsearch.core.secrets.redact import declare_secret, redact
from cclsearch.loop.jobs import StopSignal
from cclsearch.nightly.assemble import assemble_jobs, assemble_summary
from cclsearch.nightly.config import NightlyConfig
from cclsearch.nightly.night import NightRun, plan_jobs
from cclsearch.nightly.page import render_markdown, render_night
from cclsearch.nightly.prune import Pruned, prune_evidence
from cclsearch.nightly.summary import NightSummary, render_message
from cclsearch.nightly.window import NIGHTS_FOLDER, SUMMARY_FILE, find_window, nights_folder
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
