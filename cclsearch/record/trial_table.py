"""The trials of a ledger, each as a proposer sees it, and the windows of the cluster in which they ran.

Memory holds only what the fold needs of a trial; the trial itself, some ten times as large, is read from the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cclsearch.core.errors import UserError, reading_from
from cclsearch.core.values import FailureKind
from cclsearch.propose.observations import Observation
from cclsearch.record.event import PAID, Event, Purpose, TrialProposed, decode_line
from cclsearch.record.trial import Trial, TrialState, find_state, fold_event, fold_trial
from cclsearch.scoring.outcome import ClusterWindow, Outcome
from cclsearch.space.table import Space
from cclsearch.stats.drift import WindowRatio, estimate_drift

MAX_CACHED = 256
"""Trials in memory, of those that changed or were read last."""


@dataclass(slots=True)
class TrialBrief:
    """The part of a trial that the fold needs."""

    purpose: Purpose
    costs_budget: bool
    config_key: int
    """Equal for all trials of one configuration."""
    recomputes: int | None = None
    """`Trial.recomputes`."""
    state: TrialState = TrialState.UNFINISHED
    failure: FailureKind | None = None
    loss: float | None = None
    """The loss used for ranking; None if it is not ranked (yet)."""
    offsets: list[int] = field(default_factory=list)
    """Offset in the ledger of each of its lines."""

    @property
    def is_search(self) -> bool:
        """Whether the search proposed the trial (not a confirmation)."""
        return self.purpose is Purpose.SEARCH

    @property
    def is_finished(self) -> bool:
        return self.state is not TrialState.UNFINISHED


class TrialTable(Mapping[int, Trial]):
    """Trial number -> trial, in the order of the proposals.

    Every method raises KeyError for a trial that was never proposed.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.finish_order: list[int] = []
        """Numbers of the finished trials, in order of finishing."""
        self.briefs: dict[int, TrialBrief] = {}
        """Each trial by its number, without reading it from the ledger."""
        self._cache: dict[int, Trial] = {}
        self._space: Space | None = None
        """The space whose rows the observations have."""
        self._unobserved: list[int] = []
        """Numbers of finished or revised trials that are not yet observations."""
        self._observations: dict[int, Observation] = {}

    def __getitem__(self, number: int) -> Trial:
        return self._cache.get(number) or self._remember(number, self._read(self.briefs[number]))

    def __iter__(self) -> Iterator[int]:
        return iter(self.briefs)

    def __len__(self) -> int:
        return len(self.briefs)

    def __contains__(self, number: object) -> bool:
        return number in self.briefs

    @property
    def counts(self) -> Counter[TrialState]:
        """State -> number of trials, confirmations and controls too, but not those that compute another again."""
        return Counter(brief.state for brief in self.briefs.values() if brief.recomputes is None)

    def select(self, *states: TrialState) -> Iterator[Trial]:
        """Yield the trials in one of these states, in the order of the proposals; others are not read."""
        return (self[number] for number, brief in self.briefs.items() if brief.state in states)

    def propose(self, event: TrialProposed) -> None:
        """Add a trial without lines; its number is new."""
        purpose, key = event.purpose, int(event.config.digest, 16)
        self.briefs[event.trial] = TrialBrief(purpose, purpose in PAID, key, event.recomputes)

    def add_line(self, number: int, offset: int, event: Event) -> None:
        """Add a line of that trial, which begins at `offset` in the ledger."""
        self.briefs[number].offsets.append(offset)
        changed = fold_event(self._cache.pop(number, None), event)
        if changed is not None:  # the first line is its proposal; the others follow soon, or it was dropped meanwhile
            self._remember(number, changed)

    def finish(self, number: int, outcome: Outcome, *, costs_budget: bool) -> None:
        """Take over the outcome of a trial that finished or was revised."""
        entry = self.briefs[number]
        if not entry.is_finished:
            self.finish_order.append(number)
        self._unobserved.append(number)
        entry.state, entry.costs_budget = find_state(outcome), costs_budget
        entry.failure = outcome.failure.kind if outcome.failure else None
        entry.loss = outcome.loss if outcome.is_ranked else None

    def observe(self, space: Space | None = None) -> tuple[Observation, ...]:
        """Return the finished trials as a proposer sees them: sorted by number, without infrastructure failures.

        Their rows are the space's.
        """
        if space is not self._space:
            self._space, self._unobserved, self._observations = space, self.finish_order[:], {}
        for number in self._unobserved:
            observation = observe_trial(self[number], space)
            if observation is None:
                self._observations.pop(number, None)
            else:
                self._observations[number] = observation
        self._unobserved = []
        return tuple(self._observations[number] for number in sorted(self._observations))

    def _remember(self, number: int, trial: Trial) -> Trial:
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        self._cache[number] = trial
        return trial

    def _read(self, entry: TrialBrief) -> Trial:
        assert self._path is not None, "trials come from a ledger"
        events = []
        try:
            with reading_from(self._path), self._path.open("rb") as file:
                for offset in entry.offsets:
                    file.seek(offset)
                    events.append(decode_line(file.readline()))
        except ValueError:
            what = "is damaged or was replaced: a line changed since it was first read"
            raise UserError(f"{str(self._path)!r} {what}") from None
        return fold_trial(events)


def observe_trial(trial: Trial, space: Space | None) -> Observation | None:
    """Return a finished trial as a proposer sees it; None for one that runs, or that infrastructure failed."""
    outcome = trial.outcome
    if outcome is None or (outcome.failure and not outcome.failure.kind.counts):
        return None
    return Observation(
        trial=trial.number,
        config=trial.config,
        row=None if space is None else space.row(trial.config),
        loss=trial.loss,
        failure=outcome.failure,
        spread=outcome.spread,
        metrics=outcome.metrics,
        loads=outcome.loads,
        is_confirmation=trial.purpose is not Purpose.SEARCH,
        violation=outcome.violation,
        is_pruned=outcome.is_pruned,
        refusals=outcome.admission.reasons if outcome.admission and not outcome.failure else (),
    )


@dataclass
class ClusterWindows:
    """The window of each ranked trial; a search over one window, or over a recording, is never corrected."""

    _index: dict[ClusterWindow, int] = field(default_factory=dict)
    """Each window, in order of appearance -> its number from 0."""
    _of_trial: dict[int, int] = field(default_factory=dict)
    _ratios: dict[int, WindowRatio] | None = None
    """None if they have to be estimated again."""

    def take(self, number: int, outcome: Outcome) -> None:
        """Take in the outcome of a trial that finished, or was evaluated again."""
        self._ratios = None
        if not outcome.is_ranked or outcome.window is None or (outcome.loss or 0.0) <= 0:
            self._of_trial.pop(number, None)
            return
        self._of_trial[number] = self._index.setdefault(outcome.window, len(self._index))

    @property
    def names(self) -> list[ClusterWindow]:
        """The windows, in order of appearance."""
        return list(self._index)

    def find(self, number: int) -> int | None:
        """Number of a ranked trial's window; None if unknown."""
        return self._of_trial.get(number)

    def trials_in(self, window: int) -> list[int]:
        """Ranked trials of that window."""
        return [number for number, found in self._of_trial.items() if found == window]

    def ratios(self, runs: Iterable[tuple[int, int, float]]) -> dict[int, WindowRatio]:
        """Window -> its ratio to the first, from (trial, key of its configuration, loss) of each ranked trial."""
        if self._ratios is None:
            known = [(key, self._of_trial[n], loss) for n, key, loss in runs if n in self._of_trial]
            self._ratios = estimate_drift(known)
        return self._ratios

    def ratio_of(self, number: int, runs: Iterable[tuple[int, int, float]]) -> WindowRatio:
        """The ratio of a trial's window to the first; no difference if unknown."""
        if len(self._index) < 2 or number not in self._of_trial:
            return WindowRatio()
        return self.ratios(runs).get(self._of_trial[number], WindowRatio())
