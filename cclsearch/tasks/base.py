"""A task: a kind of workload, and everything about it that the engine does not know.

A plugin subclasses `Task`, sets its attributes, and registers one instance:

    from cclsearch.plugins import TASKS
    from cclsearch.tasks.base import Task

    class MyTask(Task):
        name = "my-task"
        ...

    TASKS.register("my-task")(MyTask())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cclsearch.card.fields import CardField
from cclsearch.card.model import Card
from cclsearch.core.metrics import MetricInfo
from cclsearch.core.values import Value
from cclsearch.plugins import TASKS


class Task:
    """One kind of workload: measurements, run contract, admission rules, space rules, predictor and words."""

    name: str
    """Name in a card's `workload.task`."""
    metrics: tuple[MetricInfo, ...]
    """What its trials measure, or derive from the run script's result and the card."""
    primary: str
    """The metric that searches optimize by default, and that reports show of every trial; always above 0."""
    objective: str | None = None
    """The objective of a search that names none (a file in `objectives/`); None: the primary metric."""
    highlights: tuple[str, ...] = ()
    """Metrics that summaries show beside the primary one, in order."""
    efficiency: tuple[str, ...] = ()
    """Metrics that tables show beside the primary one, such as those per accelerator."""
    causes: tuple[str, ...] = ()
    """Metrics that charts draw the primary one against."""
    compared: tuple[str, ...] = ()
    """Further metrics by which reports compare the best trial with the baseline."""
    card_fields: tuple[CardField, ...] = ()
    """Fields of a card that describe the work; their values are in `Card.work`."""
    needs_model: bool = True
    """Whether a card must describe a model."""
    rules: tuple[str, ...] = ()
    """Names of the rules that apply to the space of every framework."""
    numbers: Mapping[str, Callable[[Card], int]] = {}
    """Numbers of a card whose divisors a framework's knob may take as choices (`divisors_of`)."""

    @property
    def primary_metric(self) -> MetricInfo:
        """The properties of the primary metric."""
        return self.metric(self.primary)

    def metric(self, name: str) -> MetricInfo:
        """The properties of a metric, if need be only its name: metrics of traces are not listed in `metrics`."""
        unknown = MetricInfo(name=name, unit=None, direction=None, source="trace")
        return next((metric for metric in self.metrics if metric.name == name), unknown)

    def describe_work(self, card: Card) -> str:
        """The card's work in one phrase, for reports and prompts."""
        return ", ".join(f"{name} {value}" for name, value in card.work.items())

    # words and inputs of the LLM agent

    tuned: str = "how a workload uses its accelerators"
    """What configurations change: the end of a sentence that begins with `You tune`."""
    unit_of_work: str = "run"
    """What the primary metric measures, which has the parts that the closed form predicts: one word."""

    def describe_primary(self) -> str:
        """The primary metric with its unit, in words."""
        return self.primary_metric.words_with_unit

    def describe_for_agent(self, card: Card) -> list[str]:
        """Lines of a prompt about the card's work; the model and the hardware have lines of their own."""
        return [f"fixed work: {self.describe_work(card)}"]

    def policy_inputs(self, card: Card) -> dict[str, Value]:
        """The work as policy programs get it in `workload`."""
        return dict(card.work)

    def seed_policy(self, card: Card) -> str | None:
        """Name of the shipped policy program that fits the card; None if there is none."""
        return None


def task_of(card: Card) -> Task:
    """The task of a card; raises UserError if there is none of its name."""
    task: Task = TASKS.get(card.task)
    return task
