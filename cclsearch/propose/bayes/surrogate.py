"""The surrogate: the posterior of loss, memory and P(success) of each candidate, given the observations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cclsearch.core.metrics import PEAK_MEMORY
from cclsearch.propose.base import ExpectedOutcome, Observation, SearchView
from cclsearch.propose.bayes.candidates import (
    choose_candidates,
    direct_sign,
    direct_term,
    select_window,
)
from cclsearch.propose.bayes.constraints import judge_constraints
from cclsearch.propose.bayes.corrections import apply_supposed
from cclsearch.propose.bayes.loads import preset_counted
from cclsearch.propose.bayes.models import Drawn, Draws, MetricModels, choose_scale
from cclsearch.propose.bayes.refine import refine_predictor
from cclsearch.stats.closed_form import Predictor
from cclsearch.stats.kernel import Array
from cclsearch.stats.one_thread import on_one_thread

WORTHWHILE = 0.01
"""Share of the largest gain times chance below which a candidate does not run, however safe it is."""


@dataclass(frozen=True, eq=False)
class CandidatePosterior:
    """The posterior at m candidate rows, as k weighted models."""

    metric: str
    """The primary metric."""
    rows_m: NDArray[np.int64]
    """Candidate rows: they may be proposed."""
    weight_k: Array
    mean_km: Array
    """Expected loss on its scale: its log if its metric has a closed form, else as `choose_scale` says."""
    sd_km: Array
    """Standard deviation of one measured loss."""
    memory_gib_m: Array
    p_fits_m: Array
    """Probability that the trial fits into memory."""
    p_success_m: Array
    """Probability that the trial succeeds."""
    p_satisfies_m: Array
    """Probability that a successful trial satisfies the objective's constraints."""
    shortfall_m: Array
    """Until a trial satisfies the constraints: expected log of 1 + the excess over them. A failure counts as 1
    more than the largest."""
    best: float | None
    """Best loss so far, on the same scale; None before the first success that satisfies the constraints."""
    pending_kp: Array
    """Expected loss of the running trials."""
    log_cost_m: Array
    """Expected log of the primary metric, or of its reciprocal if greater is better."""
    log_cost_sd_m: Array
    """Standard deviation of that log."""
    models: MetricModels
    spread: float = 1.0
    """Factor on all standard deviations in statements about chances, at most 1: see `find_spread`."""

    @property
    def mean_m(self) -> Array:
        """(m,) expected loss, on the scale."""
        return np.asarray(self.weight_k @ self.mean_km)

    @property
    def sd_m(self) -> Array:
        """(m,) standard deviation of a measured loss, on the scale."""
        return mixture_sd(Drawn(self.mean_km, self.sd_km, self.weight_k))

    @property
    def p_valid_m(self) -> Array:
        """(m,) probability that the trial succeeds and satisfies the constraints."""
        return self.p_success_m * self.p_satisfies_m

    def utility_m(self, gain_m: Array, penalty: float, largest: float | None = None, *, is_won: bool = False) -> Array:
        """(m,) utility of a trial with that expected improvement, given the cost of a failure.

        A trial that cannot win costs as much as one that fails, so the cost of a failure decides only among candidates
        whose gain times chance is at least `WORTHWHILE` of the largest (`largest`, or these candidates' largest);
        others have the utility -inf, unless nothing is likely to win (`is_won`): then the safest costs least. If
        nothing can satisfy the constraints, the shortfall remains: the closest configuration wins.
        """
        promise_m = gain_m * self.p_valid_m
        least = WORTHWHILE * max(float(promise_m.max()), largest or 0.0)
        utility_m = promise_m - penalty * (1 - self.p_success_m) - self.shortfall_m
        return utility_m if is_won or self.shortfall_m.any() else np.where(promise_m >= least, utility_m, -np.inf)

    @property
    def value_m(self) -> Array:
        """(m,) expected primary metric, in its unit."""
        return np.exp(self.models.primary.form.metric.sign * self.log_cost_m)

    def expected_outcome(self, m: int) -> ExpectedOutcome:
        """Return the expected measurement of candidate `m`; without a closed form, nothing before a first trial."""
        is_known = self.metric in self.models.predictor.forms or len(self.models.primary.most_likely.rows_n) > 0
        expected = {self.metric: float(self.value_m[m])} if is_known else {}
        memory = self.models.predictor.memory
        if memory is not None and memory.is_measured and np.isfinite(self.memory_gib_m[m]):
            expected[PEAK_MEMORY] = float(self.memory_gib_m[m])
        return ExpectedOutcome(expected, fits=float(self.p_fits_m[m]))


def mixture_sd(drawn: Drawn) -> Array:
    """(m,) standard deviation of a measurement by all models."""
    second = drawn.weight_k @ (drawn.sd_km**2 + drawn.mean_km**2)
    return np.asarray(np.sqrt(np.maximum(second - (drawn.weight_k @ drawn.mean_km) ** 2, 1e-12)))


@on_one_thread
def fit_posterior(
    view: SearchView, predictor: Predictor | None = None, *, groups_N: NDArray[np.int64] | None = None
) -> CandidatePosterior | None:
    """Return the posterior at the open rows; None if no row is left.

    In a large space, as many candidates are chosen in each group of rows.
    """
    open_rows = np.flatnonzero(~view.taken_N)
    if not len(open_rows):
        return None
    fitted = replace(view, observations=select_window(view.observations))
    earlier = match_earlier(view)
    predictor = apply_supposed(view, refine_predictor(view, predictor or view.predictor, earlier))
    models = MetricModels(fitted, predictor, earlier)
    groups = [open_rows] if groups_N is None else [open_rows[groups_N[open_rows] == g] for g in np.unique(groups_N)]
    rows = choose_candidates(models, view, predictor, groups)
    pending = np.array(sorted(view.pending), dtype=np.int64)
    rng = np.random.default_rng([view.seed, len(view.observations), len(pending)])
    draws = Draws(models, np.concatenate([rows, pending]), rng)
    counted = preset_counted(draws, rng) if models.predictor.loads else None
    primary = draws.known(view.primary.name)
    assert primary is not None
    loss, best = _model_loss(draws)
    size = len(rows)
    p_satisfies, excess = (found[:size] for found in judge_constraints(draws, counted))
    memory_gib, p_fits, p_success = models.feasibility.predict(rows)
    has_shortfall = best is None and len(view.objective.constraints) > 0
    return CandidatePosterior(
        metric=view.primary.name,
        rows_m=rows,
        weight_k=loss.weight_k,
        mean_km=loss.mean_km[:, :size],
        sd_km=loss.sd_km[:, :size],
        memory_gib_m=memory_gib,
        p_fits_m=p_fits,
        p_success_m=p_success,
        p_satisfies_m=p_satisfies,
        shortfall_m=(p_success * excess + (1 - p_success) * (1 + excess.max())) * has_shortfall,
        best=best,
        pending_kp=loss.mean_km[:, size:],
        log_cost_m=view.primary.sign * (primary.weight_k @ primary.mean_km)[:size],
        log_cost_sd_m=mixture_sd(primary)[:size],
        models=models,
        spread=find_spread(models),
    )


def find_spread(models: MetricModels) -> float:
    """Return the ratio of the loss's real spread to the models' spread, by their leave-one-out errors; 1 if unknown.

    A loss of another model (of a weighted objective, or of trials at several loads) has no such errors here.
    """
    # It only narrows: few errors are a poor proof of a wider spread (`benchmarks/calibration.md`).
    is_direct = direct_term(models) is not None and models.predictor.loads is None
    return min(models.primary.spread, 1.0) if is_direct else 1.0


def match_earlier(view: SearchView) -> tuple[Observation, ...]:
    """Return the observations of earlier runs whose configuration is in this space, with its row."""
    matched = [(o, view.space.row(o.config)) for o in view.prior]
    return tuple(select_window([replace(o, row=row) for o, row in matched if row is not None]))


def _model_loss(draws: Draws) -> tuple[Drawn, float | None]:
    """Return models of the loss, and the lowest loss so far, on the same scale; None before the first."""
    view, term = draws.models.view, direct_term(draws.models)
    ranked = np.array([o.loss for o in view.observations if o.loss is not None], dtype=np.float64)
    if term is not None and (drawn := draws.known(term.metric)) is not None:
        mean_km = direct_sign(term) * (drawn.mean_km + np.log(term.scale))
        return drawn._replace(mean_km=mean_km), float(np.log(ranked.min())) if len(ranked) else None
    seen = [(o, loss) for o in view.observations if (loss := view.find_loss(o)) is not None]
    losses = np.array([loss for _, loss in seen], dtype=np.float64)
    scale = choose_scale(losses, [value for o, _ in seen if (value := o.value(view.primary.name))])
    here = [n for n, (o, _) in enumerate(seen) if o.row is not None]
    drawn = draws.learned(np.array([seen[n][0].row for n in here], dtype=np.int64), scale.apply(losses[here]))
    return drawn, float(scale.apply(ranked.min())) if len(ranked) else None
