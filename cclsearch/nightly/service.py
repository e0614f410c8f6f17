"""Nights of a series: one now, or one at each start until stopped; a failed night leaves the next one its chance."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cclsearch.core.errors import UserError
from cclsearch.core.offline import refuse_outside
from cclsearch.core.secrets.redact import declare_secret, redact
from cclsearch.core.text import plain
from cclsearch.loop.jobs import StopSignal
from cclsearch.nightly.config import NightlyConfig
from cclsearch.nightly.night import plan_jobs, show_time
from cclsearch.nightly.run import NightBrokenError, NightBusyError, run_night
from cclsearch.nightly.summary import EXIT_BUSY, EXIT_TROUBLE, EXIT_USAGE, NightSummary
from cclsearch.nightly.window import find_interrupted
from cclsearch.propose.agent.providers.spec import parse_spec, refuse_if_offline
from cclsearch.tracking.webhook import send_webhook

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
