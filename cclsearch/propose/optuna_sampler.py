"""Any strategy of this project as an Optuna sampler over the enumerated legal set.

    study = optuna.create_study(sampler=SearchSpaceSampler(card, space))
    trial = study.ask(search_space_distributions(space))   # trial.params is always a member that was not tried
    study.tell(trial, step_time_s)                      # or state=TrialState.FAIL

Failures are told as `FAIL`; a message in `user_attrs["failure_kind"]` (`out_of_memory`, `crashed`, ...) and a peak in
`user_attrs["peak_memory_gib"]` teach the memory model.
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
from cclsearch.space.table import Space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial


def search_space_distributions(space: Space) -> dict[str, BaseDistribution]:
    """What to give to `study.ask`: every knob with its choices."""
    return {knob.name: CategoricalDistribution(knob.choices) for knob in space.knobs}


class SearchSpaceSampler(BaseSampler):  # type: ignore[misc]
    """Samples whole members of a space by one of the registered strategies; never an illegal or a repeated one."""

    def __init__(
        self, card: Card, space: Space, *, strategy: str = "default", seed: int = 0, expected_trials: int = 15
    ) -> None:
        self._card = card
        self._space = space
        self._seed = seed
        self._expected_trials = expected_trials
        self._proposer: Proposer = PROPOSERS.get(strategy)()

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The whole space, whatever was suggested before."""
        return search_space_distributions(self._space)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """All knobs of the next member; raises UserError where none is left."""
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
        )
        proposals = self._proposer.propose(view, 1)
        if not proposals:
            raise UserError(f"every one of the {len(self._space)} legal configurations was tried")
        return dict(proposals[0].config)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A knob that the space does not have: nothing here can choose it."""
        known: Sequence[str] = [knob.name for knob in self._space.knobs]
        raise UserError(f"the space has no knob {param_name!r}; it has {', '.join(known)}")

    def _observe(self, trial: FrozenTrial) -> Observation:
        failed = trial.state != TrialState.COMPLETE
        kind = FailureKind(trial.user_attrs.get("failure_kind", FailureKind.CRASHED.value))
        config = Config(trial.params)
        return Observation(
            trial=trial.number,
            config=config,
            row=self._space.row(config),
            loss=None if failed else trial.value,
            step_time_s=None if failed else trial.value,
            peak_memory_gib=trial.user_attrs.get("peak_memory_gib"),
            failure=Failure(stage=Stage.RUN, kind=kind, message="told as failed") if failed else None,
        )
