"""The content of a report as plain data: pages, charts and tables read this and never a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from cclsearch.charts.timeline import Lane
from cclsearch.core.metrics import NUM_ACCELERATORS, MetricInfo
from cclsearch.core.values import Provenance, Value, format_config
from cclsearch.record.event import Purpose
from cclsearch.space.table import count_ranks
from cclsearch.tasks.base import Task


class RowState(StrEnum):
    """What became of a trial."""

    RANKED = "ranked"
    NOT_ADMITTED = "not admitted"
    ENDED_EARLY = "ended early"
    FAILED = "failed"
    RUNNING = "running"


RANKED, NOT_ADMITTED, ENDED_EARLY, FAILED, RUNNING = RowState
CONFIRMATION = Purpose.CONFIRMATION


@dataclass(frozen=True)
class AdmissionCheck:
    """One rule of the admission gate over one trial."""

    rule: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class TrialRow:
    """One trial. All text is plain: no control characters, no secrets."""

    number: int
    config: Mapping[str, Value]
    proposer: str
    rationale: str
    purpose: Purpose
    state: RowState
    reason: str = ""
    """Why it is not ranked."""
    failure_kind: str = ""
    score: float | None = None
    """The figure of the objective as shown to people; None unless the trial is ranked."""
    value: float | None = None
    """The primary metric; None unless the trial is ranked."""
    violation: float | None = None
    """By how much it violates the objective's constraints, relative to their bounds; None if it has no result."""
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    spread: float | None = None
    expected: Mapping[str, float] = field(default_factory=dict)
    """Metrics that were expected before the run."""
    checks: tuple[AdmissionCheck, ...] = ()
    notes: tuple[str, ...] = ()
    diagnosis: tuple[str, ...] = ()
    seconds_by_cause: Mapping[str, float] = field(default_factory=dict)
    evidence: str = ""
    """Folder of the trial's evidence, relative to the run folder."""
    files: tuple[str, ...] = ()
    """What there is in that folder, of what readers open: logs, result, trace."""
    wall_s: float | None = None
    """Seconds from proposal to end, queue time included; None while the trial runs or if nothing ran."""

    @property
    def config_text(self) -> str:
        return format_config(self.config)

    @property
    def accelerator_hours(self) -> float | None:
        if self.wall_s is None:
            return None
        return self.wall_s * self.metrics.get(NUM_ACCELERATORS, count_ranks(self.config)) / 3600


@dataclass(frozen=True)
class StepOfRanks:
    """One traced step of the best trial; without a best, of the first trial that has traces."""

    trial: int
    seconds_by_rank: Mapping[int, Mapping[str, float]]
    """Rank -> seconds by cause."""
    lanes: tuple[Lane, ...]
    worst_rank: int | None = None
    """The rank that the others wait for."""

    @property
    def waits(self) -> bool:
        return self.worst_rank is not None and len(self.seconds_by_rank) > 1


@dataclass(frozen=True)
class TurnMessage:
    """One message of a conversation with an LLM."""

    role: str
    """`system`, `engine` or `assistant`."""
    who: str
    text: str


@dataclass(frozen=True)
class TurnView:
    """One turn of the LLM as a conversation."""

    number: int
    summary: str
    messages: tuple[TurnMessage, ...]


@dataclass(frozen=True)
class Neighbor:
    """A configuration that differs from the winner in one or two knobs."""

    change: str
    """`tp 2 → 4, dp 8 → 4`."""
    ratio: float
    """Its primary metric divided by the winner's."""
    trial: int | None
    """None if it was predicted and not run."""


@dataclass(frozen=True)
class RunPage:
    """One run of a report."""

    run_id: str
    task: Task
    workload: str
    card: str
    title: str
    model: str
    """Name of the model; empty for a task without one."""
    work: str
    """What two runs of a task must share to be compared, such as model, batch and precision."""
    hardware: str
    framework: str
    provenance: str
    """`measured`, `recorded` or `simulated`."""
    objective: str
    constraints: tuple[str, ...]
    """The objective's, one phrase each."""
    score_label: str
    greater_is_better: bool
    status: str
    """`ended`, `running`, ..., with the reason."""
    banner: tuple[str, ...]
    """Notes to the operator on what runs where."""
    trials: tuple[TrialRow, ...]
    counts: str
    """How many trials were admitted and how the others ended."""
    best: int | None
    baseline: int | None
    facts: tuple[tuple[str, str], ...]
    """Label and figure at the head of the page."""
    confidence: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None
    """Interval of the best trial's score; None if it is unknown."""
    drift: tuple[str, ...] = ()
    """How each window of the cluster compares with the first, one sentence each."""
    other_load: tuple[str, ...] = ()
    """How the best does on a second load that trials measured too."""
    neighbors: tuple[Neighbor, ...] = ()
    costs: tuple[tuple[str, str], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    """Topic and text of the search's notes."""
    tags: tuple[str, ...] = ()
    launch: str = ""
    """How to run the best configuration by hand, as a shell script; empty without a best."""
    created: str = ""
    folder: Path | None = None
    """Where the run is, for links relative to the page; None: no links."""
    damage: tuple[str, ...] = ()
    """What is wrong with the ledger."""
    job_script: str = ""
    """The script that ran the best trial; empty if there is none."""
    importance: Mapping[str, float] = field(default_factory=dict)
    """Knob -> its share of the figure's variation."""
    step: StepOfRanks | None = None
    """One step of the best trial; None without traces."""
    turns: tuple[TurnView, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """What ran, and where: versions, nodes, hash of the inputs."""

    @property
    def metric(self) -> MetricInfo:
        """The task's primary metric."""
        return self.task.primary_metric

    @property
    def is_by_primary(self) -> bool:
        """Whether the objective ranks by the primary metric, alone or before others."""
        return self.score_label.split(" (")[0] == self.metric.words

    @property
    def best_trial(self) -> TrialRow | None:
        return next((trial for trial in self.trials if trial.number == self.best), None)

    @property
    def baseline_trial(self) -> TrialRow | None:
        return next((trial for trial in self.trials if trial.number == self.baseline), None)

    @property
    def mark(self) -> str:
        """` (recorded)` or ` (simulated)` if the figures were not measured here; else empty."""
        return Provenance(self.provenance).mark
