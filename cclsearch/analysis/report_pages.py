"""Report pages with parts that need the search space: predicted neighbors of the winner, and a sweep's Pareto front."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cclsearch.analysis.pareto import gather_pareto_page
from cclsearch.charts.chart import Chart
from cclsearch.charts.trials import NeighborPoint
from cclsearch.core.errors import UserError
from cclsearch.core.values import Config, Value
from cclsearch.loop.session import rebuild_space
from cclsearch.loop.sweep import read_sweep
from cclsearch.propose.base import Observation, SearchView
from cclsearch.propose.bayes.surrogate import fit_posterior
from cclsearch.record.event import Purpose
from cclsearch.report.data import RunPage, StepOfRanks
from cclsearch.report.gather import describe_change, gather_run
from cclsearch.report.pareto import draw_pareto_page
from cclsearch.report.rows import TrialRow
from cclsearch.run.folder import Run
from cclsearch.space.knobs import rank_degrees
from cclsearch.space.table import Space
from cclsearch.tasks.base import task_of
from cclsearch.trace.files.run_log import TRACE_FOLDER

# With fewer ranked trials an importance says nothing.
MIN_TRIALS = 6
"""Number of ranked trials from which importances are shown."""
MIN_SHARE = 0.001


def find_importance(trials: Sequence[TrialRow]) -> dict[str, float]:
    """Knob -> its share, the largest first; empty if too few trials are ranked or no knob varied.

    PED-ANOVA compares the best tenth of the trials with all of them (Watanabe et al., IJCAI 2023); it needs no forest.
    """
    ranked = [t for t in trials if t.loss is not None and t.purpose is not Purpose.CONFIRMATION]
    names = dict.fromkeys(knob for trial in ranked for knob in trial.config)
    values: dict[str, list[Value]] = {
        k: list(dict.fromkeys(t.config[k] for t in ranked if k in t.config)) for k in names
    }
    varied = {knob: known for knob, known in values.items() if len(known) > 1}
    kept = [trial for trial in ranked if all(knob in trial.config for knob in varied)]
    if len(kept) < MIN_TRIALS or not varied or len({trial.loss for trial in kept}) < 2:
        return {}
    shares = _ask_optuna(kept, varied)
    return {knob: share for knob, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= MIN_SHARE}


def _ask_optuna(trials: Sequence[TrialRow], varied: dict[str, list[Value]]) -> dict[str, float]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    choices: dict[str, Any] = {k: optuna.distributions.CategoricalDistribution(known) for k, known in varied.items()}
    study = optuna.create_study()
    for trial in trials:
        params = {knob: trial.config[knob] for knob in varied}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=choices, value=trial.loss))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares: dict[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {knob: share for knob, share in shares.items() if share == share}


MAX_PREDICTED = 8
"""Number of shown neighbors that did not run, with their predicted metric."""
# Fitting to N observations costs O(N^3).
MAX_OBSERVATIONS = 100
"""Number of trials of a long search that the prediction of neighbors uses."""
MAX_RANKS = 64
"""Number of ranks whose step is drawn."""
MIN_P_SUCCESS = 0.5
"""Minimum predicted probability of success of such a neighbor."""


def build_page(run: Run) -> RunPage:
    """The report page of a run, with what needs the search space, Optuna or the traces.

    That is what the calibrated model predicts for untried neighbors, the importance of knobs, and the best trial's
    step.
    """
    page = gather_run(run)
    return replace(
        page,
        neighbors=(*page.neighbors, *predict_neighbors(run)),
        importance=find_importance(page.trials),
        step=read_step(run),
    )


def read_step(run: Run) -> StepOfRanks | None:
    """One step of the best trial from its traces, else of the first trial that has any; None if none show a step."""
    trials = [run.state.best] if run.state.best else list(run.state.trials.values())
    trial = next((t for t in trials if t and (run.trial_folder(t.number) / TRACE_FOLDER).is_dir()), None)
    if trial is None:
        return None
    from cclsearch.trace.claims import find_lanes
    from cclsearch.trace.read import open_trace
    from cclsearch.trace.score import try_diagnose

    try:
        view = open_trace(run.trial_folder(trial.number), card=run.spec.card, config=trial.config)
    except UserError:
        return None
    diagnosis = try_diagnose(view)
    if diagnosis is None:
        return None
    by_rank = {
        rank: {cause.replace("_", " "): value for cause, value in seconds.items() if value > 0}
        for rank, seconds in list(diagnosis.seconds_by_rank.items())[:MAX_RANKS]
    }
    return StepOfRanks(trial.number, by_rank, find_lanes(view), diagnosis.worst_rank)


def draw_pareto_charts(runs: Sequence[Run]) -> list[Chart]:
    """Charts of the Pareto front if the only run is a sweep or has several metrics; else none."""
    if len(runs) != 1 or not (runs[0].spec.objective.is_multi or read_sweep(runs[0].folder)):
        return []
    try:
        return draw_pareto_page(gather_pareto_page(runs))
    except UserError:
        return []


def predict_neighbors(run: Run) -> list[NeighborPoint]:
    """Untried configurations one step from the winner, with predicted primary metrics relative to the winner's."""
    best, metric = run.state.best, task_of(run.spec.card).primary_metric
    value = best.outcome.metrics.get(metric.name) if best and best.outcome else None
    if best is None or not value:
        return []
    try:
        space = rebuild_space(run.spec)
    except UserError:
        return []
    steps = [row for row in neighbor_rows(space, best.config) if row is not None]
    observations = pick_nearest(run.state.trials.observe(space), best.config)
    view = SearchView(
        card=run.spec.card,
        space=space,
        observations=observations,
        pending=frozenset(),
        budget_left=1,
        seed=run.spec.seed,
        earlier=run.spec.earlier,
    )
    posterior = fit_posterior(view) if steps else None
    if posterior is None:
        return []
    index = {int(row): m for m, row in enumerate(posterior.rows_m)}
    found = []
    for row in steps:
        m = index.get(row)
        if m is not None and posterior.p_success_m[m] >= MIN_P_SUCCESS:
            ratio = float(posterior.value_m[m]) / value
            found.append(NeighborPoint(describe_change(best.config, space.config(row)), ratio, None))
    return sorted(found, key=lambda neighbor: metric.sign * neighbor.ratio)[:MAX_PREDICTED]


def pick_nearest(observations: Sequence[Observation], config: Config) -> Sequence[Observation]:
    """All observations, or the `MAX_OBSERVATIONS` that differ from the configuration in the fewest knobs."""
    # Fitting to N observations costs O(N^3), and the prediction of a neighbor depends mostly on the nearest ones.
    if len(observations) <= MAX_OBSERVATIONS:
        return observations
    by_steps = sorted(observations, key=lambda seen: sum(v != config.get(knob) for knob, v in seen.config.items()))
    return tuple(sorted(by_steps[:MAX_OBSERVATIONS], key=lambda observation: observation.trial))


def neighbor_rows(space: Space, config: Config) -> list[int | None]:
    """Rows one step away (next choice of a knob, or one degree up and another down); None if not in the space."""
    own = space.row(config)
    if own is not None:
        config = space.config(own)  # with knobs that were added since
    moved: list[dict[str, Value]] = []
    for knob in space.knobs:
        at = knob.choices.index(config.get(knob.name, knob.neutral))
        for other in (at - 1, at + 1):
            if 0 <= other < len(knob.choices):
                moved.append({**config, knob.name: knob.choices[other]})
    degrees = [knob for knob in space.knobs if knob.name in rank_degrees()]
    for up in degrees:
        for down in degrees:
            grown, shrunk = int(config[up.name]) * 2, int(config[down.name]) // 2
            if up is not down and shrunk * 2 == int(config[down.name]):
                moved.append({**config, up.name: grown, down.name: shrunk})
    rows = [space.row(change) for change in moved]
    return list(dict.fromkeys(row for row in rows if row is None or row != own))
