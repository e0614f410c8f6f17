"""Sweeps: one search over a whole front. Each configuration is measured once and scored under every weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from cclsearch.card.load import load_card
from cclsearch.core.errors import UserError
from cclsearch.core.values import Model
from cclsearch.plan.plan import Plan, SearchRequest, plan_search, require_recorded
from cclsearch.plan.target import choose_target
from cclsearch.recording.join import find_family, join_recordings
from cclsearch.recording.load import load_recording
from cclsearch.score.objective import Objective, load_objective, require_measurable
from cclsearch.search.session import create_run
from cclsearch.space.framework import load_framework
from cclsearch.stats.pareto import parse_weights

SWEEP_FILE = "sweep.json"
WEIGHT = "weight"
"""The parameter of an objective that a sweep varies."""
DEFAULT_WEIGHTS = parse_weights("0:1:0.1")
STRATEGY = "pareto"
JOINED_FOLDER = "recordings"


class Sweep(Model):
    """What a sweep varies, frozen beside `search.yaml`."""

    schema_version: int = 1
    objective: str
    """As asked for."""
    weights: tuple[float, ...] = ()
    """Empty for an objective without weights."""
    at_0: Objective | None = None
    """The objective at weight 0 and at weight 1; between them its score is linear."""
    at_1: Objective | None = None

    def scores(self, metrics: Mapping[str, float], baseline: Mapping[str, float] | None) -> tuple[float, float]:
        """The score at weight 0 and at weight 1, the greater the better; between them it is linear in the weight.

        The references are the baseline's metrics where they are open. Raises TrialError where a metric is missing.
        """
        if self.at_0 is None or self.at_1 is None:
            raise ValueError(f"objective {self.objective!r} has no weights")
        low, high = (o.score(metrics, baseline if o.needs_baseline else None) for o in (self.at_0, self.at_1))
        return low, high


@dataclass(frozen=True)
class SweepPlan:
    """A sweep that could start: nothing was submitted yet."""

    plan: Plan
    sweep: Sweep


def describe_sweep(spec: str, weights: Sequence[float] | None = None) -> tuple[Sweep, Objective]:
    """The sweep over that objective and the objective that its search runs under; without `weights`, at
    `DEFAULT_WEIGHTS`. Raises UserError where it has neither a weight nor several metrics, and where weights are given
    for one without."""
    target = load_objective(spec)
    if target.is_multi:
        if weights is not None:
            raise UserError(f"--weights: objective {target.name!r} has several metrics and no parameter {WEIGHT!r}")
        return Sweep(objective=target.spec), target
    if not target.is_weighted or WEIGHT not in target.parameters:
        raise UserError(
            f"a sweep needs an objective with a parameter {WEIGHT!r} or with several metrics (`composite`, `pareto`);"
            f" {target.name!r} has neither"
        )
    at = {w: load_objective(target.name, {**target.parameters, WEIGHT: w}) for w in (0.0, 0.5, 1.0)}
    _check_linear(at)
    sweep = Sweep(
        objective=target.spec,
        weights=tuple(DEFAULT_WEIGHTS if weights is None else weights),
        at_0=at[0.0],
        at_1=at[1.0],
    )
    return sweep, open_front(target)


def open_front(target: Objective) -> Objective:
    """The objective's metrics beside each other, none weighed against another."""
    if target.is_multi:
        return target
    terms = tuple(term.model_copy(update={"weight": None, "reference": None}) for term in target.terms)
    return target.model_copy(update={"terms": terms, "parameters": {}})


def plan_sweep(request: SearchRequest, weights: Sequence[float] | None, joined: Path) -> SweepPlan:
    """Resolve and freeze a sweep. Where only a recording applies, the recordings of the same work on other numbers of
    accelerators join it, under the folder `joined`. Raises UserError for whatever cannot work."""
    sweep, objective = describe_sweep(request.objective, weights)
    request = replace(request, use_fewer=True, strategy=request.strategy or (None if request.llm else STRATEGY))
    request, hint = _join_family(request, joined)
    plan = plan_search(replace(request, objective="step_time"))
    if plan.spec.recording is not None:
        require_recorded(objective, load_recording(plan.spec.recording.folder))
    else:
        require_measurable(objective, load_framework(plan.spec.framework))
    spec = plan.spec.model_copy(update={"objective": objective, "banner": (*hint, *plan.spec.banner)})
    return SweepPlan(replace(plan, spec=spec), sweep)


def create_sweep(planned: SweepPlan, runs_folder: Path) -> Path:
    """Make the run's folder with its frozen inputs and what it varies."""
    return create_run(planned.plan, runs_folder, beside={SWEEP_FILE: planned.sweep.model_dump_json(indent=1) + "\n"})


def read_sweep(folder: Path) -> Sweep | None:
    """What the sweep in a run folder varies; None where the run was no sweep. Raises UserError where it is damaged."""
    path = folder / SWEEP_FILE
    if not path.is_file():
        return None
    try:
        return Sweep.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}") from None


def _join_family(request: SearchRequest, joined: Path) -> tuple[SearchRequest, tuple[str, ...]]:
    """The request over the joined recordings where only a recording applies, and what must be said of that."""
    card = load_card(request.workload, overlays=request.overlays, sets=request.sets)
    target = choose_target(
        card, launcher=request.launcher, recording=request.recording, in_allocation=request.in_allocation
    )
    if target.recording is None:
        return request, ()
    family = find_family(target.recording)
    sizes = {recording.card.hardware.num_accelerators for recording in family}
    folder = target.recording if len(sizes) < 2 else join_recordings(family, joined)
    # the recording is named to the plan from here on, which then has no reason to say why it was chosen
    return replace(request, recording=str(folder), launcher=None), target.banner


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
