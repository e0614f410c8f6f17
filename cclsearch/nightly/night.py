"""One night: every job gets its fair share of the budget and continues where it was interrupted; its preview."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from cclsearch.core.atomic_file import write_atomically
from cclsearch.core.errors import UnavailableError, UserError
from cclsearch.core.processes import boot_clock_s
from cclsearch.core.secrets.redact import redact
from cclsearch.core.settings import load_settings
from cclsearch.core.values import Provenance
from cclsearch.loop.drive import start_run
from cclsearch.loop.jobs import StopSignal
from cclsearch.loop.loop import MAX_CONSECUTIVE_INFRASTRUCTURE_FAILURES, run_search
from cclsearch.loop.meter import Allowance, Meter
from cclsearch.loop.session import Changes, begin_or_resume, open_session
from cclsearch.nightly.config import NightlyConfig, NightlyJob
from cclsearch.nightly.history import find_runs, is_same_work, name_run, pick_bests, read_earlier
from cclsearch.nightly.prune import prune_evidence
from cclsearch.nightly.window import (
    NightWindow,
    Spent,
    count_spent,
    find_exhausted,
    find_lower_limits,
    find_remaining,
    find_window,
    split_remaining,
)
from cclsearch.plan.plan import Plan, plan_search
from cclsearch.plan.request import SearchRequest
from cclsearch.record.event import EndKind
from cclsearch.record.lock import FolderLock
from cclsearch.record.writer import RunWriter
from cclsearch.run.catalog import list_runs
from cclsearch.run.folder import Run, Standing, load_run
from cclsearch.run.spec import DEFAULT_BUDGET, SearchLimits
from cclsearch.space.parse import parse_knobs

AS_IN_FILE = {field.name for field in fields(SearchRequest)} & {*NightlyJob.model_fields} - {"knobs", "log_to"}
"""Fields that a search request takes from a job as they are."""
CONFIRM = 2
LEARN_NIGHTS = 3
SAVE_INTERVAL_S = 30.0
"""Seconds between two saves of a night's state, from which a later process continues it."""


@dataclass
class NightlyJobState:
    """State of a job during a night."""

    job: NightlyJob
    folder: Path | None = None
    resumed: bool = False
    hours: float = 0.0
    error: str = ""
    """Reason why it could not run, or could not continue."""
    is_trouble: bool = False
    """Whether that error comes from the infrastructure."""
    can_continue: bool = False
    """Whether it would run further with a larger share of the budget, or once its launcher answers again."""


def plan_jobs(config: NightlyConfig) -> dict[str, Plan]:
    """Plan each job's search; raises UserError naming the job that cannot run."""
    plans = {}
    for job in config.all_jobs:
        try:
            plans[job.key] = plan_search(make_request(job, budget=count_wanted(job)))
        except UserError as error:
            raise UserError(f"job {job.key!r}: {error}") from None
    return plans


def count_wanted(job: NightlyJob) -> int:
    """Trials that a job wants per night."""
    return job.budget.trials or DEFAULT_BUDGET


def make_request(job: NightlyJob, *, budget: int, run_id: str | None = None, **more: object) -> SearchRequest:
    """The search request of a job."""
    options = {"max_tokens": job.budget.tokens, "max_usd": job.budget.usd, "effort": job.llm_effort}
    request = SearchRequest(
        **{name: getattr(job, name) for name in AS_IN_FILE},
        limits=SearchLimits(
            budget=budget,
            trial_timeout_s=job.timeout_min * 60,
            **{name: getattr(job, name) for name in ("parallel", "keep_going", "control_every")},
        ),
        may_simulate=False,  # a night that measures nothing must be asked for
        llm_options={name: value for name, value in options.items() if value is not None} if job.llm else {},
        log_to=job.log_to or load_settings().log_to,
        knobs=parse_knobs(job.knobs),
        run_id=run_id,
    )
    return replace(request, **more)  # type: ignore[arg-type]


class NightRun:
    """Runs the jobs of one night; the caller holds the lock."""

    def __init__(
        self,
        config: NightlyConfig,
        runs: Path,
        window: NightWindow,
        *,
        stop: StopSignal,
        lock: FolderLock,
        say: Callable[[str], None],
        plans: dict[str, Plan],
    ) -> None:
        self.config, self.runs, self.window, self.stop = config, runs, window, stop
        self.plans = plans
        self._lock, self._say = lock, say
        self._begun_boot_s = boot_clock_s()
        self._saved_boot_s = self._begun_boot_s
        self.states = {
            job.key: NightlyJobState(job, hours=window.job_hours.get(job.key, 0.0)) for job in config.all_jobs
        }
        for key, name in window.jobs.items():
            folder = runs / name
            if key in self.states and folder in find_runs(runs, config.name, key):
                self.states[key].folder, self.states[key].resumed = folder, True

    def run(self) -> None:
        """Give every job its share, then share the rest among the jobs that can use it, until none can continue."""
        self._save()
        waiting = [state for state in self.states.values() if not self._is_done(state)]
        while waiting and not self.stop.is_set():
            before = self.count_spent_tonight()
            for n, state in enumerate(waiting):
                if self.find_end_reason() or self.stop.is_set():
                    return
                share = split_remaining(
                    self._find_remaining(), state.job.priority, sum(other.job.priority for other in waiting[n:])
                )
                self._run_guarded(state, share)
            waiting = [state for state in waiting if state.can_continue]
            if self.count_spent_tonight().trials == before.trials:
                return

    def find_end_reason(self) -> str | None:
        """Return why nothing more may start tonight; None while it may."""
        if self.window.deadline_s is not None and time.time() >= self.window.deadline_s:
            return "the deadline was reached"
        name = find_exhausted(find_remaining(self.config.budget, self.count_spent_tonight()))
        return f"the night's budget of {name.replace('_', '-')} was used up" if name else None

    def _find_remaining(self) -> dict[str, float | None]:
        """The remaining budget; the time until the deadline is shared too, so that no job uses it all up in a queue."""
        left = find_remaining(self.config.budget, self.count_spent_tonight())
        if self.window.deadline_s is not None:
            until = max(self.window.deadline_s - time.time(), 0.0) / 3600
            left["hours"] = until if left["hours"] is None else min(left["hours"], until)
        return left

    def count_spent_tonight(self) -> Spent:
        """Amounts that the night spent so far, from the ledgers and the clock."""
        total = sum(map(self.count_spent_by, self.states.values()), Spent())
        return total.model_copy(update={"hours": self._hours})

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped the night while budget and work were left."""
        if not self.stop.is_set() or self.find_end_reason():
            return False
        open_jobs = [state for state in self.states.values() if state.can_continue or not state.error]
        return any(not self._is_done(state) for state in open_jobs)

    @property
    def _hours(self) -> float:
        """Hours that this night ran, before an interruption too; hours while no process ran do not count."""
        return self.window.hours + (boot_clock_s() - self._begun_boot_s) / 3600

    def count_spent_by(self, state: NightlyJobState) -> Spent:
        """Return the amounts that a job spent tonight, rounded, so that shown figures add up.

        An interrupted trial counts only once it is retried.
        """
        if state.folder is None:
            return Spent(hours=state.hours)
        run = load_run(state.folder)
        spent = count_spent(run.spec, run.state, self.window.started_s, time.time())
        trials = spent.trials - count_interrupted(run, since_s=self.window.started_s)
        spent = spent.model_copy(update={"trials": trials, "hours": state.hours})
        return Spent(**{name: round(value, 6) for name, value in spent})

    def _is_done(self, state: NightlyJobState) -> bool:
        """Whether its search ended for another reason than a used-up share of the trials."""
        if state.folder is None:
            return False
        run = load_run(state.folder)
        used_budget = run.state.ended is not None and run.state.ended.kind is EndKind.BUDGET_USED
        had_more = used_budget and run.state.num_spent < count_wanted(state.job)
        return run.status is Standing.ENDED and not had_more

    def _run_guarded(self, state: NightlyJobState, share: dict[str, float | None]) -> None:
        """Run one job; an error is recorded in its state, and the night continues with the next job."""
        state.can_continue = False
        try:
            self._run_job(state, share)
        except UnavailableError as error:
            state.error = redact(str(error))
            state.is_trouble = state.can_continue = True
        except UserError as error:
            state.error = redact(str(error))
        except OSError as error:
            state.error = redact(f"cannot write: {error.strerror or error}")
            state.is_trouble = True
        except Exception as error:  # a bug in one job must not end the other jobs; the traceback is kept
            state.error = redact(f"internal error: {type(error).__name__}: {error}")
            with suppress(OSError):
                write_atomically(self.window.folder / f"{state.job.key}.traceback.txt", redact(traceback.format_exc()))
        if state.error:
            self._say(f"{state.job.key}: {state.error}")

    def _run_job(self, state: NightlyJobState, share: dict[str, float | None]) -> None:
        job = state.job
        wanted = count_wanted(job)
        own = job.budget.model_copy(update={"trials": None})
        limits = find_lower_limits(share, own, self.count_spent_by(state))
        trials = wanted if limits["trials"] is None else int(limits["trials"])
        if find_exhausted(limits) or trials < 1:
            return
        state.error, state.is_trouble = "", False
        folders = find_runs(self.runs, self.config.name, job.key)
        run = load_run(state.folder) if state.folder else find_unfinished(folders, self.plans[job.key])
        resumed = run is not None
        if run is None:
            run = self._create(job, min(wanted, trials), limits)
        state.folder = run.folder
        state.resumed = state.resumed or (resumed and run.folder.name != self._own_name(job))
        self._save()
        max_trials = min(wanted, run.state.num_spent - count_interrupted(run) + trials)
        self._say(f"{job.key}: {'continues' if resumed else 'starts'} {run.folder.name}, up to {max_trials} trials")
        ending = None
        if max_trials > run.state.num_spent or run.state.unfinished:
            ending = self._search(state, run, max_trials, limits)
        state.can_continue = (max_trials < wanted and ending is EndKind.BUDGET_USED) or ending is EndKind.SHARE_USED

    def _own_name(self, job: NightlyJob) -> str:
        return name_run(self.config.name, self.window.stamp, job.key)

    def _create(self, job: NightlyJob, budget: int, limits: dict[str, float | None]) -> Run:
        plan = self.plans[job.key]
        folders = find_runs(self.runs, self.config.name, job.key)
        earlier = read_earlier(folders, plan.spec)
        measured = plan.spec.provenance is Provenance.MEASURED
        request = make_request(job, budget=budget, run_id=self._own_name(job))
        options = dict(request.llm_options)
        if limits["tokens"] is not None:
            options["max_tokens"] = max(1, int(limits["tokens"]))
        if limits["usd"] is not None:
            options["max_usd"] = limits["usd"]
        first = tuple(c for c in pick_bests(earlier, job.start_from) if plan.space.row(c) is not None)
        confirm = job.confirm if job.confirm is not None else CONFIRM
        request = replace(
            request,
            limits=request.limits.model_copy(update={"confirm": confirm if measured else 0}),
            llm_options=options if job.llm else {},
            first=first[: max(1, budget // 2)],  # at most half of the budget, so that new configurations are tried too
            learn_from=tuple(str(night.run.folder) for night in earlier[-LEARN_NIGHTS:]) if job.learn else (),
            earlier_runs=tuple(str(folder) for folder in list_runs(self.runs)) if job.learn else (),
        )
        return load_run(start_run(plan_search(request).spec, self.runs))

    def _search(
        self, state: NightlyJobState, run: Run, max_trials: int, limits: dict[str, float | None]
    ) -> EndKind | None:
        """Run or continue the job's search; returns why it ended."""
        stop, before_hours, begun_s = StopSignal(), state.hours, boot_clock_s()

        def heartbeat() -> None:
            state.hours = before_hours + (boot_clock_s() - begun_s) / 3600
            self._heartbeat(stop)

        session = replace(open_session(run.folder, stop=stop), max_trials=max_trials)
        shared = {name: limit for name, limit in limits.items() if name != "trials"}
        reached, kind = "its part of the night's {} is used up", EndKind.SHARE_USED
        allowance = Allowance(deadline_s=self.window.deadline_s, reached=reached, kind=kind, **shared)
        with RunWriter(run.folder) as writer:
            begin_or_resume(writer, session, Changes(budget=max_trials, keep_going=state.job.keep_going))
            with Meter(run.spec, allowance, stop, heartbeat) as meter:
                writer.watch(meter.watch)
                try:
                    run_search(writer, session)
                finally:
                    state.hours = before_hours + meter.hours
            state.is_trouble = (
                writer.state.num_consecutive_infrastructure_failures >= MAX_CONSECUTIVE_INFRASTRUCTURE_FAILURES
            )
            end = writer.state.ended or writer.state.stopped
        if end is not None and end.kind is EndKind.SHARED_CAUSE:
            state.error = end.reason
        return end.kind if end else None

    def _heartbeat(self, stop: StopSignal) -> None:
        """Called every second while a search runs: forwards a stop, refreshes the lock, saves the hours."""
        self._lock.refresh()
        if self.stop.is_set():
            stop.request("the night was stopped", EndKind.SIGNAL)
        if boot_clock_s() - self._saved_boot_s >= SAVE_INTERVAL_S:
            with suppress(OSError):
                self._save()

    def _save(self) -> None:
        """Save the state from which a later process continues this night."""
        jobs = {key: state.folder.name for key, state in self.states.items() if state.folder}
        job_hours = {key: state.hours for key, state in self.states.items() if state.hours}
        self._saved_boot_s = boot_clock_s()
        self.window.save(jobs=jobs, hours=self._hours, job_hours=job_hours)


def find_unfinished(folders: Sequence[Path], plan: Plan) -> Run | None:
    """The latest of a job's searches, if it was interrupted and still matches the job's plan; else None."""
    try:
        run = load_run(folders[-1]) if folders else None
    except UserError:
        return None
    if run is None or not run.status.is_resumable or not is_same_work(run.spec, plan.spec):
        return None
    same_space = run.spec.space_sha256 == plan.spec.space_sha256 and run.spec.proposers == plan.spec.proposers
    return run if same_space else None


def count_interrupted(run: Run, since_s: float = 0.0) -> int:
    """Count trials started since then without an end, which a resume retries; valid while no search runs."""
    return sum(trial.costs_budget for trial in run.state.unfinished if trial.proposed_s >= since_s)


def show_time(moment_s: float) -> str:
    """The moment in UTC as ISO 8601, in whole seconds."""
    return datetime.fromtimestamp(moment_s, UTC).isoformat(timespec="seconds")


def describe_night(config: NightlyConfig, runs: Path) -> list[str]:
    """Lines about a night that would start now: its deadline, its jobs in order, and the evidence it would remove."""
    plans, jobs = plan_jobs(config), config.all_jobs
    window = find_window(config, runs, time.time())
    until = f"until {show_time(window.deadline_s)}" if window.deadline_s is not None else "without a deadline"
    which = f"continues the interrupted night {window.stamp}" if window.folder.exists() else "a new night from now"
    lines = [f"{config.name}: {which} {until}; {len(plans)} jobs"]
    current_runs = set(window.jobs.values())
    for n, job in enumerate(jobs):
        plan = plans[job.key]
        waiting = sum(other.priority for other in jobs[n:])
        share = split_remaining(find_remaining(config.budget, Spent()), job.priority, waiting)
        trials = min(count_wanted(job), int(share["trials"] or 10**9))
        head = f"{job.key}: {plan.spec.card.name} ({plan.spec.provenance.value}), objective {plan.spec.objective.name}"
        lines.append(f"{head}, priority {job.priority:g}, up to {trials} trials of {len(plan.space)} configurations")
        folders = find_runs(runs, config.name, job.key)
        tonights = runs / window.jobs.get(job.key, "")
        if tonights in folders and load_run(tonights).status is Standing.ENDED:
            lines.append(f"  {tonights.name} has ended")
            continue
        if (latest := find_unfinished(folders, plan)) is not None:
            lines.append(f"  continues {latest.folder.name}, which was interrupted")
            current_runs.add(latest.folder.name)
            continue
        bests = pick_bests(read_earlier(folders, plan.spec), job.start_from)[: max(1, trials // 2)]
        lines += [f"  measures again: {config_}" for config_ in bests]
    pruned = prune_evidence(
        runs, config.name, config.keep, tonight=window.stamp, current_runs=current_runs, dry_run=True
    )
    if pruned.trials:
        lines.append(f"removes the evidence of {pruned.trials} trials, {pruned.gib:.2f} GiB")
    return lines
