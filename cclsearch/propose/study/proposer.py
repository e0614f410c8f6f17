"""Proposes with the surrogate, or with any other sampler in an Optuna study.

The surrogate plans from the view, which holds more than a study can. Any other sampler is asked in a study in memory,
built from the view for each proposal: so the ledger alone decides what is proposed, also after a kill. A sampler with
state (`cmaes`, `nsgaii`, your own) draws again for every trial of the view, whose configuration is enqueued (finished
ones first); others get a separate seed for each proposal. `cclsearch.study.view` writes the run's `study.log`, which
people read, from the ledger.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cclsearch.core.errors import UserError
from cclsearch.core.text import one_line
from cclsearch.core.values import format_config
from cclsearch.propose.base import PROPOSERS, Observation, Proposal, Proposer, ProposerEvent, SearchView
from cclsearch.propose.observations import observed_losses

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial, TrialState

    from cclsearch.propose.study.parameters import StudyParameters

MakeSampler = Callable[..., "BaseSampler"]
"""Seed, and `constraints_func` if the objective has constraints -> sampler."""
PENALTY = 2.0
"""Factor on the worst loss so far (for a positive loss) with which a failed trial is told, with `penalize`."""
VIOLATION = "violation"


@PROPOSERS.register("surrogate")
class SurrogateProposer(Proposer):
    """Proposes with the surrogate of the view's objective."""

    name = "surrogate"

    def __init__(self) -> None:
        self._events: list[ProposerEvent] = []
        self._ending: str | None = None

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return up to `count` proposals, chosen as one batch; none if nothing is feasible or left."""
        from cclsearch.propose.study.samplers import make_surrogate

        surrogate = make_surrogate(view.objective)
        planned = surrogate.propose(view, count)
        self._events += surrogate.take_events()
        self._ending = surrogate.ending()
        return [replace(proposal, proposer=self.name) for proposal in planned]

    def take_events(self) -> Sequence[ProposerEvent]:
        """See `Proposer`."""
        events, self._events = self._events, []
        return events

    def ending(self) -> str | None:
        """See `Proposer`."""
        return self._ending


class StudyProposer(Proposer):
    """Asks a study with a sampler of Optuna, of OptunaHub or of yours, and moves its draws into the space."""

    def __init__(self, name: str, make_sampler: MakeSampler, *, has_state: bool = True, penalize: bool = False) -> None:
        """With `penalize` the study gets failures as bad losses instead of FAIL, which many samplers ignore."""
        self.name = name
        self._make_sampler = make_sampler
        self._has_state = has_state
        self._penalize = penalize

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return up to `count` untried configurations; raises UserError if the sampler fails."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return self._propose(view, count)
        except UserError:
            raise
        except Exception as error:  # code of others runs here
            reason = one_line(f"{type(error).__name__}: {error}", 300)
            raise UserError(
                f"the sampler {self.name!r} failed: {reason}; fix it, or choose another with --sampler"
            ) from error

    def _propose(self, view: SearchView, count: int) -> list[Proposal]:
        from cclsearch.propose.study.parameters import StudyParameters
        from cclsearch.propose.study.samplers import DRAWN, SpaceSampler

        parameters = StudyParameters(view.space, as_positions=True)
        constrained = {"constraints_func": _read_violation} if view.objective.constraints else {}
        inner = self._make_sampler(self._choose_seed(view), **constrained)
        sampler = SpaceSampler(inner, view.space, parameters=parameters)
        study = create_study(sampler, len(view.objective.terms) if view.objective.is_multi else 1)
        self._fill(study, parameters, view)
        free_N = ~view.taken_N
        proposals: list[Proposal] = []
        for _ in range(min(count, int(free_N.sum()))):
            sampler.free_N = free_N
            trial = study.ask(parameters.distributions)
            row = parameters.find_row(trial.params)
            assert row is not None, "a sampler of the space proposes its rows"
            free_N[row] = False
            drawn = study._storage.get_trial(trial._trial_id).user_attrs.get(DRAWN)
            moved = f", moved to the nearest free configuration from {format_config(drawn)}" if drawn else ""
            proposals.append(Proposal(view.space.config(row), self.name, f"drawn by the sampler {self.name}{moved}"))
        return proposals

    def _choose_seed(self, view: SearchView) -> int:
        if self._has_state:
            return view.seed
        words = [view.seed, len(view.observations), len(view.pending)]
        return int(np.random.SeedSequence(words).generate_state(1)[0])

    def _fill(self, study: Study, parameters: StudyParameters, view: SearchView) -> None:
        """Add the trials of the view by number; running ones last if they have none, or if the sampler has a state."""
        from optuna.trial import create_trial

        numbered = {} if self._has_state else dict(view.pending_trials)
        trials: list[tuple[float, int, Observation | None]] = [(n, row, None) for n, row in numbered.items()]
        trials += [(o.trial, o.row, o) for o in view.observations if o.row is not None]
        trials.sort(key=lambda trial: trial[0])
        trials += [(np.inf, row, None) for row in sorted(view.pending - set(numbered.values()))]
        for _, row, observation in trials:
            params = parameters.encode(view.space.config(row))
            values = None if observation is None else self._values_of(view, observation)
            state = _find_state(observation, values)
            if self._has_state:
                study.enqueue_trial(params)
                asked = study.ask(parameters.distributions)
                if observation is not None:
                    asked.set_user_attr(VIOLATION, observation.violation)
                    study.tell(asked, values, state=state)
                continue
            violation = 0.0 if observation is None else observation.violation
            # where Optuna keeps what a `constraints_func` returns
            kept = {"constraints": (violation,)} if view.objective.constraints and values is not None else None
            told = create_trial(
                state=state,
                values=values,
                params=params,
                distributions=parameters.distributions,
                user_attrs={VIOLATION: violation},
                system_attrs=kept,
            )
            study.add_trial(told)

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


def create_study(sampler: BaseSampler, num_values: int) -> Study:
    """Return a study in memory that minimizes so many values, without messages on the terminal."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(sampler=sampler, directions=["minimize"] * num_values)


def _find_state(observation: Observation | None, values: list[float] | None) -> TrialState:
    from optuna.trial import TrialState

    if observation is None:
        return TrialState.RUNNING
    return TrialState.FAIL if values is None else TrialState.COMPLETE


def _read_violation(trial: FrozenTrial) -> Sequence[float]:
    """Return a trial's excess over the constraints; it is feasible if that is 0."""
    return (float(trial.user_attrs.get(VIOLATION, 0.0)),)
