"""Optuna's own samplers over the same search space, as baselines for the default strategy.

Each knob is an integer distribution over its choices (categorical if they have no order). A draw is moved to the
nearest untried configuration, which is the one reported to the study. `tpe-raw` proposes the draws unchanged, invalid
combinations and repeats included, as most people start: it is for comparison, not for a cluster.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cclsearch.core.errors import UserError
from cclsearch.core.values import Config
from cclsearch.plugins import PROPOSERS
from cclsearch.propose.base import Observation, Proposal, SearchView
from cclsearch.propose.baselines.simple import open_rows
from cclsearch.space.table import Space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

PENALTY = 2.0
"""With `penalize`, a failed trial is reported as this times the worst loss so far (for a positive loss)."""


@dataclass(frozen=True)
class OptunaProposer:
    """One of Optuna's samplers, rebuilt from the view for each call."""

    name: str
    make_sampler: Callable[..., BaseSampler]
    """Seed, and further options of the sampler -> sampler."""
    penalize: bool = False
    """Report failures as bad losses instead of FAIL, which samplers ignore."""
    raw: bool = False
    """Propose the draw itself, even if it is invalid or was tried."""

    def propose(self, view: SearchView, count: int) -> Sequence[Proposal]:
        """Return up to `count` proposals: untried configurations, or unchanged draws if `raw`."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        seed = int(np.random.SeedSequence([view.seed, len(view.observations)]).generate_state(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            constrained = {"constraints_func": _read_violation} if view.objective.constraints else {}
            study = optuna.create_study(sampler=self.make_sampler(seed, **constrained), direction="minimize")
            self._tell(study, view)
            return self._ask(study, view, count)

    def _ask(self, study: Study, view: SearchView, count: int) -> list[Proposal]:
        distributions = _distributions(view.space)
        free = set(open_rows(view).tolist())
        proposals = []
        for _ in range(count):
            if not free and not self.raw:
                break
            drawn = study.ask(distributions)
            codes = np.array([drawn.params.get(knob.name, 0) for knob in view.space.knobs])
            if self.raw:
                choices = zip(view.space.knobs, codes, strict=True)
                config = Config({knob.name: knob.choices[int(code)] for knob, code in choices})
            else:
                row = _nearest(view.space, codes, free)
                free.discard(row)
                config = view.space.config(row)
            proposals.append(Proposal(config, self.name, "drawn by Optuna"))
        return proposals

    def _tell(self, study: Study, view: SearchView) -> None:
        from optuna.trial import TrialState, create_trial

        distributions = _distributions(view.space)
        losses = [o.loss for o in view.observations if o.loss is not None]
        worst = max(losses, default=1.0)
        penalty = worst + (PENALTY - 1) * abs(worst)
        for observation in view.observations:
            params = _codes_of(view.space, observation)
            if params is None:
                continue
            loss = view.find_loss(observation)
            value = loss if loss is not None else penalty if self.penalize else None
            state = TrialState.FAIL if value is None else TrialState.COMPLETE
            told = {"state": state, "value": value, "params": params, "distributions": distributions}
            # where Optuna stores what a `constraints_func` returns
            study.add_trial(create_trial(**told, system_attrs={"constraints": (observation.violation,)}))


def _read_violation(trial: FrozenTrial) -> Sequence[float]:
    """Return the violation that `_tell` stores; a trial is feasible if it is 0."""
    violation: Sequence[float] = trial.system_attrs["constraints"]
    return violation


def _distributions(space: Space) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    found: dict[str, Any] = {}
    for knob in space.knobs:
        last = len(knob.choices) - 1
        if last:
            ordered = IntDistribution(0, last)
            found[knob.name] = ordered if knob.is_numeric else CategoricalDistribution(tuple(range(last + 1)))
    return found


def _codes_of(space: Space, observation: Observation) -> dict[str, int] | None:
    """Return knob -> index of its choice; None if a value is not among the choices."""
    codes = {}
    for knob in space.knobs:
        value = observation.config.get(knob.name)
        matches = [n for n, choice in enumerate(knob.choices) if choice == value and type(choice) is type(value)]
        if not matches:
            return None
        if len(knob.choices) > 1:
            codes[knob.name] = matches[0]
    return codes


def _nearest(space: Space, codes_K: Any, free: set[int]) -> int:
    """Return the free row with the fewest steps from the draw; a category that differs counts as one step."""
    rows = np.array(sorted(free))
    gap = np.abs(space.codes_NK[rows].astype(np.int64) - codes_K)
    categorical = np.array([not knob.is_numeric for knob in space.knobs])
    gap[:, categorical] = np.minimum(gap[:, categorical], 1)
    return int(rows[int(np.argmin(gap.sum(axis=1)))])


def _tpe(**options: Any) -> Callable[..., BaseSampler]:
    def make(seed: int, **more: Any) -> BaseSampler:
        from optuna.samplers import TPESampler

        return TPESampler(seed=seed, **options, **more)

    return make


def _gp(seed: int, **more: Any) -> BaseSampler:
    from importlib.util import find_spec

    from optuna.samplers import GPSampler

    if find_spec("torch") is None:
        raise UserError(
            "strategy 'gp' needs torch, which is not installed: run `pip install torch`, or use strategy 'default'"
        )
    return GPSampler(seed=seed, deterministic_objective=False, **more)


for _name, _make_sampler, _options in (
    ("tpe", _tpe(), {}),  # failures are reported as FAIL
    ("tpe-penalised", _tpe(), {"penalize": True}),
    ("tpe-multivariate", _tpe(multivariate=True, n_startup_trials=5), {"penalize": True}),
    ("tpe-raw", _tpe(), {"raw": True}),
    ("gp", _gp, {"penalize": True}),  # needs torch
):
    PROPOSERS.register(_name)(partial(OptunaProposer, _name, _make_sampler, **_options))
