"""Objectives: metrics with direction, weight, reference and constraints, declared in `objectives/*.yaml`.

A search minimizes the `loss`. For one metric it is the metric itself (if greater is better: its reciprocal if it is
always positive, else its negative). For weighted metrics it is `1 / score` with `score = sum of w x reference/value`
(`value/reference` if greater is better), so that it is positive and the greatest score wins. For several metrics
without weights (Pareto) the loss is the first metric's, and `values` returns all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cclsearch.card.task import TASKS
from cclsearch.core.content import find_content
from cclsearch.core.errors import TrialError, UserError
from cclsearch.core.metrics import Direction, MetricInfo
from cclsearch.core.registry import describe_broken_plugins
from cclsearch.core.values import Failure, FailureKind, Model, Stage
from cclsearch.scoring.catalog import find_metric, list_metrics
from cclsearch.scoring.declaration import (
    BASELINE,
    ConstraintDeclaration,
    MetricDeclaration,
    ObjectiveDeclaration,
    Parameters,
    evaluate,
    parameter_names,
    read_constraint,
    read_declaration,
    resolve_parameters,
)
from cclsearch.scoring.trial_metric import TRIAL_METRICS
from cclsearch.scoring.units import convert_bound

if TYPE_CHECKING:
    from cclsearch.space.framework import Framework

MAX_PARETO_METRICS = 3


class Term(Model):
    """One metric of an objective, with every parameter filled in."""

    metric: str
    direction: Direction
    unit: str | None
    """Unit of the scaled value."""
    scale: float = 1.0
    weight: float | None = None
    reference: float | None = None
    """None together with a `weight` means the baseline trial's value."""
    reciprocal: bool = False
    """Whether its loss, if greater is better, is 1/value instead of -value."""
    missing: str = ""

    def minimized(self, value: float) -> float:
        """The scaled value, converted so that less is better."""
        scaled = value * self.scale
        if self.direction is Direction.MINIMIZE:
            return scaled
        return 1.0 / scaled if self.reciprocal else -scaled

    def restored(self, loss: float) -> float:
        """The scaled value for a loss: the inverse of `minimized`."""
        if self.direction is Direction.MINIMIZE:
            return loss
        return 1.0 / loss if self.reciprocal else -loss


class Constraint(Model):
    """Bounds that a trial must satisfy to be ranked."""

    metric: str
    at_least: float | None = None
    at_most: float | None = None
    unit: str | None = None
    missing: str = ""
    is_implied: bool = False
    """Whether the load demands it, not a person."""

    def __str__(self) -> str:
        """Return the text that users write: `peak_memory_gib <= 70 GiB`."""
        bounds = ((">=", self.at_least), ("<=", self.at_most))
        limits = " and ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)
        return f"{self.metric} {limits} {self.unit or ''}".rstrip()

    def broken_by(self, value: float) -> str | None:
        """Return why that value violates the constraint, in one line; None if it does not."""
        unit = f" {self.unit}" if self.unit else ""
        if self.at_least is not None and value < self.at_least:
            return f"{self.metric} must be at least {self.at_least:g}{unit}; it is {value:.4g}"
        if self.at_most is not None and value > self.at_most:
            return f"{self.metric} must be at most {self.at_most:g}{unit}; it is {value:.4g}"
        return None

    def excess(self, value: float) -> float:
        """Return the value's excess over the constraint, relative to the bound if that is not 0; else 0."""
        over = [] if self.at_most is None else [(value - self.at_most) / (abs(self.at_most) or 1.0)]
        under = [] if self.at_least is None else [(self.at_least - value) / (abs(self.at_least) or 1.0)]
        return max(0.0, *over, *under)


class Objective(Model):
    """The objective of a search; frozen and part of the run's hash."""

    name: str
    description: str
    terms: tuple[Term, ...]
    constraints: tuple[Constraint, ...] = ()
    parameters: dict[str, float | str | None] = {}

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the ranked metrics, in order."""
        return tuple(term.metric for term in self.terms)

    @property
    def needed_metrics(self) -> tuple[str, ...]:
        """Names of the ranked metrics, then of the constrained ones."""
        return (*self.metrics, *(constraint.metric for constraint in self.constraints))

    def what_needs(self, metric: str) -> str:
        """Return the name in messages for the part that needs the metric: the objective, or the constraint that bounds
        it.
        """
        bounds = [str(constraint) for constraint in self.constraints if constraint.metric == metric]
        return f"--objective {self.name}" if metric in self.metrics or not bounds else f"constraint {bounds[0]!r}"

    @property
    def is_weighted(self) -> bool:
        return self.terms[0].weight is not None

    @property
    def is_multi(self) -> bool:
        """Whether it has several metrics without weights (Pareto)."""
        return len(self.terms) > 1 and not self.is_weighted

    @property
    def needs_baseline(self) -> bool:
        """Whether a reference is the baseline trial's value."""
        return any(term.weight is not None and term.reference is None for term in self.terms)

    @property
    def spec(self) -> str:
        """Text from which `load_objective` loads this objective again: `composite:weight=0.3`."""
        given = ",".join(f"{name}={value}" for name, value in self.parameters.items() if value is not None)
        return f"{self.name}:{given}" if given else self.name

    def with_baseline(self, baseline: Mapping[str, float]) -> Objective:
        """The same objective with references filled in from the baseline trial's metrics."""
        filled = [
            term.model_copy(update={"reference": _positive(term, baseline, "the baseline trial's") * term.scale})
            if term.weight is not None and term.reference is None
            else term
            for term in self.terms
        ]
        return self.model_copy(update={"terms": tuple(filled)})

    def score(self, metrics: Mapping[str, float], baseline: Mapping[str, float] | None = None) -> float:
        """The displayed score: the scaled metric, or the weighted score (greater is better).

        Raises TrialError with the reason if a metric is missing or cannot be used; `baseline` may be left out if
        `needs_baseline` is False.
        """
        if not self.is_weighted:
            return _finite(self.terms[0], metrics) * self.terms[0].scale
        if self.needs_baseline:
            if baseline is None:
                raise ValueError(f"objective {self.name!r} needs the baseline trial's metrics")
            return self.with_baseline(baseline).score(metrics)
        return sum(_weighted_ratio(term, metrics) for term in self.terms)

    def loss(self, metrics: Mapping[str, float], baseline: Mapping[str, float] | None = None) -> float:
        """The finite value that a search minimizes; raises TrialError with the reason if a metric is missing."""
        if self.is_weighted:
            score = self.score(metrics, baseline)
            if score <= 0:
                _fail(f"{self.name}: the score must be above 0 to be ranked; it is {score:g}")
            return 1.0 / score
        return self.values(metrics)[0]

    @property
    def score_label(self) -> str:
        """Name of the displayed score, with its unit."""
        if self.is_weighted:
            return f"{self.name} score"
        term = self.terms[0]
        return f"{term.metric} ({term.unit})" if term.unit else term.metric

    def score_from_loss(self, loss: float) -> float:
        """The displayed score for a loss: the scaled first metric, or the weighted score."""
        return 1.0 / loss if self.is_weighted else self.terms[0].restored(loss)

    def values(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Each metric, converted so that less is better; raises TrialError with the reason if one is missing."""
        checks = ((term, _positive if term.reciprocal else _finite) for term in self.terms)
        return tuple(term.minimized(check(term, metrics)) for term, check in checks)

    def broken_constraints(self, metrics: Mapping[str, float]) -> tuple[str, ...]:
        """The violated constraints, one line each; raises TrialError if a metric of a constraint is missing."""
        broken = []
        for constraint in self.constraints:
            if constraint.metric not in metrics:
                _fail(f"{constraint.metric} is needed for a constraint of {self.name!r}: {constraint.missing}")
            line = constraint.broken_by(metrics[constraint.metric])
            if line:
                broken.append(line)
        return tuple(broken)

    def violation(self, metrics: Mapping[str, float]) -> float:
        """The sum over the constraints of their relative excess; 0 if all are satisfied, or none was measured."""
        return sum((c.excess(metrics[c.metric]) for c in self.constraints if c.metric in metrics), 0.0)


def single_metric(info: MetricInfo) -> Objective:
    """The objective of that metric alone."""
    direction = info.direction or Direction.MINIMIZE
    term = Term(
        metric=info.name,
        direction=direction,
        unit=info.unit,
        reciprocal=info.is_positive and direction is Direction.MAXIMIZE,
        missing=info.missing,
    )
    return Objective(name=info.name, description=info.words, terms=(term,))


def default_spec(task: str) -> str:
    """The objective of a search of that task that names none; raises UserError if there is no such task."""
    return str(TASKS.get(task).objective or TASKS.get(task).primary)


def load_objective(spec: str, parameters: Parameters | None = None, *, task: str | None = None) -> Objective:
    """The objective of that name, path, or `name:parameter=value,...` (`composite:weight=0.3`), or of a single metric.

    `parameters` override those of the spec. Metrics are those of `task`, or of all tasks if it is None. Raises
    UserError that names file and field for invalid content.
    """
    name, given = split_spec(spec)
    metric = list_metrics(task).get(name)
    try:
        path = find_content("objectives", name, ".yaml", ".yml")
    except UserError as error:
        by_code = TRIAL_METRICS.find(name) if metric is None else None
        metric = by_code.info if by_code else metric
        if metric is None or metric.direction is None or given or parameters:
            raise UserError(f"{error}{describe_broken_plugins()}") from None
        return single_metric(metric)
    return build_objective(read_declaration(path), name, {**given, **(parameters or {})}, path, task)


def choose_objective(objective: Objective | str | None, constraints: Sequence[str], *, task: str) -> Objective:
    """That objective, or the task's if it is None, with these further constraints (`peak_memory_gib <= 70`).

    Raises UserError as `load_objective` does, and for a malformed constraint.
    """
    if not isinstance(objective, Objective):
        objective = load_objective(objective or default_spec(task), task=task)
    added = []
    for text in constraints:
        where = f"--constraint {text!r}"
        added.append(_build_constraint(read_constraint(text, where), objective.parameters, f"{where}: ", task))
        _refuse_contradiction((*objective.constraints, *added), where)
    return objective.model_copy(update={"constraints": (*objective.constraints, *added)})


def _refuse_contradiction(constraints: Sequence[Constraint], where: str) -> None:
    """Raise UserError if no value of the last constraint's metric satisfies all bounds on it."""
    bounds = [c for c in constraints if c.metric == constraints[-1].metric]
    low = max((c.at_least for c in bounds if c.at_least is not None), default=-math.inf)
    high = min((c.at_most for c in bounds if c.at_most is not None), default=math.inf)
    if low > high:
        raise UserError(f"{where}: contradicts another bound: {bounds[0].metric} >= {low:g} and <= {high:g}")


def require_measurable(objective: Objective, framework: Framework, task: str) -> None:
    """Raise UserError if the objective needs a measurement that the run script does not record: no trial would score.

    A framework file states the optional measurements (energy) that its script records.
    """
    known = list_metrics(task)
    missing = {metric.name: metric.needs for metric in known.values() if metric.needs not in ("", *framework.records)}
    lacking = next((metric for metric in objective.needed_metrics if metric in missing), None)
    if lacking is not None:
        needs = missing[lacking]
        raise UserError(
            f"{objective.what_needs(lacking)}: needs {lacking}, and the run script of framework {framework.name!r}"
            f" records no {needs}: choose another (it has {', '.join(n for n in known if n not in missing)}),"
            f" or a framework of your own whose script writes it to result.json and whose file says"
            f" `records: [{needs}]` (docs/trial-contract.md of the repository)"
        )


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name and parameters of `composite:weight=0.3,reference_num_accelerators=16`; UserError if malformed."""
    name, colon, rest = spec.partition(":")
    if not colon or "=" not in rest:
        return spec, {}
    given = {}
    for part in rest.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise UserError(f"objective parameters are written `name:parameter=value,...`; {part!r} in {spec!r} is not")
        given[key.strip()] = value.strip()
    return name, given


def build_objective(
    declaration: ObjectiveDeclaration,
    name: str,
    given: Parameters,
    path: Path | str,
    task: str | None = None,
) -> Objective:
    """The objective for this declaration and these parameters; raises UserError that names file and field."""
    parameters = resolve_parameters(declaration.parameters, given, f"objective {name!r}")
    metrics = declaration.metrics
    weighted = [metric.weight is not None for metric in metrics]
    if any(weighted) and not all(weighted):
        unweighted = next(i for i, has in enumerate(weighted) if not has)
        raise UserError(f"{path}: metrics[{unweighted}].weight is missing: either every metric has a weight, or none")
    if not any(weighted) and len(metrics) > MAX_PARETO_METRICS:
        raise UserError(
            f"{path}: without weights there may be at most {MAX_PARETO_METRICS} metrics; there are {len(metrics)}"
        )
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: metrics: metric names must be unique; they are {', '.join(names)}")
    terms = tuple(_build_term(metric, parameters, f"{path}: metrics[{i}]", task) for i, metric in enumerate(metrics))
    if any(weighted) and sum(term.weight or 0.0 for term in terms) <= 0:
        raise UserError(f"{path}: metrics: the weights must add up to more than 0")
    constraints = tuple(
        _build_constraint(constraint, parameters, f"{path}: constraints[{i}].", task)
        for i, constraint in enumerate(declaration.constraints)
    )
    return Objective(
        name=name, description=declaration.description, terms=terms, constraints=constraints, parameters=parameters
    )


def _build_term(metric: MetricDeclaration, parameters: Parameters, where: str, task: str | None) -> Term:
    info = find_metric(metric.name, f"{where}.name", task=task, from_script=metric.source == "script")
    if None not in (metric.unit, info.unit) and metric.unit != info.unit:
        raise UserError(f"{where}.unit: {metric.name} is measured in {info.unit!r}, not in {metric.unit!r}")
    scale, unit = 1.0, metric.unit or info.unit
    if metric.scale is not None and not _is_left_out(metric.scale, parameters, f"{where}.scale"):
        scale, unit = _number(metric.scale, parameters, f"{where}.scale"), metric.scaled_unit or unit
        if scale <= 0:
            raise UserError(f"{where}.scale: must be above 0; it is {scale:g}")
    weight = None if metric.weight is None else _number(metric.weight, parameters, f"{where}.weight")
    if weight is not None and weight < 0:
        raise UserError(f"{where}.weight: must be at least 0; it is {weight:g}")
    return Term(
        metric=metric.name,
        direction=metric.direction,
        unit=unit,
        scale=scale,
        weight=weight,
        reference=_reference(metric, parameters, where),
        reciprocal=info.is_positive and metric.direction is Direction.MAXIMIZE,
        missing=info.missing,
    )


def _reference(metric: MetricDeclaration, parameters: Parameters, where: str) -> float | None:
    if metric.weight is None:
        if metric.reference is not None:
            raise UserError(f"{where}.reference: is allowed only together with a `weight`")
        return None
    if metric.reference is None:
        raise UserError(f"{where}.reference: is missing: a weighted metric needs a number, or `{BASELINE}`")
    reference = metric.reference
    if isinstance(reference, str):
        reference = reference.strip()
        if reference == BASELINE or parameters.get(reference) == BASELINE:
            return None
    value = _number(reference, parameters, f"{where}.reference")
    if value <= 0:
        raise UserError(f"{where}.reference: must be above 0, or `{BASELINE}`; it is {value:g}")
    return value


def _build_constraint(
    constraint: ConstraintDeclaration, parameters: Parameters, where: str, task: str | None
) -> Constraint:
    info = find_metric(constraint.metric, f"{where}metric", task=task, from_script=constraint.source == "script")
    low, high = (
        None if bound is None else _number(bound, parameters, f"{where}{field}")
        for field, bound in (("at_least", constraint.at_least), ("at_most", constraint.at_most))
    )
    if low is not None and high is not None and low > high:
        raise UserError(f"{where}at_least ({low:g}) must not be above at_most ({high:g})")
    try:
        low, high = (
            None if bound is None else convert_bound(bound, constraint.unit, constraint.metric, info.unit)
            for bound in (low, high)
        )
    except ValueError as error:
        raise UserError(f"{where}unit: {error}") from None
    unit = info.unit or constraint.unit
    return Constraint(metric=constraint.metric, at_least=low, at_most=high, unit=unit, missing=info.missing)


def _number(value: float | str, parameters: Parameters, where: str) -> float:
    if not isinstance(value, str):
        return float(value)
    numbers = {name: float(v) for name, v in parameters.items() if isinstance(v, int | float)}
    for name in parameter_names(value, where):
        if name in parameters and name not in numbers:
            raise UserError(f"{where}: {value!r} needs a number for {name!r}; it is {parameters[name]!r}")
    return evaluate(value, numbers, where)


def _is_left_out(scale: float | str, parameters: Parameters, where: str) -> bool:
    if not isinstance(scale, str):
        return False
    return any(name in parameters and parameters[name] is None for name in parameter_names(scale, where))


def _finite(term: Term, metrics: Mapping[str, float]) -> float:
    if term.metric not in metrics:
        _fail(f"{term.metric} was not measured: {term.missing}")
    value = metrics[term.metric]
    if not math.isfinite(value):
        _fail(f"{term.metric} must be finite; it is {value!r}")
    return value


def _positive(term: Term, metrics: Mapping[str, float], whose: str = "the trial's") -> float:
    value = _finite(term, metrics)
    if value <= 0:
        _fail(f"{whose} {term.metric} must be above 0 to be weighted; it is {value:g}")
    return value


def _weighted_ratio(term: Term, metrics: Mapping[str, float]) -> float:
    assert term.weight is not None
    assert term.reference is not None
    if term.direction is Direction.MINIMIZE:
        return term.weight * term.reference / (_positive(term, metrics) * term.scale)
    return term.weight * _finite(term, metrics) * term.scale / term.reference


def _fail(message: str) -> NoReturn:
    raise TrialError(Failure(stage=Stage.SCORE, kind=FailureKind.TRACE_UNREADABLE, message=message))
