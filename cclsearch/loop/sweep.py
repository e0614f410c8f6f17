"""Sweeps: one search for a whole Pareto front. Each configuration is measured once and scored at every weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from cclsearch.card.model import Card
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import NUM_ACCELERATORS
from cclsearch.core.values import Model
from cclsearch.loop.drive import start_run
from cclsearch.plan.plan import Plan, plan_search
from cclsearch.plan.request import SearchRequest, load_requested, refuse_unlike
from cclsearch.plan.target import choose_target
from cclsearch.recording.join import find_family, join_recordings
from cclsearch.recording.load import load_recording
from cclsearch.scoring.catalog import find_metric
from cclsearch.scoring.objective import MAX_PARETO_METRICS, Objective, load_objective, single_metric
from cclsearch.stats.pareto import parse_weights
from cclsearch.tasks.base import find_task

SWEEP_FILE = "sweep.json"
WEIGHT = "weight"
"""The objective's parameter that a sweep varies."""
DEFAULT_WEIGHTS = parse_weights("0:1:0.1")
JOINED_FOLDER = "recordings"


class Sweep(Model):
    """Objective and weights of a sweep: `sweep.json` next to `search.yaml`."""

    schema_version: int = 1
    objective: str
    """Objective as the command line gave it."""
    weights: tuple[float, ...] = ()
    """Empty for an objective without weights."""
    at_0: Objective | None = None
    """The objective at weight 0 and at weight 1; its score is linear in the weight."""
    at_1: Objective | None = None

    def scores(self, metrics: Mapping[str, float], baseline: Mapping[str, float] | None) -> tuple[float, float]:
        """Return the scores at weight 0 and at weight 1 (greater is better); they are linear in the weight.

        References that the objective leaves open are the baseline's metrics. Raises TrialError if a metric is missing.
        """
        if self.at_0 is None or self.at_1 is None:
            raise ValueError(f"objective {self.objective!r} has no weights")
        low, high = (o.score(metrics, baseline if o.needs_baseline else None) for o in (self.at_0, self.at_1))
        return low, high


def describe_sweep(spec: str | None, weights: Sequence[float] | None = None, *, task: str) -> tuple[Sweep, Objective]:
    """Return the sweep over an objective (None: the task's), and the objective that its search uses.

    Without `weights` the sweep uses `DEFAULT_WEIGHTS`. Raises UserError if the objective has neither a weight nor
    several metrics, or if weights are given for one that has none.
    """
    spec = spec or find_task(task).sweep
    objective = load_objective(spec, task=task) if spec else trade_off(task)
    if objective.is_multi:
        if weights is not None:
            raise UserError(f"--weights: objective {objective.name!r} has several metrics and no parameter {WEIGHT!r}")
        return Sweep(objective=objective.spec), objective
    if not objective.is_weighted or WEIGHT not in objective.parameters:
        raise UserError(
            f"a sweep needs an objective with a parameter {WEIGHT!r} or with several metrics (`composite`, `pareto`);"
            f" {objective.name!r} has neither"
        )
    at = {w: load_objective(objective.name, {**objective.parameters, WEIGHT: w}, task=task) for w in (0.0, 0.5, 1.0)}
    _check_linear(at)
    sweep = Sweep(
        objective=objective.spec,
        weights=tuple(DEFAULT_WEIGHTS if weights is None else weights),
        at_0=at[0.0],
        at_1=at[1.0],
    )
    return sweep, drop_weights(objective)


def trade_off(task: str) -> Objective:
    """Return the objective of a task's primary metric against the number of accelerators, without weights."""
    return make_pareto_objective((find_task(task).primary, NUM_ACCELERATORS), task)


def make_pareto_objective(metrics: Sequence[str], task: str) -> Objective:
    """Return the unweighted objective of these two or three metrics; raises UserError for an unknown metric."""
    if not 2 <= len(set(metrics)) <= MAX_PARETO_METRICS or len(set(metrics)) < len(metrics):
        raise UserError(f"a Pareto front needs two or three different metrics, not {', '.join(metrics) or 'none'}")
    found = [find_metric(name, "--metrics", task=task) for name in metrics]
    for info in found:
        if info.direction is None:
            raise UserError(
                f"--metrics: {info.name} has no better direction of its own; name an objective that gives its"
                " `direction` (`--objective FILE`)"
            )
    terms = tuple(single_metric(info).terms[0] for info in found)
    return Objective(name="pareto", description="given on the command line", terms=terms)


def drop_weights(objective: Objective) -> Objective:
    """Return the objective with its metrics as separate objectives, without weights."""
    if objective.is_multi:
        return objective
    terms = tuple(term.model_copy(update={"weight": None, "reference": None}) for term in objective.terms)
    return objective.model_copy(update={"terms": terms, "parameters": {}})


def plan_sweep(
    request: SearchRequest, objective: str | None, weights: Sequence[float] | None, joined: Path
) -> tuple[Plan, Sweep]:
    """Return the search of a sweep over an objective (None: the task's), and the sweep; UserError if it cannot work.

    The request's own objective, which may be the project's, does not count. If only a recording applies, recordings of
    the same work on other numbers of accelerators are joined with it, in the folder `joined`.
    """
    card = load_requested(request)
    sweep, searched = describe_sweep(objective, weights, task=card.task)
    request, notes = _join_family(replace(request, use_fewer=True), card, joined)
    plan = plan_search(replace(request, objective=searched))
    spec = plan.spec.model_copy(update={"banner": (*notes, *plan.spec.banner)})
    return replace(plan, spec=spec), sweep


def create_sweep(plan: Plan, sweep: Sweep, runs_folder: Path) -> Path:
    """Create the run's folder with its frozen inputs and the sweep's."""
    return start_run(plan.spec, runs_folder, extra_files={SWEEP_FILE: sweep.model_dump_json(indent=1) + "\n"})


def read_sweep(folder: Path) -> Sweep | None:
    """Return the sweep of a run; None if the run is not a sweep. Raises UserError if the file is damaged."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        return None
    try:
        return Sweep.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}") from None


def _join_family(request: SearchRequest, card: Card, joined: Path) -> tuple[SearchRequest, tuple[str, ...]]:
    """Return the request over the joined recordings, with notes, if only a recording applies."""
    target = choose_target(
        card,
        launcher=request.launcher,
        recording=request.recording,
        in_allocation=request.in_allocation,
        may_simulate=request.may_simulate,
    )
    if target.recording is None:
        return request, ()
    chosen = load_recording(target.recording)
    refuse_unlike(request, chosen.card, chosen.name)
    family = find_family(target.recording)
    sizes = {recording.card.hardware.num_accelerators for recording in family}
    folder = target.recording if len(sizes) < 2 else join_recordings(family, joined)
    # The plan is now given a recording by name and cannot note why it was chosen, so the notes are passed on.
    return replace(request, recording=str(folder), launcher=None), target.notes


def _check_linear(at: Mapping[float, Objective]) -> None:
    for low, middle, high in zip(at[0.0].terms, at[0.5].terms, at[1.0].terms, strict=True):
        ends = ((low.weight or 0.0) + (high.weight or 0.0)) / 2
        same = (low.reference, low.scale) == (middle.reference, middle.scale) == (high.reference, high.scale)
        if abs((middle.weight or 0.0) - ends) > 1e-9 or not same:
            name = at[0.0].name
            raise UserError(
                f"a sweep needs {WEIGHT!r} to enter each metric's weight linearly, and nothing else; in {name!r}"
                f" it does not for {low.metric}"
            )
