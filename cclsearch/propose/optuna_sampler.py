"""Any strategy of this project as an Optuna sampler over the enumerated search space.

    study = optuna.create_study(sampler=SearchSpaceSampler(card, space))
    trial = study.ask(search_space_distributions(space))   # trial.params is an untried configuration of the space
    study.tell(trial, step_time_s)                      # or state=TrialState.FAIL

The value is the primary metric of the card's task, or the metric of `objective`, in its unit. Tell failures as
`TrialState.FAIL`. The models also use `trial.user_attrs` if you set them: `failure_kind` (`out_of_memory`, `crashed`,
...) and every metric by its name, such as `peak_memory_gib`; constraints of the objective are checked on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config, Failure, FailureKind, Stage
from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Observation, Proposer, SearchView
from cclsearch.score.objective import Objective, find_task_metric, single_metric
from cclsearch.space.table import Space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial


def search_space_distributions(space: Space) -> dict[str, BaseDistribution]:
    """Return the distributions for `study.ask`: every knob with its choices."""
    return {knob.name: CategoricalDistribution(knob.choices) for knob in space.knobs}


class SearchSpaceSampler(BaseSampler):  # type: ignore[misc]
    """Samples configurations of a space with a registered strategy; never an invalid or an already tried one."""

    def __init__(
        self,
        card: Card,
        space: Space,
        *,
        objective: Objective | None = None,
        strategy: str = "default",
        seed: int = 0,
        expected_trials: int = 15,
    ) -> None:
        if objective is not None and len(objective.terms) > 1:
            raise UserError(f"a study has one value, but objective {objective.name!r} has {len(objective.terms)}")
        self._objective = objective or single_metric(find_task_metric(card.task))
        self._card = card
        self._space = space
        self._seed = seed
        self._expected_trials = expected_trials
        self._proposer: Proposer = PROPOSERS.get(strategy)()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all knobs of the space, whatever was suggested before."""
        return search_space_distributions(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return all knobs of the next configuration; raises UserError if every one was tried."""
        trials = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        observations = [self._observe(other) for other in trials if other.state.is_finished() and other.params]
        running = [other.params for other in trials if other.state == TrialState.RUNNING]
        rows = [self._space.row(params) for params in running]
        view = SearchView(
            card=self._card,
            space=self._space,
            observations=tuple(observations),
            pending=frozenset(row for row in rows if row is not None),
            budget_left=max(1, self._expected_trials - len(observations)),
            seed=self._seed,
            target=self._objective,
        )
        proposals = self._proposer.propose(view, 1)
        if not proposals:
            raise UserError(
                f"all {len(self._space)} configurations of the search space were tried; none is left to propose"
            )
        return dict(proposals[0].config)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Raise UserError: Optuna asks for single knobs only if the space does not have them."""
        known: Sequence[str] = [knob.name for knob in self._space.knobs]
        raise UserError(f"the space has no knob {param_name!r}; it has {', '.join(known)}")

    def _observe(self, trial: FrozenTrial) -> Observation:
        failed = trial.state != TrialState.COMPLETE
        kind = FailureKind(trial.user_attrs.get("failure_kind", FailureKind.CRASHED.value))
        config = Config(trial.params)
        metrics = {name: float(v) for name, v in trial.user_attrs.items() if isinstance(v, int | float)}
        if not failed:
            metrics[self._objective.terms[0].metric] = trial.value
        violation = 0.0 if failed else self._objective.violation(metrics)
        return Observation(
            trial=trial.number,
            config=config,
            row=self._space.row(config),
            loss=None if failed or violation else self._objective.loss(metrics),
            metrics=metrics,
            violation=violation,
            failure=Failure(stage=Stage.RUN, kind=kind, message="reported to Optuna as failed") if failed else None,
        )
