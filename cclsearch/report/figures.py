"""A metric's values with their unit, two values compared in words, and the figure that a search optimizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cclsearch.core import text
from cclsearch.core.metrics import METRICS, Direction, MetricInfo
from cclsearch.record.trial import Trial
from cclsearch.run.spec import RunSpec
from cclsearch.scoring.objective import Objective
from cclsearch.tasks.base import Task, task_of


def format_value(metric: MetricInfo, value: float) -> str:
    """The value with its unit, to four digits: `0.1736 s`, `12,345 requests/s`, `45.31%`, `3.221 GB`."""
    if metric.unit == "fraction":
        return f"{value:.2%}"
    if metric.unit == "B":
        return text.format_value(value, metric.unit)
    return f"{f'{value:.4g}' if metric.is_time else text.show_number(value, 4)} {metric.unit or ''}".rstrip()


def show_interval(figures: Mapping[str, Any], name: str, show: Callable[[float], str]) -> str:
    """The predicted figure of that name, with the ends of its 80 % interval in brackets if it has one."""
    ends = [show(figures[f"{name}{end}"]) for end in ("_low", "_high") if f"{name}{end}" in figures]
    return f"{show(figures[name])} [{' to '.join(ends)}]" if ends else show(figures[name])


def show_value(metric: MetricInfo, value: float) -> str:
    """The value to three digits, with its unit unless the metric's words contain it: `33.1 GiB`, `12,345`, `45.3%`."""
    if metric.unit == "fraction":
        return f"{value:.1%}"
    if metric.unit == "B":
        return format_value(metric, value)
    return f"{text.show_number(value)} {metric.shown_unit}".rstrip()


def name_value(metric: MetricInfo, value: float) -> str:
    """The value with the metric's words: `peak memory 33.1 GiB`, `12,345 tokens/s per accelerator`, `MFU 45.3%`."""
    shown = show_value(metric, value)
    if shown == "1" and metric.words == metric.unit:
        return f"1 {metric.words.removesuffix('s')}"
    return f"{shown} {metric.words}" if metric.has_unit_in_words else f"{metric.words} {shown}"


def describe_metric(task: Task, name: str, value: float) -> str:
    """A metric of a trial in a line of its own: `step time: 0.1736 s`; a metric without words has its name."""
    metric = find_shown_metric(task, name)
    shown = format_value(metric, value)
    return f"{metric.words}: {shown.removesuffix(metric.words).rstrip() if metric.has_unit_in_words else shown}"


def find_shown_metric(task: Task, name: str) -> MetricInfo:
    """Words and unit of a metric of the task or of the traces; of one of the run script only the name is known."""
    known = task.metric(name)
    if known.label or name not in METRICS.names():
        return known
    unit = known.unit or getattr(METRICS.get(name), "unit", None)
    return known.model_copy(update={"unit": unit, "label": name.removesuffix("_frac").replace("_", " ")})


def name_values(metric: MetricInfo) -> str:
    """The metric's words in the plural: `step times`, `values of MFU`."""
    if metric.words == metric.unit:
        return f"numbers of {metric.words}"
    return f"{metric.words}s" if metric.words.endswith("time") else f"values of {metric.words}"


def describe_difference(metric: MetricInfo, other: float, best: float) -> str:
    """Compare another value with the best one, both above 0: `2.62x as long`, `3.97% longer`, `12.50% lower`."""
    ratio = other / best
    more, less, as_much = ("longer", "shorter", "as long") if metric.is_time else ("higher", "lower", "as high")
    return f"{ratio:.3g}x {as_much}" if ratio >= 1.1 else f"{abs(ratio - 1):.2%} {more if ratio >= 1 else less}"


def describe_gain(metric: MetricInfo, old: float, new: float) -> str:
    """Gain of the new value over the old one: `2.72x faster`, `5.00% better`, `not faster`."""
    gain, better = find_gain(metric, old, new), name_better(metric)
    return f"{gain:.3g}x {better}" if gain >= 1.1 else f"{gain - 1:.2%} {better}" if gain >= 1 else f"not {better}"


def find_gain(metric: MetricInfo, old: float, new: float) -> float:
    """Factor by which the new value is better, both above 0; below 1 if it is worse."""
    return new / old if metric.greater_is_better else old / new


def name_better(metric: MetricInfo) -> str:
    """`faster` for times, else `better`."""
    return "faster" if metric.is_time else "better"


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
