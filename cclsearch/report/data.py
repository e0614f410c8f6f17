"""The content of a report as plain data: pages, charts and tables read this and never a ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cclsearch.charts.timeline import Lane
from cclsearch.charts.trials import NeighborPoint
from cclsearch.core.metrics import MetricInfo
from cclsearch.core.values import Provenance
from cclsearch.report.evidence import TurnView
from cclsearch.report.rows import TrialRow
from cclsearch.tasks.base import Task


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
    """Properties that two comparable runs of a task share, such as model, batch and precision."""
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
    """Number of admitted trials, and of the other ends."""
    best: int | None
    baseline: int | None
    facts: tuple[tuple[str, str], ...]
    """Label and figure at the head of the page."""
    confidence: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None
    """Interval of the best trial's score; None if it is unknown."""
    drift: tuple[str, ...] = ()
    """Comparison of each window of the cluster with the first, one sentence each."""
    other_load: tuple[str, ...] = ()
    """Figures of the best on a second load that trials measured too."""
    neighbors: tuple[NeighborPoint, ...] = ()
    costs: tuple[tuple[str, str], ...] = ()
    notes: tuple[tuple[str, str], ...] = ()
    """Topic and text of the search's notes."""
    tags: tuple[str, ...] = ()
    launch: str = ""
    """Shell script that runs the best configuration by hand; empty without a best."""
    created: str = ""
    folder: Path | None = None
    """Folder of the run, for links relative to the page; None: no links."""
    damage: tuple[str, ...] = ()
    """Faults of the ledger."""
    job_script: str = ""
    """The script that ran the best trial; empty if there is none."""
    importance: Mapping[str, float] = field(default_factory=dict)
    """Knob -> its share of the figure's variation."""
    step: StepOfRanks | None = None
    """One step of the best trial; None without traces."""
    turns: tuple[TurnView, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    """Environment of the run: versions, nodes, hash of the inputs."""

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
