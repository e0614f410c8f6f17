"""The figure that a search optimizes, in its own words and unit."""

from __future__ import annotations

from dataclasses import dataclass

from cclsearch.core.metrics import Direction, MetricInfo
from cclsearch.record.trial import Trial
from cclsearch.report.figures import describe_difference, describe_gain, format_value
from cclsearch.run.spec import RunSpec
from cclsearch.scoring.objective import Objective
from cclsearch.tasks.base import task_of

# One decimal would round it to 100 %.
MAX_SHARE = 0.9995
"""Share from which a share below 1 is not written in percent with one decimal."""


@dataclass(frozen=True)
class ObjectiveFigure:
    """The figure by which trials are ranked; the first metric of an objective with several metrics without weights."""

    metric: MetricInfo
    """Its words, unit and better direction."""
    objective: Objective | None = None
    """None if the figure is a metric as it was measured."""

    def value(self, trial: Trial) -> float | None:
        """The figure of a finished trial, ranked or not; None if it has none."""
        outcome, objective = trial.outcome, self.objective
        if outcome is None:
            return None
        if objective is None:
            return outcome.metrics.get(self.metric.name)
        if trial.loss is not None:
            return objective.score_from_loss(trial.loss)
        measured = None if objective.is_weighted else outcome.metrics.get(objective.metrics[0])
        return None if measured is None else measured * objective.terms[0].scale

    def format(self, trial: Trial) -> str:
        """The figure with its unit, or `no step time`."""
        value = self.value(trial)
        return f"no {self.metric.words}" if value is None else format_value(self.metric, value)

    def compare(self, other: Trial, best: Trial) -> str:
        """Compare the figure of another trial with the best: `step time 3.97% longer`."""
        theirs, ours = self.value(other), self.value(best)
        if theirs is None or ours is None:
            return f"no {self.metric.words}"
        if min(theirs, ours) <= 0:
            return f"{self.metric.words} {format_value(self.metric, theirs)}"
        return f"{self.metric.words} {describe_difference(self.metric, theirs, ours)}"

    def describe_gain(self, old: Trial, new: Trial) -> str:
        """Gain of the new trial over the old one: `2.72x faster`; empty if no ratio says so."""
        theirs, ours = self.value(old), self.value(new)
        if theirs is None or ours is None or min(theirs, ours) <= 0:
            return ""
        return describe_gain(self.metric, theirs, ours)


def find_figure(spec: RunSpec) -> ObjectiveFigure:
    """Return the figure that a search optimizes: the task's primary metric itself, another metric, or a score."""
    objective, primary = spec.objective, task_of(spec.card).primary_metric
    term = objective.terms[0]
    if objective.is_weighted:
        name = f"{objective.name} score"
        return ObjectiveFigure(
            MetricInfo(name=name, unit=None, direction=Direction.MAXIMIZE, source="result"), objective
        )
    if term.metric == primary.name and term.scale == 1.0:
        return ObjectiveFigure(primary)
    known = task_of(spec.card).metric(term.metric)
    return ObjectiveFigure(known.model_copy(update={"unit": term.unit, "direction": term.direction}), objective)


def format_share(share: float) -> str:
    """A probability or confidence in percent, which is never rounded to 100 %: `93%`, `99.7%`, `more than 99.9%`."""
    if share >= MAX_SHARE:
        return "more than 99.9%"
    return f"{share:.1%}" if share >= 0.99 else f"{share:.0%}"
