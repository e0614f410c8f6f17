"""The state of a search, folded from the lines of its ledger.

Of each trial, only what the fold needs stays in memory (finished, loss, whether it costs budget, where its lines
begin); the trial itself is read from the ledger on demand. So a search of 25,000 trials needs little memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from cclsearch.core.secrets.redact import redact
from cclsearch.core.values import Config, FailureKind
from cclsearch.propose.events import NOT_ADDED, LlmTurn, Note, ReportedEvent
from cclsearch.record.event import (
    PAID,
    AttemptEvent,
    BadLine,
    Event,
    Purpose,
    RetryKind,
    SearchEnded,
    SearchResumed,
    SearchStarted,
    SearchStopped,
    SpaceGrown,
    TrialFinished,
    TrialProposed,
    TrialRetried,
    TrialRevised,
    explain_bad_lines,
)
from cclsearch.record.trial import Trial, TrialState
from cclsearch.record.trial_table import ClusterWindows, TrialTable
from cclsearch.scoring.outcome import Outcome
from cclsearch.stats.drift import WindowRatio
from cclsearch.stats.noise import MIN_MAJORITY, REPLACED_FROM, estimate_noise, find_outliers, is_better


@dataclass
class RunState:
    """The state of a search, folded from its ledger; only `apply` changes it."""

    path: Path | None = None
    """The ledger from which trials are read."""
    run_id: str = ""
    spec_sha256: str = ""
    started_s: float = 0.0
    begun_s: float = 0.0
    """Time of the search's start or last resume."""
    budget_raised_to: int = 0
    confirm_raised_to: int = 0
    max_node_hours: float | None = None
    """Limit in node-hours as `resume` set it; None if it did not."""
    reported: list[ReportedEvent] = field(default_factory=list)
    """Events with a text for people: LLM turns, moves of the arbiter, notes of plugins, ..."""
    growth: SpaceGrown | None = None
    """The last growth of the search space; None if it is the one of the start."""
    num_growths: int = 0
    wanted: LlmTurn | None = None
    """The LLM's turn that asks for an addition to the search space, until it is added or refused."""
    stopped: SearchStopped | None = None
    ended: SearchEnded | None = None
    last_s: float = 0.0
    num_spent: int = 0
    """Trials that count against the budget, running ones included."""
    num_consecutive_infrastructure_failures: int = 0
    """Number of the latest finished trials in a row that were infrastructure failures."""
    num_consecutive_judging_errors: int = 0
    """Number of the latest finished trials in a row that could not be judged."""
    has_allocation_ended: bool = False
    """Whether the trials' allocation has ended since the search began or was last resumed."""
    keeps_going: bool = False
    """Whether trials that end for the same reason no longer end the search."""
    stops_early: bool = False
    """Whether the search ends once nothing is likely to win; a resume asked for that."""
    bad_lines: list[BadLine] = field(default_factory=list)
    """Lines of the ledger that are not used."""
    left_trials: set[int] = field(default_factory=set)
    """Numbers of trial folders without a proposal; the search continues without them."""
    highest_trial: int = 0
    """Highest trial number in any readable line, also of a trial whose proposal is missing."""
    trials: TrialTable = field(init=False)
    windows: ClusterWindows = field(default_factory=ClusterWindows)
    """The windows of the cluster in which the ranked trials ran."""
    ranked: list[int] = field(default_factory=list)
    """Numbers of the ranked trials, in order of finishing."""
    controls: set[int] = field(default_factory=set)
    """Numbers of the controls that were proposed."""
    _resumed_at: int = 0
    """Highest trial number when the search was last resumed."""
    _num_finished_before: int = 0
    """Number of trials that had finished then."""
    _open: dict[int, None] = field(default_factory=dict)
    _baseline: int | None = None
    _infrastructure_failures: list[int] = field(default_factory=list)
    # It happens if copies of a run are continued separately and their ledgers merged.
    _contested: set[int] = field(default_factory=set)
    """Running trials with two proposals of different configurations, until a resume."""

    def __post_init__(self) -> None:
        self.trials = TrialTable(self.path)

    def apply(self, event: Event, offset: int) -> None:
        """Apply the next event, whose line begins at `offset` in the ledger.

        Raises ValueError, and takes nothing from the event, if it cannot follow on those before: its trial was not
        proposed, is proposed again or has ended, or the search began before.
        """
        number: int | None = getattr(event, "trial", None)
        if isinstance(event, SearchStarted) and self.run_id:
            raise ValueError(f"the search {self.run_id!r} began before")
        if number is not None:
            self._check_trial(number, event)
        self.last_s = max(self.last_s, event.time_s)
        self.started_s = self.started_s or event.time_s
        if isinstance(event, SearchStarted | SearchResumed) or not self.begun_s:
            self.begun_s = event.time_s
        self._apply(event)
        if number is not None:
            self.trials.add_line(number, offset, event)

    @property
    def damage(self) -> tuple[str, ...]:
        """Return the terminal's message on lines that cannot be used, for pages and JSON; empty if all can.

        The ledger is named as `RUN/ledger.jsonl`: a page that is passed on does not say where the run was.
        """
        if not self.bad_lines or self.path is None:
            return ()
        return (redact(explain_bad_lines(Path(self.path.parent.name, self.path.name), self.bad_lines)),)

    @property
    def has_begun(self) -> bool:
        """Whether the ledger has a line, readable or not."""
        return bool(self.run_id or self.started_s or self.bad_lines)

    @property
    def unfinished(self) -> list[Trial]:
        """Proposed trials without an outcome, oldest first."""
        return [self.trials[number] for number in self._open]

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    @property
    def unjudged(self) -> list[Trial]:
        """Trials that could not be judged; they are not proposed again, because they can still be judged."""
        return list(self.trials.select(TrialState.UNJUDGED))

    @property
    def infrastructure_failures(self) -> list[Trial]:
        """Trials of the search whose last attempt was an infrastructure failure, since it began or was last resumed."""
        failed = sorted(set(self._infrastructure_failures))
        return [self.trials[number] for number in failed if not self.trials.briefs[number].costs_budget]

    @property
    def finished_since_resumed(self) -> Sequence[int]:
        """Numbers of the trials that finished since the search began or was last resumed, in that order."""
        return self.trials.finish_order[self._num_finished_before :]

    @property
    def baseline(self) -> Trial | None:
        """The baseline: the user's own if it is ranked, else the first ranked trial of the search to finish.

        None before there is one. It changes only if a trial is revised.
        """
        # Not the trial with the lowest number: with parallel trials that one may finish last.
        return None if self._baseline is None else self.trials[self._baseline]

    @property
    def own_baseline(self) -> Trial | None:
        """Return the last trial of the configuration that the user compares with; it may have failed."""
        own = [n for n, brief in self.trials.briefs.items() if brief.purpose is Purpose.BASELINE]
        return self.trials[max(own)] if own else None

    @property
    def best(self) -> Trial | None:
        """The first ranked trial of the best configuration; None if no trial is ranked.

        The lowest mean loss wins, except for lucky runs: a configuration with fewer runs replaces one with more runs
        only if it is likely to be better (`REPLACED_FROM`).
        """
        groups = {group[0]: group for group in self._group_compared()}
        if not groups:
            return None
        losses = {first: [self._loss(number) for number in group] for first, group in groups.items()}
        mean = {number: sum(runs) / len(runs) for number, runs in losses.items()}
        runs = {first: sum(number not in self.controls for number in group) for first, group in groups.items()}
        fastest = min(mean, key=mean.__getitem__)
        return self.trials[fastest if runs[fastest] == max(runs.values()) else self._choose_best(losses, mean, runs)]

    def losses_by_trial(self) -> dict[int, list[float]]:
        """First ranked trial of each configuration -> losses of that configuration's ranked runs.

        Without outliers: runs that most of three or more runs of the configuration contradict.
        """
        return {group[0]: [self._loss(number) for number in group] for group in self._group_compared()}

    def list_outliers(self) -> list[int]:
        """The ranked trials that are not compared, because other runs of their configuration contradict them."""
        compared = {number for group in self._group_compared() for number in group}
        return [number for number in self.ranked if number not in compared]

    def losses_by_config(self) -> dict[Config, list[float]]:
        """Configuration -> losses of its ranked runs."""
        return {self.trials[number].config: losses for number, losses in self.losses_by_trial().items()}

    def runs_of(self, config: Config) -> list[Trial]:
        """Ranked runs of one configuration, including confirmations, in order of finishing."""
        same = next((group for group in self._group_ranked() if self.trials[group[0]].config == config), [])
        return [self.trials[number] for number in same]

    def _choose_best(self, losses: dict[int, list[float]], mean: dict[int, float], runs: dict[int, int]) -> int:
        """First trial of the best configuration with the most runs, unless one with fewer is likely to be better."""
        noise = estimate_noise(list(losses.values())).widened(self.window_errors)
        counts = sorted(set(runs.values()), reverse=True)
        bests = [min((n for n in runs if runs[n] == count), key=mean.__getitem__) for count in counts]
        best = bests[0]
        for challenger in bests[1:]:
            if is_better(losses[challenger], losses[best], noise, confidence=REPLACED_FROM):
                best = challenger
        return best

    def _loss(self, number: int) -> float:
        """The loss by which a ranked trial is compared, corrected for its window."""
        loss = self.trials.briefs[number].loss or 0.0
        ratio = self.window_ratio(number)
        return loss / ratio.ratio if ratio.num_pairs else loss

    def corrected_loss(self, number: int) -> float | None:
        """The loss by which a trial is compared with others, corrected for its window; None if it is not ranked."""
        return None if self.trials.briefs[number].loss is None else self._loss(number)

    def window_ratio(self, number: int) -> WindowRatio:
        """Return the ratio of the window of a ranked trial to the first window."""
        runs = ((n, self.trials.briefs[n].config_key, self.trials.briefs[n].loss or 0.0) for n in self.ranked)
        return self.windows.ratio_of(number, runs)

    @property
    def window_errors(self) -> list[float]:
        """Error of the log ratio of each ranked trial's window; empty if all ran in one window."""
        return [self.window_ratio(number).error for number in self.ranked] if len(self.windows.names) > 1 else []

    def _group_ranked(self) -> list[list[int]]:
        """The ranked runs of each configuration, in order of finishing; computed on each call, not cached."""
        runs_of: dict[int, list[int]] = {}
        for number in self.ranked:
            runs_of.setdefault(self.trials.briefs[number].config_key, []).append(number)
        return list(runs_of.values())

    def _group_compared(self) -> list[list[int]]:
        """As `_group_ranked`, without outliers."""
        groups = self._group_ranked()
        if all(len(group) < MIN_MAJORITY for group in groups):
            return groups
        outliers = find_outliers({n: [self._loss(number) for number in group] for n, group in enumerate(groups)})
        return [
            [number for k, number in enumerate(group) if k not in outliers.get(n, ())] for n, group in enumerate(groups)
        ]

    def _check_trial(self, number: int, event: Event) -> None:
        is_known, is_new = number in self.trials, isinstance(event, TrialProposed)
        self.highest_trial = max(self.highest_trial, number)
        if is_new and is_known:
            if number in self._open and cast(TrialProposed, event).config != self.trials[number].config:
                self._contested.add(number)
            raise ValueError(f"trial {number} was proposed before")
        if not is_new and not is_known:
            raise ValueError(f"it is about trial {number}, whose proposal is missing")
        if isinstance(event, TrialFinished) and self.trials.briefs[number].is_finished:
            raise ValueError(f"trial {number} had ended before")
        if number in self._contested and isinstance(event, AttemptEvent):
            raise ValueError(f"trial {number} was proposed twice, and this may be about either configuration")

    def _propose(self, event: TrialProposed) -> None:
        self.trials.propose(event)
        self._open[event.trial] = None
        self.num_spent += event.purpose in PAID
        if event.purpose is Purpose.CONTROL:
            self.controls.add(event.trial)

    def _finish(self, number: int, outcome: Outcome) -> None:
        """Take over the outcome of a trial that finished, or was evaluated again."""
        failed = outcome.failure is not None and outcome.failure.kind.is_infrastructure
        before = self.trials.briefs[number]
        is_search, is_revised = before.is_search, before.is_finished
        is_unjudged = outcome.failure is not None and outcome.failure.kind is FailureKind.JUDGING_ERROR
        costs = before.purpose in PAID and not failed and not is_unjudged
        self.num_spent += costs - before.costs_budget
        self.trials.finish(number, outcome, costs_budget=costs)
        self.windows.take(number, outcome)
        if is_revised:
            self.ranked = [n for n in self.trials.finish_order if self.trials.briefs[n].loss is not None]
            self._baseline = self._find_baseline()
            return
        self._open.pop(number, None)
        streak = self.num_consecutive_infrastructure_failures
        self.num_consecutive_infrastructure_failures = streak + 1 if failed else 0
        self.num_consecutive_judging_errors = self.num_consecutive_judging_errors + 1 if is_unjudged else 0
        if failed and is_search and number > self._resumed_at:
            self._infrastructure_failures.append(number)
        if outcome.is_ranked:
            self.ranked.append(number)
            if self._baseline is None or before.purpose is Purpose.BASELINE:
                self._baseline = self._find_baseline()

    def _find_baseline(self) -> int | None:
        own = (n for n in self.ranked if self.trials.briefs[n].purpose is Purpose.BASELINE)
        return next(own, None) or next((n for n in self.ranked if self.trials.briefs[n].is_search), None)

    def _apply(self, event: Event) -> None:
        match event:
            case TrialProposed():
                self._propose(event)
            case TrialFinished() | TrialRevised():
                self._finish(event.trial, event.outcome)
            case SearchStarted():
                self.run_id, self.spec_sha256, self.started_s = event.run_id, event.spec_sha256, event.time_s
            case SearchResumed():
                self._contested.clear()
                self.stopped = self.ended = None
                self.budget_raised_to, self.confirm_raised_to = event.budget, event.confirm
                self.left_trials |= set(event.left_trials)
                self.num_consecutive_infrastructure_failures = self.num_consecutive_judging_errors = 0
                self.has_allocation_ended = False
                self.keeps_going |= event.keep_going
                self.stops_early |= event.stop_early
                self.max_node_hours = event.max_node_hours or self.max_node_hours
                self._resumed_at, self._infrastructure_failures = self.highest_trial, []
                self._num_finished_before = len(self.trials.finish_order)
            case TrialRetried():
                self.has_allocation_ended |= event.kind is RetryKind.ALLOCATION_ENDED
            case SpaceGrown():
                self.growth, self.num_growths, self.wanted = event, self.num_growths + 1, None
            case LlmTurn() if event.adds:
                self.wanted = event
            case Note() if event.topic == NOT_ADDED:
                self.wanted = None
            case SearchStopped():
                self.stopped = event
            case SearchEnded():
                self.ended = event
            case _:
                pass
        if isinstance(event, ReportedEvent):
            self.reported.append(event)
