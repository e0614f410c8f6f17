"""The surrogate as an Optuna sampler, and any other sampler kept inside the search space; for your own studies too.

    study = optuna.create_study(sampler=SurrogateSampler(card, space))
    trial = study.ask(search_space_distributions(space))   # trial.params is an untried configuration of the space
    study.tell(trial, step_time_s)                         # or state=TrialState.FAIL

The value is the primary metric of the card's task, or the metrics of `objective`, in their units and directions
(`study_directions(objective)`); of weighted metrics it is the loss. Tell failures as `TrialState.FAIL`. The models also
use `trial.user_attrs` if you set them: `failure_kind` (`out_of_memory`, `crashed`, ...) and every metric by its name,
such as `peak_memory_gib`; constraints of the objective are checked on them. The last value that a pruned trial reported
is learned from, and is never the best. Trials that run count as running: the surrogate uses what it predicts of them.

`SpaceSampler(TPESampler(), space)` moves what another sampler draws to the nearest configuration of the space that was
not tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from cclsearch.card.model import Card
from cclsearch.card.task import TASKS
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config, Failure, FailureKind, Stage
from cclsearch.propose.base import PROPOSERS, Observation, Proposer, ProposerContext, SearchView
from cclsearch.propose.bayes.pareto_proposer import ParetoProposer
from cclsearch.propose.study.parameters import StudyParameters, study_directions
from cclsearch.scoring.objective import Objective, single_metric
from cclsearch.space.table import Space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

DRAWN = "drawn"
"""User attribute: a sampler's draw, if it was moved."""


def make_surrogate(objective: Objective) -> Proposer:
    """Return the surrogate's proposer for an objective: expected improvement, or of the hypervolume for several."""
    if objective.is_multi:
        return ParetoProposer([(term.metric, term.direction.value) for term in objective.terms])
    return PROPOSERS.get("default").from_context(ProposerContext())


class _KnobSampler(BaseSampler):  # type: ignore[misc]
    """Samples all knobs of the space together; earlier suggestions do not matter."""

    def __init__(self, parameters: StudyParameters) -> None:
        self._parameters = parameters

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all knobs of the space."""
        return dict(self._parameters.distributions)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Raise UserError: Optuna asks for single knobs only if the space does not have them."""
        known = ", ".join(knob.name for knob in self._parameters.space.knobs)
        raise UserError(f"the space has no knob {param_name!r}; it has {known}")


class SurrogateSampler(_KnobSampler):
    """Samples with the calibrated surrogate: never an invalid or an already tried configuration."""

    def __init__(
        self,
        card: Card,
        space: Space,
        *,
        objective: Objective | None = None,
        seed: int = 0,
        expected_trials: int = 15,
    ) -> None:
        super().__init__(StudyParameters(space))
        self._objective = objective or single_metric(TASKS.get(card.task).primary_metric)
        self._card = card
        self._seed = seed
        self._expected_trials = expected_trials
        self._proposer = make_surrogate(self._objective)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return all knobs of the next configuration; raises UserError if every one was tried."""
        directions, wanted = [found.name.lower() for found in study.directions], study_directions(self._objective)
        if directions != wanted:
            raise UserError(
                f"the study has the directions {directions}, but objective {self._objective.name!r} needs {wanted}:"
                f" create it with `directions={wanted}`"
            )
        proposals = self._proposer.propose(self._view(study, trial), 1)
        if not proposals:
            size = len(self._parameters.space)
            raise UserError(f"all {size} configurations of the search space were tried; none is left to propose")
        return self._parameters.encode(proposals[0].config)

    def _view(self, study: Study, trial: FrozenTrial) -> SearchView:
        trials = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        finished = [other for other in trials if other.state.is_finished() and other.params]
        observations = [seen for other in finished if (seen := self._observe(other)) is not None]
        learned = {seen.trial for seen in observations}
        return SearchView(
            card=self._card,
            space=self._parameters.space,
            observations=tuple(observations),
            pending=self._find_rows([other for other in trials if other.state == TrialState.RUNNING]),
            held_back=self._find_rows([other for other in finished if other.number not in learned]),
            budget_left=max(1, self._expected_trials - len(observations)),
            seed=self._seed,
            target=self._objective,
        )

    def _find_rows(self, trials: Sequence[FrozenTrial]) -> frozenset[int]:
        rows = (self._parameters.find_row(trial.params) for trial in trials)
        return frozenset(row for row in rows if row is not None)

    def _observe(self, trial: FrozenTrial) -> Observation | None:
        """Return the observation of a finished trial; None if it teaches nothing: pruned without a value, or not its
        fault.
        """
        failure = _read_failure(trial) if trial.state == TrialState.FAIL else None
        values = list(trial.values or ()) if trial.state == TrialState.COMPLETE else []
        if is_pruned := trial.state == TrialState.PRUNED:
            steps = trial.intermediate_values
            values = [steps[max(steps)]] if steps else []
        if (failure and not failure.kind.counts) or (is_pruned and not values):
            return None
        metrics = {name: float(v) for name, v in trial.user_attrs.items() if isinstance(v, int | float)}
        if not self._objective.is_weighted:
            metrics |= {term.metric: value for term, value in zip(self._objective.terms, values, strict=False)}
        violation = 0.0 if failure or is_pruned else self._objective.violation(metrics)
        config = Config(trial.params)
        return Observation(
            trial=trial.number,
            config=config,
            row=self._parameters.find_row(config),
            loss=None if failure or is_pruned or violation else self._find_loss(values, metrics),
            metrics=metrics,
            violation=violation,
            failure=failure,
            is_pruned=is_pruned,
        )

    def _find_loss(self, values: Sequence[float], metrics: Mapping[str, float]) -> float:
        return values[0] if self._objective.is_weighted else self._objective.loss(metrics)


def _read_failure(trial: FrozenTrial) -> Failure:
    """Return the failure of a trial, of the kind that its user attribute names."""
    kind, known = trial.user_attrs.get("failure_kind", FailureKind.CRASHED), [kind.value for kind in FailureKind]
    if kind not in known:
        raise UserError(f"trial {trial.number} has the unknown failure_kind {kind!r}; known: {', '.join(known)}")
    return Failure(stage=Stage.RUN, kind=FailureKind(kind), message="reported to Optuna as failed")


class SpaceSampler(_KnobSampler):
    """Draws with another sampler, and moves each draw to the nearest configuration that was not tried.

    The sampler is told the moved configuration; its draw is the trial's user attribute `drawn`.
    """

    def __init__(self, inner: BaseSampler, space: Space, *, parameters: StudyParameters | None = None) -> None:
        super().__init__(parameters or StudyParameters(space))
        self.inner = inner
        self.free_N: NDArray[np.bool_] | None = None
        """(N,) rows that may be drawn; None: those that no trial of the study has."""

    def reseed_rng(self) -> None:
        """Reseed the other sampler."""
        self.inner.reseed_rng()

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Call the other sampler's hook; draw for an enqueued trial, so that the sampler's state advances.

        Optuna draws only for parameters that were not enqueued.
        """
        self.inner.before_trial(study, trial)
        if "fixed_params" in trial.system_attrs:
            self._draw(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Call the other sampler's hook."""
        self.inner.after_trial(study, trial, state, values)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the nearest free configuration; raises UserError if every one was tried."""
        drawn = self._draw(study, trial)
        free_N = self._find_free(study, trial) if self.free_N is None else self.free_N
        if not free_N.any():
            size = len(self._parameters.space)
            raise UserError(f"all {size} configurations of the search space were tried; none is left to propose")
        params = self._parameters.encode(self._parameters.space.config(self._parameters.find_nearest(drawn, free_N)))
        moved = {name: value for name, value in drawn.items() if name in params and params[name] != value}
        if moved:
            study._storage.set_trial_user_attr(trial._trial_id, DRAWN, moved)
        return params

    def _draw(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        own = self.inner.infer_relative_search_space(study, trial)
        drawn = dict(self.inner.sample_relative(study, trial, own))
        for name, distribution in self._parameters.distributions.items():
            if name not in drawn and not distribution.single():
                drawn[name] = self.inner.sample_independent(study, trial, name, distribution)
        return drawn

    def _find_free(self, study: Study, trial: FrozenTrial) -> NDArray[np.bool_]:
        free_N = np.ones(len(self._parameters.space), dtype=bool)
        for other in study.get_trials(deepcopy=False):
            if other.number != trial.number and (row := self._parameters.find_row(other.params)) is not None:
                free_N[row] = False
        return free_N
