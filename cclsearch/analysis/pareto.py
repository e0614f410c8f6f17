"""The Pareto front of one run, or of several runs of the same work, as data for charts and tables."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cclsearch.charts.pareto import FrontPoint
from cclsearch.core.errors import TrialError, UserError
from cclsearch.core.values import Config, Provenance
from cclsearch.loop.sweep import Sweep, describe_sweep, drop_weights, make_pareto_objective, read_sweep, trade_off
from cclsearch.record.trial import Trial, TrialState
from cclsearch.report.certainty import list_spreads
from cclsearch.report.gather import describe_work, metrics_of
from cclsearch.report.pareto import ParetoPage
from cclsearch.report.rows import clean
from cclsearch.run.folder import Run
from cclsearch.scoring.objective import Objective
from cclsearch.stats.noise import confidence_interval, estimate_noise
from cclsearch.stats.pareto import (
    Floats,
    choose_by_weight,
    choose_reference_point,
    cumulative_hypervolume,
    find_knee,
    find_pareto_front,
    hypervolume_contributions,
    log_axes,
    measure_hypervolume,
)


@dataclass(frozen=True)
class _Measured:
    """One configuration with the mean metrics of its admitted runs."""

    run: Run
    trial: Trial
    metrics: Mapping[str, float]
    runs: int
    values: tuple[float, ...]
    """Values that the objective minimizes."""


def gather_pareto_page(
    runs: Sequence[Run],
    *,
    objective: str | None = None,
    metrics: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
) -> ParetoPage:
    """The Pareto front of these runs together.

    The axes are `metrics`, or the metrics of `objective`, or those of the first run's sweep, or else the primary metric
    and the number of accelerators. Raises UserError if the runs are not comparable, no trial has all the metrics, or
    the arguments exclude each other.
    """
    _check_comparable(runs)
    front_of, sweep = _choose_objective(runs[0], objective, metrics, weights)
    measured = [m for run in runs for m in _collect(run, front_of)]
    if not measured:
        raise UserError(f"no admitted trial of {_names(runs)} has all of {', '.join(front_of.metrics)}")
    return _build_page(runs, front_of, sweep, measured)


def _choose_objective(
    run: Run, objective: str | None, metrics: Sequence[str] | None, weights: Sequence[float] | None
) -> tuple[Objective, Sweep | None]:
    if metrics is not None:
        if objective is not None or weights is not None:
            other = "--objective" if objective is not None else "--weights"
            raise UserError(f"--metrics and {other} exclude each other: a Pareto front over metrics has no weights")
        return make_pareto_objective(metrics, run.spec.card.task), None
    if objective is not None:
        sweep, front_of = describe_sweep(objective, weights, task=run.spec.card.task)
        return front_of, sweep
    sweep_of_run = read_sweep(run.folder)
    if sweep_of_run is not None and sweep_of_run.at_0 is not None:
        changed = sweep_of_run if weights is None else sweep_of_run.model_copy(update={"weights": tuple(weights)})
        return drop_weights(sweep_of_run.at_0), changed
    if weights is not None:
        raise UserError(
            f"--weights: run {run.spec.run_id!r} is not a sweep over weights; name a weighted objective"
            " (`--objective composite`)"
        )
    if run.spec.objective.is_multi:
        return run.spec.objective, None
    return trade_off(run.spec.card.task), None


def _check_comparable(runs: Sequence[Run]) -> None:
    first = runs[0]
    for run in runs[1:]:
        for what, ours, theirs in (
            ("task", first.spec.card.task, run.spec.card.task),
            ("work", describe_work(first.spec), describe_work(run.spec)),
            ("accelerator", first.spec.card.hardware.accelerator, run.spec.card.hardware.accelerator),
            ("provenance", first.spec.provenance.value, run.spec.provenance.value),
            ("simulated cluster", first.spec.simulated_cluster, run.spec.simulated_cluster),
        ):
            if ours != theirs:
                raise UserError(
                    f"runs {first.spec.run_id!r} and {run.spec.run_id!r} have no common Pareto front: {what} differs"
                    f" ({clean(ours)}; {clean(theirs)})"
                )


def _collect(run: Run, objective: Objective) -> list[_Measured]:
    """The configurations with all metrics: the first admitted trial, with the mean of each metric over the runs."""
    grouped: dict[Config, list[Trial]] = {}
    for trial in run.state.trials.values():
        if trial.loss is not None and trial.outcome is not None:
            grouped.setdefault(trial.config, []).append(trial)
    measured = []
    for trials in grouped.values():
        every = [trial.outcome.metrics for trial in trials if trial.outcome]
        shared = [name for name in every[0] if all(name in metrics for metrics in every)]
        means = {name: float(np.mean([metrics[name] for metrics in every])) for name in shared}
        with contextlib.suppress(TrialError):
            measured.append(_Measured(run, trials[0], means, len(trials), objective.values(means)))
    return measured


def _build_page(
    runs: Sequence[Run], objective: Objective, sweep: Sweep | None, measured: Sequence[_Measured]
) -> ParetoPage:
    values_NM = np.array([m.values for m in measured], dtype=float)
    spread_NM = log_axes(values_NM)
    on_front_N = find_pareto_front(values_NM)
    reference_M = choose_reference_point(spread_NM[on_front_N])
    total = measure_hypervolume(spread_NM, reference_M)
    front_rows = np.flatnonzero(on_front_N)
    knee = find_knee(values_NM[front_rows])
    knee_row = None if knee is None else int(front_rows[knee])
    shares_N = hypervolume_contributions(spread_NM.tolist(), reference_M) / total
    scores, chosen = _score(measured, sweep, runs)
    points = tuple(
        FrontPoint(
            run=m.run.spec.run_id,
            trial=m.trial.number,
            config=dict(m.trial.config),
            values=tuple(m.metrics[term.metric] * term.scale for term in objective.terms),
            on_front=bool(on_front_N[n]),
            is_knee=n == knee_row,
            interval=_interval(m, objective),
            hypervolume_share=float(shares_N[n]),
            scores=scores[n] if scores else None,
            chosen=chosen.get(n),
        )
        for n, m in enumerate(measured)
    )
    positive_M = np.all(values_NM > 0, axis=0)
    reference = np.where(positive_M, np.exp(reference_M), reference_M)
    return ParetoPage(
        title=clean(runs[0].spec.card.title) if len(runs) == 1 else f"Pareto front of {_names(runs)}",
        runs=tuple(run.spec.run_id for run in runs),
        work=describe_work(runs[0].spec),
        provenance=runs[0].spec.provenance.value,
        axes=objective.terms,
        points=points,
        growth=_grow(runs, measured, spread_NM, reference_M, total),
        hypervolume=total,
        reference=tuple(t.restored(float(v)) for t, v in zip(objective.terms, reference, strict=True)),
        is_by_ratio=bool(positive_M.all()),
        objective=sweep.objective if sweep else objective.name,
        weights=_list_weights(points, sweep),
        notes=_notes(runs, scores is None and sweep is not None),
    )


def _score(
    measured: Sequence[_Measured], sweep: Sweep | None, runs: Sequence[Run]
) -> tuple[list[tuple[float, float]] | None, dict[int, tuple[float, float]]]:
    """Score of each point at weight 0 and 1, and the weights that choose it; None and empty without weights."""
    if sweep is None or sweep.at_0 is None:
        return None, {}
    try:
        scores = [sweep.scores(m.metrics, metrics_of(runs[0].state.baseline)) for m in measured]
    except (TrialError, ValueError):
        return None, {}
    at_0, at_1 = np.array(scores).T
    choices = choose_by_weight(at_0, at_1)
    return scores, {choice.point: (choice.from_weight, choice.to_weight) for choice in choices}


def _list_weights(points: Sequence[FrontPoint], sweep: Sweep | None) -> tuple[tuple[float, int, float], ...]:
    if sweep is None or not any(point.scores for point in points):
        return ()
    rows = []
    for weight in sweep.weights:
        n = next(n for n, p in enumerate(points) if p.chosen and p.chosen[0] <= weight <= p.chosen[1])
        rows.append((weight, n, points[n].score_at(weight)))
    return tuple(rows)


def _interval(measured: _Measured, objective: Objective) -> tuple[float, float] | None:
    """Interval of the first metric from the run-to-run noise; None if nothing was measured here."""
    if measured.run.spec.provenance is not Provenance.MEASURED:
        return None
    value = measured.metrics[objective.metrics[0]] * objective.terms[0].scale
    state = measured.run.state
    runs = state.losses_by_config()
    own = runs.pop(measured.trial.config, [value] * measured.runs)
    noise = estimate_noise(list(runs.values()), list_spreads(state.trials.select(TrialState.ADMITTED)), own=[own])
    interval = confidence_interval([value] * measured.runs, noise)
    return interval.low, interval.high


def _grow(
    runs: Sequence[Run],
    measured: Sequence[_Measured],
    spread_NM: Floats,
    reference_M: Floats,
    total: float,
) -> tuple[float, ...]:
    """Share of the hypervolume after each trial that costs budget, in order; a failed trial repeats the last share."""
    rows = {(m.run.spec.run_id, m.trial.number): n for n, m in enumerate(measured)}
    order, shares = [], []
    for run in runs:
        for trial in sorted(run.state.trials.values(), key=lambda t: (t.finished_s or float("inf"), t.number)):
            if not trial.costs_budget or trial.outcome is None:
                continue
            row = rows.get((run.spec.run_id, trial.number))
            if row is not None:
                order.append(row)
            shares.append(len(order))
    if not order:
        return ()
    by_count = np.concatenate([[0.0], cumulative_hypervolume(spread_NM[order], reference_M)]) / total
    return tuple(float(by_count[count]) for count in shares)


def _notes(runs: Sequence[Run], without_scores: bool) -> tuple[str, ...]:
    notes = [line for run in runs for line in (*run.state.damage, *run.spec.banner)]
    if runs[0].spec.provenance is not Provenance.MEASURED:
        notes.append("the noise of the source is unknown, so no intervals are drawn")
    if without_scores:
        notes.append("no scores: a metric of the objective was not measured in every admitted trial")
    return tuple(dict.fromkeys(clean(line) for line in notes))


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(repr(run.spec.run_id) for run in runs)
