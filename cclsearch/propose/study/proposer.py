"""Asks an Optuna study for the next configurations: of the surrogate by default, or of any other sampler.

The study in memory is computed from the view, so the ledger alone decides what is proposed: its trials are those of the
view by number, running ones included. The surrogate plans from the view itself, which holds more than a study can. A
sampler that keeps its state in the study or in itself (`cmaes`, `nsgaii`, your own) draws again for every trial when
the study is built anew, which it is for each proposal while others run, and is then told the configuration that ran
(finished ones first); others get a seed of their own for each proposal.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import format_config
from cclsearch.propose.base import PROPOSERS, Observation, Proposal, Proposer, ProposerEvent, SearchView
from cclsearch.propose.observations import observed_failures, observed_losses, observed_trials

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from cclsearch.propose.study.samplers import SpaceSampler, SurrogateSampler

MakeSampler = Callable[..., "BaseSampler"]
"""Seed, and `constraints_func` if the objective has constraints -> sampler."""
PENALTY = 2.0
"""With `penalize`, a failed trial is told as this times the worst loss so far (for a positive loss)."""
VIOLATION = "violation"


@dataclass
class _Told:
    """What a study was told: the finished trials by their numbers, and which of its trials run."""

    trials_n: NDArray[np.int64]
    losses_n: NDArray[np.float64]
    failed_n: NDArray[np.bool_]
    running: dict[int, int] = field(default_factory=dict)
    """Our number of a trial -> that of the study."""
    asked: list[tuple[int, int]] = field(default_factory=list)
    """Row and number in the study of what was proposed last and has no number of ours yet."""
    last: int = 0
    """Our highest number in the study."""
    is_whole: bool = True
    """Whether every running trial of the study is in `running` or `asked`."""


class _StudyKeeper(Proposer):
    """Keeps a study in memory that holds the trials of the view."""

    def __init__(self, *, has_state: bool = False, penalize: bool = False) -> None:
        self._has_state = has_state
        self._penalize = penalize
        self._study: Study | None = None
        self._told: _Told | None = None
        self._view: SearchView | None = None

    @abstractmethod
    def _make(self, view: SearchView, seed: int) -> SurrogateSampler | SpaceSampler:
        """Return a sampler of the view's space."""

    def _update(self, view: SearchView) -> SurrogateSampler | SpaceSampler:
        """Bring the study to the state of the view; returns its sampler."""
        if not self._continues(view):
            self._build(view)
        assert self._study is not None, "the study was built"
        sampler: Any = self._study.sampler
        if not self._has_state:
            words = [view.seed, len(view.observations), len(view.pending)]
            sampler = self._make(view, int(np.random.SeedSequence(words).generate_state(1)[0]))
            self._study.sampler = sampler
        self._view = view
        return sampler  # type: ignore[no-any-return]

    def _ask(self) -> tuple[int, Mapping[str, Any]]:
        """Ask the study, which was brought to the state of the view, for a trial: its row and its user attributes."""
        study, told = self._study, self._told
        assert study is not None, "the study was built"
        assert told is not None, "the study was told the view"
        trial = study.ask(self._distributions)
        row = self._parameters.find_row(trial.params)
        assert row is not None, "a sampler of the space proposes its rows"
        told.asked.append((row, int(trial.number)))
        return row, study._storage.get_trial(trial._trial_id).user_attrs

    def _continues(self, view: SearchView) -> bool:
        """Tell the study what is new and return True; False if it has to be built anew."""
        told, before = self._told, self._view
        if self._study is None or told is None or before is None or view.space is not before.space:
            return False
        if not told.is_whole or view.seed != before.seed or view.objective != before.objective:
            return False
        pending = dict(view.pending_trials)
        if len(pending) != len(view.pending) or (self._has_state and pending):
            return False
        now = _read_told(view)
        at_n = np.searchsorted(now.trials_n, told.trials_n)
        if len(at_n) and at_n[-1] >= len(now.trials_n):
            return False
        same = (
            np.array_equal(now.trials_n[at_n], told.trials_n)
            and np.array_equal(now.losses_n[at_n], told.losses_n, equal_nan=True)
            and np.array_equal(now.failed_n[at_n], told.failed_n)
        )
        is_new_n = np.ones(len(now.trials_n), dtype=bool)
        is_new_n[at_n] = False
        new = {view.observations[n].trial: view.observations[n] for n in map(int, np.flatnonzero(is_new_n))}
        if not same or not told.running.keys() <= pending.keys() | new.keys():
            return False
        unknown = sorted(number for number in (pending | new) if number not in told.running)
        if (unknown and unknown[0] <= told.last) or len(told.asked) > len(unknown):
            return False  # the trials of the study have the order of ours
        rows = {**pending, **{number: observation.row for number, observation in new.items()}}
        if [rows[number] for number in unknown[: len(told.asked)]] != [row for row, _ in told.asked]:
            return False
        now.running, now.last = told.running, unknown[-1] if unknown else told.last
        now.running |= {number: trial for number, (_, trial) in zip(unknown, told.asked, strict=False)}
        for number in sorted(now.running.keys() & new.keys()):
            self._tell(view, new[number], now.running.pop(number))
        for number in unknown[len(told.asked) :]:
            if number in new:
                self._tell(view, new[number], None)
            else:
                now.running[number] = self._enter(pending[number], view)
        self._told = now
        return True

    def _build(self, view: SearchView) -> None:
        from cclsearch.propose.study.parameters import StudyParameters

        self._parameters = StudyParameters(view.space, as_positions=True)
        self._distributions = self._parameters.distributions
        self._study = create_study(self._make(view, view.seed), self._num_values(view))
        told = self._told = _read_told(view)
        numbered = {} if self._has_state else dict(view.pending_trials)
        told.last = max([*numbered, int(told.trials_n.max(initial=0))])
        told.is_whole = len(numbered) == len(view.pending)
        waiting = sorted(numbered)
        for observation in view.observations:
            while waiting and waiting[0] < observation.trial:
                number = waiting.pop(0)
                told.running[number] = self._enter(numbered[number], view)
            self._tell(view, observation, None)
        for number in waiting:
            told.running[number] = self._enter(numbered[number], view)
        for row in sorted(view.pending - set(numbered.values())):
            self._enter(row, view)

    def _enter(self, row: int, view: SearchView) -> int:
        """Add a running trial of that row, whatever the sampler draws; returns its number in the study."""
        from optuna.trial import TrialState, create_trial

        study = self._study
        assert study is not None, "the study was built"
        if self._has_state:
            study.sampler.next_row = row
            return int(study.ask(self._distributions).number)
        params = self._parameters.encode(view.space.config(row))
        study.add_trial(create_trial(state=TrialState.RUNNING, params=params, distributions=self._distributions))
        return len(study.get_trials(deepcopy=False)) - 1

    def _tell(self, view: SearchView, observation: Observation, trial: int | None) -> None:
        """Tell the study one result, of its running trial if it has one; one outside the space is left out."""
        from optuna.trial import TrialState, create_trial

        study, row = self._study, observation.row
        assert study is not None, "the study was built"
        if row is None:
            return
        values = self._values_of(view, observation)
        state = TrialState.FAIL if values is None else TrialState.COMPLETE
        if trial is None and self._has_state:
            trial = self._enter(row, view)
        if trial is not None:
            study._storage.set_trial_user_attr(
                study._storage.get_trial_id_from_study_id_trial_number(study._study_id, trial),
                VIOLATION,
                observation.violation,
            )
            study.tell(trial, values, state=state)
            return
        told = {"params": self._parameters.encode(view.space.config(row)), "distributions": self._distributions}
        attributes = {"user_attrs": {VIOLATION: observation.violation}}
        if view.objective.constraints and values is not None:
            # where Optuna keeps what a `constraints_func` returns
            attributes["system_attrs"] = {"constraints": (observation.violation,)}  # type: ignore[dict-item]
        study.add_trial(create_trial(state=state, values=values, **told, **attributes))

    def _values_of(self, view: SearchView, observation: Observation) -> list[float] | None:
        """Return the value to minimize. For a failure it is None, or a bad value with `penalize`."""
        loss = view.find_loss(observation)
        if loss is not None and view.objective.is_multi:
            return list(view.objective.values(observation.metrics))
        if loss is not None:
            return [loss]
        if not self._penalize or view.objective.is_multi:
            return None
        worst = float(np.nanmax(losses)) if np.isfinite(losses := observed_losses(view.observations)).any() else 1.0
        return [worst + (PENALTY - 1) * abs(worst)]

    def _num_values(self, view: SearchView) -> int:
        return len(view.objective.terms) if view.objective.is_multi else 1


@PROPOSERS.register("surrogate")
class SurrogateProposer(_StudyKeeper):
    """Asks a study whose sampler is the surrogate, which plans from everything in the view."""

    name = "surrogate"

    def __init__(self) -> None:
        super().__init__()
        self._planned: Sequence[Proposal] = ()
        self._events: list[ProposerEvent] = []
        self._ending: str | None = None

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return up to `count` proposals, chosen as one batch; none if nothing is feasible or left."""
        from cclsearch.propose.study.samplers import make_surrogate

        surrogate = make_surrogate(view.objective)
        self._planned = tuple(surrogate.propose(view, count))
        self._events += surrogate.take_events()
        self._ending = surrogate.ending()
        self._update(view)
        rows = [self._ask()[0] for _ in self._planned]
        return [
            replace(planned, config=view.space.config(row), proposer=self.name)
            for row, planned in zip(rows, self._planned, strict=True)
        ]

    def take_events(self) -> Sequence[ProposerEvent]:
        """See `Proposer`."""
        events, self._events = self._events, []
        return events

    def ending(self) -> str | None:
        """See `Proposer`."""
        return self._ending

    def _make(self, view: SearchView, seed: int) -> SurrogateSampler:
        from cclsearch.propose.study.samplers import SurrogateSampler

        planned, parameters = self._planned, self._parameters
        return SurrogateSampler(view.card, view.space, objective=view.objective, planned=planned, parameters=parameters)


class StudyProposer(_StudyKeeper):
    """Asks a study with a sampler of Optuna, of OptunaHub or of yours; what it draws is moved into the space."""

    def __init__(self, name: str, make_sampler: MakeSampler, *, has_state: bool = True, penalize: bool = False) -> None:
        """With `penalize` failures are told as bad losses instead of FAIL, which many samplers ignore."""
        super().__init__(has_state=has_state, penalize=penalize)
        self.name = name
        self._make_sampler = make_sampler

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return up to `count` untried configurations; raises UserError if the sampler fails."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._propose(view, count)
        except UserError:
            raise
        except Exception as error:  # code of others runs here
            self._study = None
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise UserError(
                f"the sampler {self.name!r} failed: {reason}; fix it, or choose another with --sampler"
            ) from error

    def _propose(self, view: SearchView, count: int) -> list[Proposal]:
        from cclsearch.propose.study.samplers import DRAWN

        sampler: Any = self._update(view)
        free_N = ~view.taken_N
        proposals: list[Proposal] = []
        for _ in range(min(count, int(free_N.sum()))):
            sampler.free_N = free_N
            row, attributes = self._ask()
            free_N[row] = False
            drawn = attributes.get(DRAWN)
            moved = f", moved to the nearest free configuration from {format_config(drawn)}" if drawn else ""
            proposals.append(Proposal(view.space.config(row), self.name, f"drawn by the sampler {self.name}{moved}"))
        return proposals

    def _make(self, view: SearchView, seed: int) -> SpaceSampler:
        from cclsearch.propose.study.samplers import SpaceSampler

        constrained = {"constraints_func": _read_violation} if view.objective.constraints else {}
        return SpaceSampler(self._make_sampler(seed, **constrained), view.space, parameters=self._parameters)


def create_study(sampler: BaseSampler, num_values: int) -> Study:
    """Return a study in memory that minimizes so many values, without messages on the terminal."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=sampler, directions=["minimize"] * num_values)


def _read_told(view: SearchView) -> _Told:
    seen = view.observations
    return _Told(observed_trials(seen), observed_losses(seen), observed_failures(seen))


def _read_violation(trial: FrozenTrial) -> Sequence[float]:
    """Return by how much a trial violates the constraints: it is feasible if that is 0."""
    return (float(trial.user_attrs.get(VIOLATION, 0.0)),)
