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

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from cclsearch.card.fields import CardField
from cclsearch.card.model import Card, StatedCard
from cclsearch.card.task import TASKS
from cclsearch.core.errors import UserError
from cclsearch.core.metrics import PEAK_MEMORY, MetricInfo
from cclsearch.core.values import Config, Failure, Value
from cclsearch.launch.contract import TrialInput, TrialResult
from cclsearch.scoring.admission import GENERAL_RULES
from cclsearch.scoring.agreement import Agreement
from cclsearch.scoring.catalog import GENERAL_METRICS
from cclsearch.scoring.derive import GIB, derive_general
from cclsearch.scoring.evidence import Diagnosed, Evidence
from cclsearch.scoring.outcome import Verdict
from cclsearch.scoring.trial_metric import TRIAL_METRICS
from cclsearch.space.table import Space, count_ranks

if TYPE_CHECKING:
    from cclsearch.scoring.objective import Objective
    from cclsearch.stats.closed_form import Predictor


class Task:
    """One kind of workload: measurements, run contract, admission rules, space rules, predictor and words."""

    name: str
    """Name in a card's `workload.task`."""
    metrics: tuple[MetricInfo, ...]
    """Metrics that its trials measure, or derive from the run script's result and the card."""
    primary: str
    """The metric that searches optimize by default and reports show of every trial; it must be `is_positive`."""
    rate: str | None = None
    """The metric that is work per second of everything that a trial uses; None if there is none."""
    objective: str | None = None
    """The objective of a search that names none (a file in `objectives/`); None: the primary metric."""
    sweep: str | None = None
    """The objective of a sweep that names none; None: the primary metric against the number of accelerators."""
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
    loads: Mapping[str, str] = {}
    """Columns of recordings that are a load, given and never chosen -> its metric; rows that differ only in their load
    are one trial, measured at each.
    """
    columns: Mapping[str, str] = {}
    """Columns that published tables have -> the metric or knob that each is."""
    primary_from: tuple[str, ...] = ()
    """Columns that a recording may have in place of the primary metric (`complete_recorded`)."""
    bench_limits: tuple[str, ...] = ()
    """Constraints; `bench` searches a recording whose trials have several loads under each of them."""
    per_accelerator: tuple[str, ...] = ("num_accelerators",)
    """Metrics that may be better with fewer accelerators: a search for one of them may leave some idle."""
    needs_model: bool = True
    """Whether a card must describe a model."""
    rules: tuple[str, ...] = ()
    """Names of the rules that apply to the space of every framework."""
    numbers: Mapping[str, Callable[[Card], int]] = {}
    """Numbers of a card whose divisors a framework's knob may take as choices (`divisors_of`)."""
    input: type[TrialInput] = TrialInput
    """The model of `config.json`."""
    result: type[TrialResult] = TrialResult
    """The model of `result.json`."""
    admission_rules: tuple[Callable[[Any], Verdict], ...] = GENERAL_RULES
    """The admission gate: functions from `Evidence` to a verdict, in display order."""
    agreement: Agreement | None = None
    """Values that the trials of one search must agree on, in every configuration; None if nothing is compared."""
    work_rules: Collection[str] = frozenset({"world_size"})
    """Rules of the gate whose violation means that the job did not do the requested work."""
    ends_early: bool = False
    """Whether its run scripts may end a trial early (`TrialInput.stop_above`); the primary metric is then minimized."""
    load_effects: Collection[str] = frozenset()
    """The rules that load of other processes may violate: if `load` is violated too, the trial is retried."""

    def __init_subclass__(cls) -> None:
        """Raise UserError if a search cannot optimize the primary metric: the surrogate models its logarithm."""
        metrics = {metric.name: metric for metric in (*GENERAL_METRICS, *getattr(cls, "metrics", ()))}
        primary = getattr(cls, "primary", None)
        if primary is not None and (primary not in metrics or not metrics[primary].is_positive):
            raise UserError(
                f"task {cls.name!r}: the primary metric {primary!r} must be one of its metrics, declared with"
                " `is_positive=True`: a search models its logarithm"
            )

    @property
    def primary_metric(self) -> MetricInfo:
        """The properties of the primary metric."""
        return self.metric(self.primary)

    def metric(self, name: str) -> MetricInfo:
        """The properties of a metric, if need be only its name: metrics of traces are not listed in `metrics`."""
        own = next((metric for metric in (*self.metrics, *GENERAL_METRICS) if metric.name == name), None)
        by_code = TRIAL_METRICS.find(name) if own is None else None
        unknown = MetricInfo(name=name, unit=None, direction=None, source="trace")
        return own or (by_code.info if by_code else unknown)

    def make_input(self, card: Card, config: Config, *, is_measured: bool, **fields: Any) -> TrialInput:
        """The `config.json` of a trial; `fields` are run, trial and seed, and the task's own if a subclass adds them.

        Nothing runs unless `is_measured`: a recorded or simulated trial needs no traces.
        """
        return self.input(
            config=config,
            work=dict(card.work),
            arch=card.model,
            precision=card.precision,
            num_ranks=count_ranks(config),
            ranks_per_node=card.hardware.accelerators_per_node,
            accelerator=card.hardware.accelerator,
            **fields,
        )

    def make_result(self, card: Card, metrics: Mapping[str, float], **fields: Any) -> TrialResult:
        """The `result.json` of a script that measured these metrics, for a recorded row; `fields` are other fields."""
        if PEAK_MEMORY in metrics:
            fields = {"peak_memory_bytes": (round(metrics[PEAK_MEMORY] * GIB),), **fields}
        return self.result(metrics={name: v for name, v in metrics.items() if name != PEAK_MEMORY}, **fields)

    def complete_recorded(
        self, data: Mapping[str, Any], metrics: Mapping[str, float], accelerators: float
    ) -> dict[str, float]:
        """The metrics of a recorded row with the primary one, if it follows from them and from the card's fields."""
        return dict(metrics)

    def complete_recorded_work(self, work: dict[str, Any], loads: Sequence[Mapping[str, float]]) -> list[str]:
        """Add to `workload.data` of a recording's card what its loads show, and return one line for each addition."""
        return []

    def choose_load(self, card: Card, loads: Sequence[Mapping[str, float]]) -> int | None:
        """Return the load whose metrics a trial gets that was measured at several; None if none was measured."""
        return 0 if loads else None

    def constrain(self, card: StatedCard, objective: Objective) -> Objective:
        """Return the objective of a search with the card's own limits."""
        return objective

    def freeze(self, card: Card, objective: Objective) -> Card:
        """Return the card that a search freezes, with the objective's demands on its work; UserError if they cannot be
        met.
        """
        return card

    def read_files(self, folder: Path, result: TrialResult) -> TrialResult:
        """Return the result with the run script's other files in the trial's folder."""
        return result

    def find_failure(self, result: TrialResult) -> Failure | None:
        """Return why a result that reports success cannot be evaluated; None if it can.

        The engine itself checks that the primary metric is measured, finite and above 0.
        """
        return None

    def measure(self, evidence: Evidence) -> tuple[dict[str, float], float | None]:
        """Metric -> finite value, only measured ones, and the relative spread of the primary metric if it is known."""
        return derive_general(evidence), None

    def diagnose(self, evidence: Evidence) -> Diagnosed:
        """Return the limits of a measured trial, in sentences, and seconds by cause, from its traces."""
        trace = evidence.trace
        return Diagnosed(trace.diagnosis, trace.seconds_by_cause) if trace else Diagnosed()

    def list_loads(self, evidence: Evidence) -> list[dict[str, float]]:
        """Return the surrogate's observations of each load, if a trial measures several and one of them counts."""
        return []

    def predictor(self, card: Card, space: Space) -> Predictor | None:
        """Return the task's prediction of a card over a space; None: everything is learned from the trials."""
        return None

    def count_units(self, payload: TrialInput) -> int | None:
        """Return the number of `unit_of_work` in a trial, if the primary metric is the seconds of one; None if it is
        not.
        """
        return None

    def saved_s(self, payload: TrialInput, result: TrialResult, primary: float) -> float:
        """Return the seconds that an early end saved, by the trial's measured primary metric."""
        return 0.0

    def other_metric(self, card: Card) -> MetricInfo | None:
        """The metric of other work that trials measure too: a winner that another trial beats there is warned of."""
        return None

    def share_load(self, card: Card, share: float) -> Card | None:
        """The card with about this share of its load; None if it has none that can be shared."""
        return None

    def describe_load(self, card: Card) -> str:
        """The size of such a load: `20 requests/s`."""
        return ""

    def remark(self, card: StatedCard) -> list[str]:
        """Lines about the card's work that a user should read before anything runs."""
        return []

    def describe_work(self, card: Card) -> str:
        """The card's work in one phrase, for reports and prompts."""
        return ", ".join(f"{name} {value}" for name, value in card.work.items())

    # words and inputs of the LLM agent

    tuned: str = "how a workload uses its accelerators"
    """Subject of the configurations: the end of a sentence that begins with `You tune`."""
    agent_metrics: tuple[str, ...] = ()
    """Metrics that the agent's tables show beside the primary one, if they follow from it."""
    agent_names: Mapping[str, str] = MappingProxyType({})
    """Name in the agent's tables, predictions and corrections -> its explanation, if it needs one."""
    diagnosed_unit: str = "traced step"
    """Span over which a diagnosis gives seconds by cause."""
    unit_of_work: str = "run"
    """Span that the primary metric measures, whose parts the closed form predicts: one word."""

    def describe_primary(self) -> str:
        """The primary metric with its unit, in words."""
        return self.primary_metric.words_with_unit

    def describe_for_agent(self, card: Card) -> list[str]:
        """Lines of a prompt about the card's work; the model and the hardware have lines of their own."""
        return [f"fixed work: {self.describe_work(card)}"]

    def agent_columns(self, card: Card, space: Space) -> Mapping[str, Sequence[float]]:
        """Column of the agent's tables -> a figure of every configuration that follows from it alone."""
        return {}

    def policy_inputs(self, card: Card) -> dict[str, Value]:
        """The work as policy programs get it in `workload`."""
        return dict(card.work)

    def seed_policy(self, card: Card) -> str | None:
        """Name of the shipped policy program that fits the card; None if there is none."""
        return None


def find_task(name: str) -> Task:
    """The task of that name; raises UserError if there is none."""
    return cast(Task, TASKS.get(name))


def task_of(card: Card) -> Task:
    """The task of a card; raises UserError if there is none of its name."""
    return find_task(card.task)
